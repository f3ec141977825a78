"""The names of the files of `anp_folder` sets, without the import of tfds."""

import os

NAME = 'anp_folder'
VERSION = '1.0.0'


def folder(data_dir: str, name: str) -> str:
  """Where the finished set `name` lies."""
  return os.path.join(data_dir, NAME, name, VERSION)


def shard(split: str, index: int, count: int) -> str:
  """The file of a split's shard, as tfds names it."""
  return f'{NAME}-{split}.array_record-{index:05}-of-{count:05}'
