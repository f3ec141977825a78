"""The names of the files of `anp_folder` sets, without the import of tfds."""

NAME = 'anp_folder'
VERSION = '1.0.0'


def shard(split: str, index: int, count: int) -> str:
  """Returns the file name of a split's shard, as tfds chooses it."""
  return f'{NAME}-{split}.array_record-{index:05}-of-{count:05}'
