"""The work on image files that `prepare` gives to its worker processes.

Each task leaves one file, which appears under its name when it is whole.
"""

from collections.abc import Iterator
import contextlib
import errno
import hashlib
import json
import os
import socket
import stat
import struct

from anp_jax import config as config_lib
from anp_jax.data import vocabulary
from anp_jax.data.image_files import image_format
from anp_jax.data.prepare import examine
from anp_jax.data.prepare import worker_pool

# TensorFlow's readers count bytes in 32 bits.
_MAX_BYTES = 2**31 - 1
# Of one entry, not of the disk or of this process.
_MISSING = {errno.ENOENT, errno.ENOTDIR}
_UNREADABLE = {errno.ELOOP, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG}


@contextlib.contextmanager
def whole_file(path: str):
  """Yields a name to write to, which becomes `path` at the end."""
  # Leftovers go with the folder; several hosts may share it.
  draft = f'{path}.{socket.gethostname()}.{os.getpid()}.draft'
  yield draft
  os.rename(draft, path)


def read_part(path: str) -> list:
  """The lines that `_examine` wrote: one list a file, see there."""
  with open(path, encoding='utf-8') as f:
    return [json.loads(line) for line in f]


def state(path: str) -> list[int]:
  """A file's size in bytes and time in ns; [-1, -1] if it is none."""
  try:
    return _state(os.stat(path))
  except OSError as e:
    if e.errno in _MISSING | _UNREADABLE:
      return [-1, -1]
    raise


def _state(status):
  if not stat.S_ISREG(status.st_mode):
    return [-1, -1]
  return [status.st_size, status.st_mtime_ns]


def _examine(task):
  """Examines files; writes what was found, a line of JSON for each.

  A line is [sha256, bytes, format, height, width, kinds, reason, *state]. What
  was written before stays for files that have not changed since, and that are
  large or not as they were.
  """
  before, limit = _rows_before(task), task['max_megapixels']
  rows = []
  for name, row in zip(task['files'], before):
    path = os.path.join(task['root'], name)
    # The state does not tell whether a file can be read now.
    if (
      not row or not row[0] or row[7:] != state(path)
      or ('large' in row[5]) != image_format.is_large(row[3], row[4], limit)
    ):  # fmt: skip
      row = _row(path, name, limit)
    rows.append(row)
  if rows != before:
    with whole_file(task['out']) as draft, open(draft, 'w') as f:
      f.writelines(json.dumps(row) + '\n' for row in rows)
  damaged = {'missing', 'corrupt', 'large', 'truncated'}
  return {
    'files': len(rows),
    'damaged': sum(not damaged.isdisjoint(row[5]) for row in rows),
    'bytes': sum(row[1] for row in rows),
  }


def _rows_before(task):
  """What `_examine` wrote, a row or None for each file."""
  with contextlib.suppress(FileNotFoundError, ValueError):
    rows = read_part(task['out'])
    if len(rows) == len(task['files']):
      return rows
  return [None] * len(task['files'])


def _row(path, name, max_megapixels):
  try:
    data, when = _read(path)
  except _Missing:
    return ['', 0, '', 0, 0, ['missing'], 'no such file', -1, -1]
  except _Unusable as e:
    return ['', 0, '', 0, 0, ['corrupt'], str(e), *state(path)]
  found = examine.examine(data, name, max_megapixels)
  digest = hashlib.sha256(data).hexdigest()
  return [
    digest, len(data), found.format, found.height, found.width,
    list(found.kinds), found.reason, *when,
  ]  # fmt: skip


class _Missing(Exception):
  """Nothing is in a file's place."""


class _Unusable(Exception):
  """What is in a file's place cannot be an image."""


def _read(path):
  """A file's bytes, and its state before they were read."""
  try:
    # A pipe would wait for a writer.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
  except OSError as e:
    if e.errno in _MISSING:
      raise _Missing from e
    if e.errno in _UNREADABLE:
      raise _Unusable(e.strerror) from e
    if not os.path.isfile(path) and os.path.exists(path):
      raise _Unusable('no file') from e
    raise
  try:
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode):
      raise _Unusable('no file')
    if status.st_size > _MAX_BYTES:
      raise _Unusable(f'{status.st_size} bytes')
  except _Unusable:
    os.close(handle)
    raise
  with open(handle, 'rb') as f:
    return f.read(), _state(status)


