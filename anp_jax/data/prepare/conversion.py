"""Copies a prepared set of TFRecord files as ArrayRecord files.

Examples are copied as they are stored, in their order and their shards, after
their checksums were verified. Random access to them is then tfds's own.
"""

from collections.abc import Callable
import os
import shutil
import time
from typing import NamedTuple

import numpy as np

from anp_jax import config as config_lib
from anp_jax.data.prepare import prepared_target as target_lib
from anp_jax.data.sources import tfds_set
from anp_jax.system import files as files_lib


class Records(NamedTuple):
  """The examples of a TFRecord file.

  Attributes:
    source: path of the file.
    count: examples that it has if it is whole.
  """

  source: str
  count: int

  def paths(self) -> list[str]:
    """Returns the path of the file."""
    return [self.source]


def prepare(flags) -> list[str]:
  """Makes the copy that the command line asks for, or finds it made.

  Args:
    flags: of `prepare.main`.

  Returns:
    Lines to print.

  Raises:
    ConfigError: if there is no such set, or a shard of it is damaged.
  """
  start = time.monotonic()
  place = flags.from_dir or flags.data_dir
  builder = tfds_set.open_builder(flags.source.removeprefix('tfds:'), place)
  source = os.fspath(builder.data_path)
  stored = builder.info.file_format.value
  if stored != 'tfrecord':
    raise config_lib.ConfigError(f'{source} is stored as {stored}, expected tfrecord')
  name = flags.name or f'{builder.name}_array_record'
  if not name.isidentifier():
    raise config_lib.ConfigError(f'--name={name!r}: expected letters, digits, _ for a copied set')
  # NAME/CONFIG/VERSION, as the source lies.
  levels = source.split(os.sep)[-1 - bool(builder.builder_config) :]
  final = os.path.join(flags.data_dir, name, *levels)
  if os.path.abspath(source) == final:
    raise config_lib.ConfigError(f'--name={name}: that is the set itself')
  shards = _shards(builder, name)
  paths = [records.source for (records,) in shards.values()]
  states = np.array([*map(files_lib.state, paths)], np.int64)
  content = [os.path.abspath(source), *shards.items()]
  work = os.path.join(flags.data_dir, f'.{name}')
  target = target_lib.Target(flags.data_dir, final, work, content, paths, states)

  def make():
    target.check_room(int(states[:, 0].sum()))
    folder = target.write_shards(copy_records, shards, flags.workers)
    _copy_info(source, folder, name)
    target.finish(folder)
    total = sum(records.count for (records,) in shards.values())
    seconds = time.monotonic() - start
    return [f'{final}: {total:,} examples in {len(shards):,} files, copied in {seconds:.1f} s']

  relative = os.path.relpath(os.path.dirname(final), flags.data_dir)
  command = f'python main.py --config=configs/resnet_anp.py --config.data.source=tfds:{relative}'
  command += f' --config.data.dir={flags.data_dir}'
  return [*target.run(flags.overwrite, make), f'train with: {command}']


def _shards(builder, name):
  """Every shard of the set, by the name of its copy."""
  shards = {}
  for split, info in builder.info.splits.items():
    template = info.filename_template.replace(
      dataset_name=name, split=split, filetype_suffix='array_record'
    )
    copies = template.sharded_filenames(len(info.shard_lengths))
    # Not info.filepaths: it sorts by name, the lengths are by number.
    paths = info.filename_template.sharded_filepaths(len(info.shard_lengths))
    for path, copy, count in zip(paths, copies, info.shard_lengths):
      shards[copy] = (Records(os.fspath(path), count),)
  return shards


def copy_records(begin_file: Callable[[int], None], records: Records, path: str) -> None:
  """Writes an ArrayRecord file, or raises ConfigError for a damaged TFRecord file."""
  from array_record.python import array_record_module

  from anp_jax.data.input import tensorflow_cpu
  from anp_jax.data.prepare import anp_folder

  begin_file(0)
  tf = tensorflow_cpu.load()
  count, damage = 0, ''
  writer = array_record_module.ArrayRecordWriter(path, anp_folder.WRITER_OPTIONS)
  try:
    # It verifies the checksums.
    for record in tf.data.TFRecordDataset(records.source).as_numpy_iterator():
      writer.write(record)
      count += 1
  except tf.errors.OpError as e:
    damage = f': {e.message.split("[")[0]}'
  finally:
    writer.close()
  if damage or count != records.count:
    raise config_lib.ConfigError(
      f'{records.source} is damaged after {count} whole examples of {records.count}{damage}'
    )


def _copy_info(source, folder, name):
  """Copies the description of the set, with its new name and format."""
  from tensorflow_datasets.core import dataset_info

  for entry in os.scandir(source):
    if entry.is_file() and entry.name.endswith(('.json', '.txt', '.md')):
      shutil.copyfile(entry.path, os.path.join(folder, entry.name))
  proto = dataset_info.read_proto_from_builder_dir(source)
  proto.name = name
  proto.file_format = 'array_record'
  del proto.alternative_file_formats[:]
  dataset_info.write_dataset_info_proto(proto, dataset_info_dir=folder)
