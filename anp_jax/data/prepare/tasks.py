"""The tasks of a preparation: to examine, convert, write and copy images.

Each leaves one file, which appears under its name when it is whole.
"""

from collections.abc import Iterator, Sequence
import contextlib
import dataclasses
import hashlib
import json
import os
import signal
import struct
from typing import NamedTuple

import numpy as np

from anp_jax import config as config_lib
from anp_jax.data import vocabulary
from anp_jax.data.image_files import image_format
from anp_jax.data.prepare import examine, worker_pool
from anp_jax.data.sources import stored_images
from anp_jax.system import files as files_lib

_DAMAGED = {'missing', 'corrupt', 'large', 'truncated'}
# By these a process dies of its own doing, and would die again.
_CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL}


class Row(NamedTuple):
  """The findings in a file; on disk a line of JSON, a list in this order.

  Attributes:
    digest: SHA-256 of its bytes, hexadecimal; '' if it could not be read.
    size: bytes that were read.
    format: as the next four, of `examine.Finding`.
    height: in pixels, 0 where unknown.
    width: likewise.
    kinds: of the file alone.
    reason: of damage.
    disk_size: with disk_time, the state in its storage before it was read.
    disk_time: in ns.
  """

  digest: str
  size: int
  format: str
  height: int
  width: int
  kinds: list[str]
  reason: str
  disk_size: int
  disk_time: int


def read_rows(path: str) -> list[Row]:
  """Returns the rows that an `Examine` task wrote, one for each file."""
  with open(path, encoding='utf-8') as file:
    return [Row(*json.loads(line)) for line in file]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Examine(worker_pool.Task):
  """Examines files, and writes their rows.

  Rows of an earlier command stay for files that have not changed since, and
  that are large or not as they were.

  Attributes:
    storage: of the files.
    max_megapixels: million pixels above which a file is large.
    crashing: files that crashed the decoder twice.
  """

  storage: stored_images.Storage
  max_megapixels: float
  crashing: frozenset[str] = frozenset()

  def run(self) -> int:
    """Does the work; returns how many of the files are damaged."""
    before = self._rows_before()
    rows = []
    for i, row in enumerate(before):
      worker_pool.begin_file(i)
      if self.files[i] in self.crashing or self._is_outdated(i, row):
        row = self._row(i)
      rows.append(row)
    if rows != before:
      lines = ''.join(json.dumps(row) + '\n' for row in rows)
      files_lib.write_atomic(self.out, lines)
    return sum(not _DAMAGED.isdisjoint(row.kinds) for row in rows)

  def after_crash(self, file: str, exit_code: int) -> worker_pool.Task:
    """Returns this task again; without a file that crashed the decoder twice.

    A file at which two workers were killed from outside is an error: on another
    day, or with fewer workers, the set would hold it.
    """
    if file == self.suspect and -exit_code in _CRASHES:
      return dataclasses.replace(self, suspect='', crashing=self.crashing | {file})
    return super().after_crash(file, exit_code)

  def _rows_before(self):
    with contextlib.suppress(FileNotFoundError, ValueError, TypeError):
      rows = read_rows(self.out)
      if len(rows) == len(self.files):
        return rows
    return [None] * len(self.files)

  def _is_outdated(self, index, row):
    # The state does not tell whether a file can be read now.
    if not row or not row.digest:
      return True
    is_large = image_format.is_large(row.height, row.width, self.max_megapixels)
    state = self.storage.state(index)
    return row[-2:] != state or ('large' in row.kinds) != is_large

  def _row(self, index):
    name, state = self.files[index], self.storage.state(index)
    try:
      data = self.storage.read(index)
    except stored_images.UnusableError as e:
      return Row('', 0, '', 0, 0, ['corrupt'], str(e), *state)
    except OSError as e:
      if e.errno in files_lib.MISSING:
        reason = 'no such file'
        return Row('', 0, '', 0, 0, ['missing'], reason, *files_lib.NO_FILE)
      if e.errno in files_lib.UNREADABLE:
        return Row('', 0, '', 0, 0, ['corrupt'], e.strerror, *state)
      raise
    if name in self.crashing:
      finding = examine.corrupt('', 'crashes the decoder')
    else:
      finding = examine.examine(data, name, self.max_megapixels)
    return Row(
      hashlib.sha256(data).hexdigest(),
      len(data),
      finding.format,
      finding.height,
      finding.width,
      list(finding.kinds),
      finding.reason,
      *state,
    )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Storing(worker_pool.Task):
  """Work on files that were examined.

  Attributes:
    storage: of the files.
    digests: SHA-256 of each file's bytes, by which a change is noticed.
    work: the folder that a user deletes to have all files examined again.
  """

  storage: stored_images.Storage
  digests: Sequence[bytes]
  work: str

  def _read(self, index):
    worker_pool.begin_file(index)
    path = os.path.join(self.root, self.files[index])
    try:
      data = self.storage.read(index)
    except stored_images.UnusableError as e:
      raise config_lib.ConfigError(f'{path}: {e}') from e
    if hashlib.sha256(data).digest() != self.digests[index]:
      raise config_lib.ConfigError(
        f'{path} has changed since it was examined: start again, and if it has '
        f'kept its size and time, delete {self.work} before'
      )
    return data


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Convert(_Storing):
  """Writes converted files, their lengths in JSON, and how long that is.

  The lengths come last, so that only one file is held at a time.
  """

  def run(self) -> int:
    """Does the work; returns 0."""
    lengths = []
    with files_lib.atomic_path(self.out) as draft, open(draft, 'wb') as file:
      for i in range(len(self.files)):
        lengths.append(file.write(examine.convert(self._read(i))))
      tail = json.dumps(lengths).encode()
      file.write(tail + struct.pack('<Q', len(tail)))
    return 0