def _read_again(task, name, digest):
  """The bytes that were examined; raises ConfigError if they have changed."""
  path = os.path.join(task['root'], name)
  with open(path, 'rb') as f:
    data = f.read()
  if hashlib.sha256(data).hexdigest() != digest:
    raise config_lib.ConfigError(
      f'{path} has changed since it was examined: start again, and if it has '
      f'kept its size and time, delete {task["work"]} before'
    )
  return data


def _convert(task):
  """Converts files; writes them, their lengths in JSON, and how long that is.

  The lengths come last, so that only one file is held at a time.
  """
  lengths = []
  with whole_file(task['out']) as draft, open(draft, 'wb') as f:
    for name, digest in zip(task['files'], task['digests']):
      result = examine.convert(_read_again(task, name, digest))
      lengths.append(f.write(result))
    tail = json.dumps(lengths).encode()
    f.write(tail + struct.pack('<Q', len(tail)))
  return {'files': len(lengths)}


def read_converted(path: str, start: int, count: int) -> Iterator[bytes]:
  """Yields `count` of the files that `_convert` wrote."""
  with open(path, 'rb') as f:
    f.seek(-8, os.SEEK_END)
    (size,) = struct.unpack('<Q', f.read())
    f.seek(-8 - size, os.SEEK_END)
    lengths = json.loads(f.read(size))
    f.seek(sum(lengths[:start]))
    for length in lengths[start : start + count]:
      yield f.read(length)


def _write(task):
  """Writes a shard, then a small file that says what it holds."""
  from anp_jax.data.prepare import anp_folder  # tfds: slow to import

  classes = vocabulary.Vocabulary(*map(tuple, task['vocabulary']))

  def examples():
    converted = iter(_converted(task))
    for name, digest, label, turned in zip(
      task['files'], task['digests'], task['labels'], task['converted']
    ):
      if turned:
        yield next(converted), label, name
      else:
        yield _read_again(task, name, digest), label, name

  with whole_file(task['shard']) as draft:
    size = anp_folder.write_shard(draft, classes, examples())
    _flush(draft)
  count = len(task['files'])
  with whole_file(task['out']) as draft, open(draft, 'w') as f:
    json.dump({'examples': count, 'bytes': size}, f)
  return {'files': count}


def _converted(task):
  """The converted files of a shard, in order.

  task['parts'] names the files that hold them, the first of each that belongs
  to the shard and the number of them.
  """
  for path, start, count in task['parts']:
    yield from read_converted(path, start, count)


def _copy(task):
  """Copies the examples of a TFRecord file to an ArrayRecord file."""
  from array_record.python import array_record_module

  from anp_jax.data.input import tensorflow_cpu
  from anp_jax.data.prepare import anp_folder

  tf = tensorflow_cpu.load()
  source, count = task['source'], 0
  with whole_file(task['out']) as draft:
    writer = array_record_module.ArrayRecordWriter(
      draft, anp_folder.WRITER_OPTIONS
    )
    try:
      # It verifies the checksums.
      for record in tf.data.TFRecordDataset(source).as_numpy_iterator():
        writer.write(record)
        count += 1
    except tf.errors.OpError as e:
      raise config_lib.ConfigError(
        f'{source} is damaged after {count} whole examples of '
        f'{task["count"]}: {e.message.split("[")[0]}'
      ) from e
    finally:
      writer.close()
    if count != task['count']:
      raise config_lib.ConfigError(
        f'{source} is damaged: {count} whole examples, expected {task["count"]}'
      )
    _flush(draft)
  return {'files': 1}


def _flush(path):
  handle = os.open(path, os.O_RDONLY)
  try:
    os.fsync(handle)
  finally:
    os.close(handle)


# By a task's 'do'.
HANDLERS = {
  'examine': _examine,
  'convert': _convert,
  'write': _write,
  'copy': _copy,
}

if __name__ == '__main__':
  worker_pool.serve(HANDLERS)
