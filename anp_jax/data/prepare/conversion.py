"""Copies a prepared set of TFRecord files as ArrayRecord files.

Examples are copied as they are stored, in their order and their shards, after
their checksums were verified. Random access to them is then tfds's own.
"""

import dataclasses
import hashlib
import json
import os
import shutil
import time

from anp_jax import config as config_lib
from anp_jax.data.prepare import (
  prepared_target as target_lib,
  room,
  tasks as tasks_lib,
  worker_pool,
)
from anp_jax.data.sources import tfds_set
from anp_jax.system import files as files_lib


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Copy(worker_pool.Task):
  """Copies the examples of a TFRecord file as ArrayRecord.

  Attributes:
    source: path of the file.
    count: examples that it has if it is whole.
    out: path of the copy.
  """

  source: str
  count: int
  out: str = ''

  def paths(self) -> list[str]:
    """Returns the path of the file."""
    return [self.source]

  def run(self, begin_file) -> None:
    """Writes the copy, or raises ConfigError for a damaged file."""
    begin_file(0)
    with files_lib.atomic_path(self.out) as draft:
      self._copy(draft)
      tasks_lib.sync(draft)

  def _copy(self, draft):
    from array_record.python import array_record_module

    from anp_jax.data.input import tensorflow_cpu
    from anp_jax.data.prepare import anp_folder

    tf = tensorflow_cpu.load()
    count, damage = 0, ''
    writer = array_record_module.ArrayRecordWriter(draft, anp_folder.WRITER_OPTIONS)
    try:
      # It verifies the checksums.
      for record in tf.data.TFRecordDataset(self.source).as_numpy_iterator():
        writer.write(record)
        count += 1
    except tf.errors.OpError as e:
      damage = f': {e.message.split("[")[0]}'
    finally:
      writer.close()
    if damage or count != self.count:
      raise config_lib.ConfigError(
        f'{self.source} is damaged after {count} whole examples of {self.count}{damage}'
      )


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
  builder = _builder(flags)
  source = os.fspath(builder.data_path)
  name = flags.name or f'{builder.name}_array_record'
  if not name.isidentifier():
    raise config_lib.ConfigError(
      f'--name={name!r}: expected letters, digits and _ for a copied set'
    )
  # NAME/CONFIG/VERSION, as the source lies.
  levels = source.split(os.sep)[-1 - bool(builder.builder_config) :]
  final = os.path.join(flags.data_dir, name, *levels)
  if os.path.abspath(source) == final:
    raise config_lib.ConfigError(f'--name={name}: that is the set itself')
  shards = _shards(builder, name)
  states = [files_lib.state(shard.source) for shard in shards.values()]
  content = [os.path.abspath(source), [*shards], [s.count for s in shards.values()], states]
  digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()
  target = target_lib.Target(final, os.path.join(flags.data_dir, f'.{name}'), digest)

  def make():
    room.check(flags.data_dir, target.work, sum(size for size, _ in states))
    folder = target.folder('', shards)
    finished = os.listdir(folder)
    tasks = [
      dataclasses.replace(task, out=os.path.join(folder, copy))
      for copy, task in shards.items()
      if copy not in finished
    ]
    worker_pool.run('copying', tasks, flags.workers)
    _copy_info(source, folder, name)
    target.finish(folder)
    total = sum(shard.count for shard in shards.values())
    seconds = time.monotonic() - start
    return [f'{final}: {total:,} examples in {len(shards):,} files, copied in {seconds:.1f} s']

  relative = os.path.relpath(os.path.dirname(final), flags.data_dir)
  return [
    *target.run(flags.overwrite, make),
    'train with: python main.py --config=configs/resnet_anp.py '
    f'--config.data.source=tfds:{relative} --config.data.dir={flags.data_dir}',
  ]


def _builder(flags):
  directory = os.path.expanduser(flags.from_dir or flags.data_dir)
  builder = tfds_set.open_builder(flags.source.removeprefix('tfds:'), directory)
  stored = builder.info.file_format.value
  if stored != 'tfrecord':
    raise config_lib.ConfigError(
      f'{os.fspath(builder.data_path)} is stored as {stored}, expected tfrecord'
    )
  return builder


def _shards(builder, name):
  """The tasks to copy every shard of the set, by the names of the copies."""
  tasks = {}
  for split, info in builder.info.splits.items():
    template = info.filename_template.replace(
      dataset_name=name, split=split, filetype_suffix='array_record'
    )
    copies = template.sharded_filenames(len(info.shard_lengths))
    # Not info.filepaths: it sorts by name, the lengths are by number.
    paths = info.filename_template.sharded_filepaths(len(info.shard_lengths))
    for path, copy, count in zip(paths, copies, info.shard_lengths):
      if not os.path.exists(path):
        raise config_lib.ConfigError(f'{os.fspath(path)} is missing')
      tasks[copy] = Copy(source=os.fspath(path), count=count)
  return tasks


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
