"""Decoded images in files that all processes of a host map into memory.

A split is stored in parts, which appear whole: a build that was killed goes on
with those that are missing. A part is an array of 64-bit words: a row of numbers
for each image, then the pixels.
"""

from concurrent import futures
import contextlib
import hashlib
import json
import os

from absl import logging
import ml_collections
import numpy as np

from anp_jax import config as config_lib
from anp_jax.config import outputs
from anp_jax.data.image_files import images
from anp_jax.data.sources import source as source_lib, store_copy
from anp_jax.system import cores, files as files_lib, host_memory, progress as progress_lib

_FOLDER = 'mapped'  # in the folder of data sets
_KEY = "config.data.cache='mapped'"
_VERSION = 1  # of the form of the files
_PART = 512  # images of a part, which are in memory while it is made
_COLUMNS = 5  # numbers of an image: height, width, label, first word, checksum
_WORD = 8  # bytes
_SAMPLE = 16  # images that tell how large the others are
_LOG_SECONDS = 30.0
_UNREAD, _WHOLE, _DAMAGED = range(3)  # states of an image, as far as this process knows


def wrap(source: source_lib.Source, config: ml_collections.ConfigDict) -> source_lib.Source:
  """A source that keeps decoded images, if config.data.cache says so and it has files."""
  if source.kind != 'encoded' or config.data.cache != 'mapped':
    return source
  return Mapped(source, config)


class Mapped(source_lib.Wrapper):
  """Images decoded by Pillow, the shorter side brought down to config.data.resize.

  An image that cannot be decoded is not stored: reading it reads the wrapped source,
  as reading one whose checksum is wrong does. A checksum is compared when a process
  reads the image for the first time.
  """

  def __init__(self, source: source_lib.Source, config: ml_collections.ConfigDict):
    """Maps the images, after a build of what is missing.

    Args:
      source: source of kind 'encoded' that has an identity.
      config: the run's config.

    Raises:
      ConfigError: if the disk or the memory does not hold them, the folder cannot be
        written to, or a file cannot be read now.
    """
    super().__init__(source)
    self.kind = 'pixels'
    d = config.data
    self._shorter, self._max_megapixels = d.resize, d.max_megapixels
    identity = source.identity()
    if not identity:
      raise config_lib.ConfigError(f'{_KEY}: expected a source with `identity`: {source.name}')
    key = (_VERSION, d.resize, d.max_megapixels, len(source), source.vocabulary.digest(), identity)
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]
    self._folder = os.path.join(store_copy.local_root(config), _FOLDER, digest)
    self._states = np.full(len(source), _UNREAD, np.uint8)
    try:
      self._parts = self._map_all(d.threads or cores.count())
    except OSError as e:
      raise config_lib.ConfigError(f'{_KEY}: {e.filename or self._folder}: {e.strerror}') from e

  def read(self, indices: np.ndarray) -> tuple[list, np.ndarray]:
    """Images by index, read-only (height, width, 3) uint8, and labels."""
    items = [self._item(i) for i in np.asarray(indices).tolist()]
    return [image for image, _ in items], np.array([label for _, label in items], np.int32)

  def _item(self, index):
    """The image and the label of an index."""
    part, row = divmod(index, _PART)
    words = self._parts[part]
    numbers = words[row * _COLUMNS : (row + 1) * _COLUMNS]
    height, width, label, first, checksum = numbers.tolist()
    size = height * width * 3
    pixels = words[first : first + _word_count(size)]
    if self._states[index] == _UNREAD:
      is_whole = _checksum(numbers, pixels) == checksum
      self._states[index] = _WHOLE if size and is_whole else _DAMAGED
      if not is_whole:
        logging.warning('%s: damaged in %s, read again', self.example_name(index), self._folder)
    if self._states[index] == _DAMAGED:
      return self._decoded(index)
    return pixels.view(np.uint8)[:size].reshape(height, width, 3), label

  def _decoded(self, index):
    """The image and the label of an index, from the wrapped source."""
    (file,), (label,) = self._source.read(np.array([index]))
    return images.decode_shrunk(file, self._shorter, self._max_megapixels), int(label)

  def _map_all(self, threads):
    """The words of each part, after a build of missing ones."""
    counts = [min(_PART, len(self) - first) for first in range(0, len(self), _PART)]
    paths = {os.path.join(self._folder, f'{i:06}'): n for i, n in enumerate(counts)}
    if any(_map(*item) is None for item in paths.items()):
      os.makedirs(self._folder, exist_ok=True)
      with files_lib.lock(os.path.join(self._folder, '.lock')):
        files_lib.remove_drafts(self._folder)
        # Another process may have made them meanwhile.
        missing = [i for i, item in enumerate(paths.items()) if _map(*item) is None]
        self._build([*paths], missing, threads)
    parts = [_map(*item) for item in paths.items()]
    _check_memory(self.name, sum(words.nbytes for words in parts))
    return parts

  def _build(self, paths, missing, threads):
    """Makes the parts of these numbers, one after the other."""
    if not missing:
      return
    sample = [self._stored(i) for i in np.linspace(0, len(self) - 1, _SAMPLE).astype(int).tolist()]
    size = float(np.mean([image.nbytes for image, _ in sample])) * len(self)
    _check_memory(self.name, size)
    outputs.check_room('config.data.dir', self._folder, int(size * len(missing) / len(paths)))
    logging.info('Decoding %s once, into %s.', self.name, self._folder)
    done = (len(paths) - len(missing)) * _PART
    progress = progress_lib.Progress('decoding', len(self), done, log_seconds=_LOG_SECONDS)
    with contextlib.closing(progress), futures.ThreadPoolExecutor(threads) as pool:
      for part in missing:
        indices = range(part * _PART, min((part + 1) * _PART, len(self)))
        _write(paths[part], [*pool.map(self._stored, indices)])
        progress.add(len(indices))

  def _stored(self, index):
    """What is stored of an image and its label: nothing of one that cannot be decoded."""
    try:
      return self._decoded(index)
    except MemoryError as e:
      raise config_lib.ConfigError(f'{_KEY}: {self.example_name(index)}: {e}') from e
    except Exception as e:
      of_a_file = {None, *files_lib.MISSING, *files_lib.UNREADABLE}  # None: a decoder's error
      if isinstance(e, OSError) and e.errno not in of_a_file:
        raise
      return np.zeros((0, 0, 3), np.uint8), 0


