"""The names of the files of `anp_folder` sets, without the import of tfds."""

import os

NAME = 'anp_folder'
VERSION = '1.0.0'


def folder(data_dir: str, name: str) -> str:
  """Returns the folder of the finished set `name`."""
  return os.path.join(data_dir, NAME, name, VERSION)


def shard(split: str, index: int, count: int) -> str:
  """Returns the file name of a split's shard, as tfds chooses it."""
  return f'{NAME}-{split}.array_record-{index:05}-of-{count:05}'
