"""Shards of prepared sets: random access to records, counted when opened."""

import os
import struct

import numpy as np

from anp_jax import config as config_lib
from anp_jax.data.sources import open_files


class TfRecords:
  """Random access to TFRecord shards; reads their framing, not TensorFlow."""

  def __init__(self, paths: list[str], places: list[np.ndarray]):
    """Opens shards by their paths and the `record_places` of each."""
    self._paths = paths
    shards = [np.full((len(p), 1), i) for i, p in enumerate(places)]
    self._places = np.concatenate([np.concatenate(pair, 1) for pair in zip(shards, places)])

  def __getitems__(self, indices: list[int]) -> list[bytes]:
    """Records of the given indices."""
    result = []
    for index in indices:
      shard, start, length = self._places[index]
      with open(self._paths[shard], 'rb') as f:
        f.seek(start)
        result.append(f.read(length))
    return result


class ArrayRecords:
  """Random access to ArrayRecord shards.

  array_record's own data source starts a pool of threads for each batch, which
  for small images takes longer than reading them.
  """

  def __init__(self, paths: list[str], counts: list[int]):
    """Opens shards by their paths and the number of records of each."""
    self._paths = paths
    self._ends = np.cumsum(counts)
    self._reader = open_files.OpenFiles(self._open)

  def __getitems__(self, indices: list[int]) -> list[bytes]:
    """Records of the given indices."""
    indices = np.asarray(indices, np.int64)
    shards = np.searchsorted(self._ends, indices, side='right')
    result = np.empty(len(indices), object)
    for shard in np.unique(shards):
      places = np.flatnonzero(shards == shard)
      start = self._ends[shard - 1] if shard else 0
      records = self._reader(shard).read((indices[places] - start).tolist())
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


def record_places(file_format: str, path: str, count: int) -> np.ndarray:
  """The places of a shard's records; refuses a damaged shard.

  Args:
    file_format: 'tfrecord' or 'array_record'.
    path: of the shard.
    count: records that it should hold.

  Returns:
    (count, 2) int64: first byte, bytes of each TFRecord's payload.

  Raises:
    ConfigError: if it cannot be read or holds another number of records.
  """
  try:
    find = _tf_record_places if file_format == 'tfrecord' else _array_record_places
    places = find(path)
  except (OSError, RuntimeError) as e:
    raise config_lib.ConfigError(f'cannot read {path}: {e}') from e
  if len(places) != count:
    raise config_lib.ConfigError(
      f'{path} is damaged: {len(places)} whole examples, expected {count}'
    )
  return np.array(places, np.int64).reshape(-1, 2)


def _tf_record_places(path):
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
      places.append((position + 12, length))
      position += 16 + length  # a uint32 checksum follows the payload
  return places


def _array_record_places(path):
  """A pair of zeros for each record: array_record finds them itself."""
  from array_record.python import array_record_module

  reader = array_record_module.ArrayRecordReader(path)
  return [(0, 0)] * (reader.num_records() if reader.ok() else 0)