def _word_count(size):
  return -(-size // _WORD)


def _checksum(numbers, pixels):
  """The sum of words, each number with a weight of its own, modulo 2^63."""
  weights = np.array([1 << 20, 1 << 40, 3, 5], np.int64)
  return (int(np.add.reduce(pixels)) + int(np.dot(numbers[:-1], weights))) % 2**63


def _write(path, items):
  """Writes a part from (image, label) of each of its images."""
  table = np.zeros((len(items), _COLUMNS), np.int64)
  blocks, first = [], table.size
  for numbers, (image, label) in zip(table, items):
    pixels = np.zeros(_word_count(image.nbytes), np.int64)
    pixels.view(np.uint8)[: image.nbytes] = image.reshape(-1)
    numbers[:-1] = *image.shape[:2], label, first
    numbers[-1] = _checksum(numbers, pixels)
    blocks.append(pixels)
    first += len(pixels)
  with files_lib.atomic_path(path) as draft, open(draft, 'wb') as file:
    for block in [table, *blocks]:
      file.write(block)
    file.flush()
    os.fsync(file.fileno())  # else a power loss may leave an empty file


def _map(path, count):
  """The words of a part of `count` images, mapped; None if it is missing or cut off."""
  import pyarrow as pa  # not at each start: it takes time

  try:
    # The mapping outlives its file, which would hold a descriptor.
    with pa.memory_map(path) as file:
      words = np.frombuffer(file.read_buffer(), np.int64)
  except (FileNotFoundError, ValueError):  # missing; empty, or no whole words
    return None
  if len(words) < count * _COLUMNS:
    return None
  # Behind the end of its file, reading a mapping would kill the process.
  height, width, _, first, _ = words[(count - 1) * _COLUMNS : count * _COLUMNS].tolist()
  return words if first + _word_count(height * width * 3) == len(words) else None


def _check_memory(name, size):
  """Refuses images of more bytes than the host has memory left, caches of files included."""
  left = host_memory.available()
  if size > left:
    raise config_lib.ConfigError(
      f'{_KEY}: the decoded images of {name} have {size / 1e9:,.1f} GB, and this host has '
      f'{left / 1e9:,.1f} GB of memory left; expected a smaller config.data.resize, or '
      "config.data.cache='none'"
    )