class Stretch(NamedTuple):
  """Successive files in the result of a `Convert` task.

  Attributes:
    path: of the `Convert` task's file.
    start: index of the first of them in it.
    count: of them.
  """

  path: str
  start: int
  count: int


def read_converted(stretch: Stretch) -> Iterator[bytes]:
  """Yields the converted files of a stretch."""
  path, start, count = stretch
  with open(path, 'rb') as file:
    file.seek(-8, os.SEEK_END)
    (size,) = struct.unpack('<Q', file.read())
    file.seek(-8 - size, os.SEEK_END)
    lengths = json.loads(file.read(size))
    file.seek(sum(lengths[:start]))
    for length in lengths[start : start + count]:
      yield file.read(length)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Write(_Storing):
  """Writes a shard, then a small file of its counts.

  Attributes:
    shard: path of the shard.
    labels: (n,) int32, class of each file.
    converted: (n,) bool, files that are stored converted.
    stretches: where these are, in order.
    classes: of the set.
  """

  shard: str
  labels: np.ndarray
  converted: np.ndarray
  stretches: Sequence[Stretch]
  classes: vocabulary.Vocabulary

  def run(self) -> int:
    """Does the work; returns 0."""
    from anp_jax.data.prepare import anp_folder  # tfds: slow to import

    with files_lib.atomic_path(self.shard) as draft:
      size = anp_folder.write_shard(draft, self.classes, self._examples())
      _sync(draft)
    content = {'examples': len(self.files), 'bytes': size}
    files_lib.write_atomic(self.out, json.dumps(content))
    return 0

  def _examples(self):
    converted = (data for stretch in self.stretches for data in read_converted(stretch))
    for i, name in enumerate(self.files):
      data = next(converted) if self.converted[i] else self._read(i)
      yield data, int(self.labels[i]), name


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Copy(worker_pool.Task):
  """Copies the examples of a TFRecord file, the only one, as ArrayRecord.

  Attributes:
    count: examples that it has if it is whole.
  """

  count: int

  def run(self) -> int:
    """Does the work; returns 0, or raises ConfigError for a damaged file."""
    (name,) = self.files
    source = os.path.join(self.root, name)
    with files_lib.atomic_path(self.out) as draft:
      self._copy(source, draft)
      _sync(draft)
    return 0

  def _copy(self, source, draft):
    from array_record.python import array_record_module

    from anp_jax.data.input import tensorflow_cpu
    from anp_jax.data.prepare import anp_folder

    tf = tensorflow_cpu.load()
    count = 0
    writer = array_record_module.ArrayRecordWriter(draft, anp_folder.WRITER_OPTIONS)
    try:
      # It verifies the checksums.
      for record in tf.data.TFRecordDataset(source).as_numpy_iterator():
        writer.write(record)
        count += 1
    except tf.errors.OpError as e:
      raise config_lib.ConfigError(
        f'{source} is damaged after {count} whole examples of {self.count}: '
        f'{e.message.split("[")[0]}'
      ) from e
    finally:
      writer.close()
    if count != self.count:
      raise config_lib.ConfigError(
        f'{source} is damaged: {count} whole examples, expected {self.count}'
      )


def _sync(path):
  handle = os.open(path, os.O_RDONLY)
  try:
    os.fsync(handle)
  finally:
    os.close(handle)
