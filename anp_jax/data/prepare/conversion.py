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
from anp_jax.data.prepare import prepared_target as target_lib, room, tasks as tasks_lib
from anp_jax.data.sources import tfds_set


def prepare(flags) -> list[str]:
  """Makes the copy that the command line asks for, or finds it made.

  Args:
    flags: of `prepare.main`.

  Returns:
    Lines to print.

  Raises:
    ConfigError: if there is no such set, or a shard of it is damaged.
  """
  copy = _Copy(flags)
  lines = copy.target.run(flags.overwrite, flags.workers, copy.make)
  return [*lines, copy.command()]


@dataclasses.dataclass(frozen=True)
class _Shard:
  """A file of the set: its path, the name of its copy, its examples."""

  path: str
  copy: str
  count: int


class _Copy:
  """One set in the making."""

  def __init__(self, flags):
    self._start = time.monotonic()
    builder = _builder(flags)
    self._source = os.fspath(builder.data_path)
    name = flags.name or f'{builder.name}_array_record'
    if not name.isidentifier():
      raise config_lib.ConfigError(
        f'--name={name!r}: expected letters, digits and _ for a copied set'
      )
    # NAME/CONFIG/VERSION, as the source lies.
    levels = self._source.split(os.sep)[-1 - bool(builder.builder_config) :]
    final = os.path.join(flags.data_dir, name, *levels)
    if os.path.abspath(self._source) == final:
      raise config_lib.ConfigError(f'--name={name}: that is the set itself')
    self._name = name
    self._shards = _shards(builder, name)
    stats = [os.stat(shard.path) for shard in self._shards]
    digest = hashlib.sha256(
      json.dumps(
        [
          os.path.abspath(self._source),
          final,
          [dataclasses.astuple(shard) for shard in self._shards],
          [(s.st_size, s.st_mtime_ns) for s in stats],
        ]
      ).encode()
    ).hexdigest()
    self._data_dir = flags.data_dir
    self._size = sum(s.st_size for s in stats)
    self.target = target_lib.Target(
      final, os.path.join(flags.data_dir, f'.{name}.{digest[:16]}'), digest
    )

  def make(self, pool) -> list[str]:
    """Copies the shards and their description; returns lines to print."""
    room.check(self._data_dir, self.target.work, self._size)
    folder = os.path.join(self.target.work, 'set')
    tasks = [
      tasks_lib.Copy(
        root=os.path.dirname(shard.path),
        files=[os.path.basename(shard.path)],
        out=os.path.join(folder, shard.copy),
        count=shard.count,
      )
      for shard in self._shards
    ]
    pool.make('copying', tasks)
    copies = {shard.copy for shard in self._shards}
    for name in set(os.listdir(folder)) - copies:  # of a command that died
      os.remove(os.path.join(folder, name))
    _copy_info(self._source, folder, self._name)
    self.target.finish(folder)
    total = sum(shard.count for shard in self._shards)
    return [
      f'{self.target.final}: {total:,} examples in {len(self._shards):,} '
      f'files, copied in {time.monotonic() - self._start:.1f} s'
    ]

  def command(self) -> str:
    """Returns the line that says how to train on the copy."""
    name = os.path.relpath(os.path.dirname(self.target.final), self._data_dir)
    return (
      'train with: python main.py --config=configs/resnet_anp.py '
      f'--config.data.source=tfds:{name} --config.data.dir={self._data_dir}'
    )


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
  """Every shard of the set, whose copy has this name."""
  shards = []
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
      shards.append(_Shard(os.fspath(path), copy, count))
  return shards


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
