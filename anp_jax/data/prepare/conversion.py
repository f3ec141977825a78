"""Copies a prepared set of TFRecord files as ArrayRecord files.

Examples are copied as they are stored, in their order and their shards, after
their checksums were verified. Random access to them is then tfds's own.
"""

import functools
import hashlib
import json
import os
import shutil
import time

from anp_jax import config as config_lib
from anp_jax.data.prepare import parts as parts_lib
from anp_jax.data.prepare import target as target_lib
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
  lines = copy.target.run(flags.overwrite, copy.make)
  return lines if flags.share.process_id else [*lines, copy.command()]


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
    inside = os.path.relpath(
      self._source, _above(self._source, 2 + bool(builder.builder_config))
    )
    inside = os.path.join(name, *inside.split(os.sep)[1:])
    final = os.path.join(flags.data_dir, inside)
    if os.path.abspath(self._source) == final:
      raise config_lib.ConfigError(f'--name={name}: that is the set itself')
    self._name = name
    self._shards = _shards(builder, name)
    stats = [os.stat(source) for source, _, _ in self._shards]
    digest = hashlib.sha256(
      json.dumps([
        os.path.abspath(self._source), final, self._shards,
        [(s.st_size, s.st_mtime_ns) for s in stats],
      ]).encode()
    ).hexdigest()  # fmt: skip
    self._data_dir = flags.data_dir
    self._inside = inside
    self.target = target_lib.Target(
      final,
      os.path.join(flags.data_dir, f'.{name}.{digest[:16]}'),
      digest,
      flags.share,
    )

  def make(self, pool):
    """Copies the shards and what describes them; lines to print."""
    made = os.path.join(self.target.work, 'set')
    parts = []
    for shard in self._shards:
      make = functools.partial(_task, shard, made)
      parts.append(parts_lib.Part(os.path.join(made, shard[1]), 1, make))
    self.target.make_all('copying', parts, pool)
    self.target.wait_unless_first(pool)
    wanted = {name for _, name, _ in self._shards}
    for name in set(os.listdir(made)) - wanted:
      os.remove(os.path.join(made, name))
    _copy_info(self._source, made, self._name)
    self.target.finish(made)
    total = sum(count for _, _, count in self._shards)
    return [
      f'{self.target.final}: {total:,} examples in {len(self._shards):,} '
      f'files, copied in {time.monotonic() - self._start:.1f} s'
    ]

  def command(self):
    """The line that says how to train on it."""
    name = os.path.dirname(self._inside)
    return (
      'train with: python main.py --config=configs/resnet_anp.py '
      f'--config.data.source=tfds:{name} --config.data.dir={self._data_dir}'
    )


def _task(shard, made):
  source, name, count = shard
  return {
    'do': 'copy',
    'what': f'copy {source}',
    'source': source,
    'count': count,
    'out': os.path.join(made, name),
  }


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
  """(path, name of its copy, examples) of every shard."""
  result = []
  for split, info in builder.info.splits.items():
    template = info.filename_template.replace(
      dataset_name=name, split=split, filetype_suffix='array_record'
    )
    copies = template.sharded_filenames(len(info.shard_lengths))
    # Not info.filepaths: it sorts by name, the lengths are by number.
    originals = info.filename_template.sharded_filepaths(
      len(info.shard_lengths)
    )
    for source, copy, count in zip(originals, copies, info.shard_lengths):
      if not os.path.exists(source):
        raise config_lib.ConfigError(f'{os.fspath(source)} is missing')
      result.append((os.fspath(source), copy, count))
  return result


def _copy_info(source, made, name):
  """Copies what describes the set; its name and format are new."""
  from tensorflow_datasets.core import dataset_info

  for entry in os.scandir(source):
    if entry.is_file() and entry.name.endswith(('.json', '.txt', '.md')):
      shutil.copyfile(entry.path, os.path.join(made, entry.name))
  proto = dataset_info.read_proto_from_builder_dir(source)
  proto.name = name
  proto.file_format = 'array_record'
  del proto.alternative_file_formats[:]
  dataset_info.write_dataset_info_proto(proto, dataset_info_dir=made)


def _above(path, levels):
  for _ in range(levels):
    path = os.path.dirname(path)
  return path
