"""Shards of prepared sets: random access to records, counted when opened."""

import os
import struct

import numpy as np

from anp_jax import config as config_lib
from anp_jax.data.sources import stored_images


class TfRecords:
  """Random access to TFRecord shards; reads their framing, not TensorFlow."""

  def __init__(self, paths: list[str], counts: list[int]):
    """Indexes shards.

    Args:
      paths: paths of the shards.
      counts: number of records that each should hold.

    Raises:
      ConfigError: for a shard that cannot be read or has other records.
    """
    parts = [np.zeros((0, 3), np.int64)]  # shard, first byte, length
    for shard, (path, count) in enumerate(zip(paths, counts)):
      try:
        places = _tf_record_places(shard, path)
      except OSError as e:
        raise _unreadable(path, e) from e
      _check_count(path, len(places), count)
      parts.append(places)
    self._records = stored_images.FileRanges(paths, np.concatenate(parts))

  def __getitems__(self, indices: list[int]) -> list[bytes]:
    """Records by index."""
    return [self._records.read(index) for index in indices]


class ArrayRecords:
  """Random access to ArrayRecord shards.

  array_record's own data source starts a pool of threads for each batch, which
  for small images takes longer than reading them.
  """

  def __init__(self, paths: list[str], counts: list[int]):
    """Opens shards; arguments and errors are those of `TfRecords`."""
    self._paths = paths
    self._ends = np.cumsum(counts)
    self._reader = stored_images.keep_open(self._open)
    for shard, (path, count) in enumerate(zip(paths, counts)):
      try:
        reader = self._reader(shard)
        records = reader.num_records() if reader.ok() else 0
      except (OSError, RuntimeError) as e:
        raise _unreadable(path, e) from e
      _check_count(path, records, count)

  def __getitems__(self, indices: list[int]) -> list[bytes]:
    """Records by index."""
    positions = np.asarray(indices, np.int64)
    shards = np.searchsorted(self._ends, positions, side='right')
    result = np.empty(len(positions), object)
    for shard in np.unique(shards).tolist():
      places = np.flatnonzero(shards == shard)
      start = self._ends[shard - 1] if shard else 0
      records = self._reader(shard).read((positions[places] - start).tolist())
      for place, record in zip(places, records):
        result[place] = record
    return result.tolist()

  def _open(self, shard):
    from array_record.python import array_record_module

    # In random order what lies behind a record is of no use: 32 KB of
    # buffer make the reading of small ones take 1.6 times as long.
    return array_record_module.ArrayRecordReader(
      self._paths[shard], options='readahead_buffer_size:0', file_reader_buffer_size=4096
    )


def _unreadable(path, error):
  return config_lib.ConfigError(f'cannot read {path}: {error}')


def _check_count(path, count, expected):
  if count != expected:
    raise config_lib.ConfigError(f'{path} is damaged: {count} whole examples, expected {expected}')


def _tf_record_places(shard, path):
  """(n, 3) int64: shard, first byte and length of each whole record's payload."""
  places = []
  with open(path, 'rb') as f:
    end = os.fstat(f.fileno()).st_size
    position = 0
    while position < end:
      f.seek(position)
      header = f.read(12)  # uint64 length, uint32 checksum of the length
      length = struct.unpack('<Q', header[:8])[0] if len(header) == 12 else end
      if position + 16 + length > end:
        break
      places.append((shard, position + 12, length))
      position += 16 + length  # a uint32 checksum follows the payload
  return np.array(places, np.int64).reshape(-1, 3)
