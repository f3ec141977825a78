"""An index of tar shards: where each sample's image is, and its class.

WebDataset's layout: the members of a sample have one name up to the first dot
of their last part, as in 0017.jpg, 0017.cls. The index is built once, from the
members' headers and the texts of the classes, and stored in the data folder.
"""

import json
import os
import tarfile
import time

from absl import logging
import numpy as np
import pyarrow as pa

from anp_jax import config as config_lib
from anp_jax.data import vocabulary as vocabulary_lib
from anp_jax.data.sources import class_texts, image_folder, table_cache

_KIND = 'tar-3'  # with the version of the stored index
_SCHEMA = pa.schema(
  [
    ('name', pa.binary()),
    ('shard', pa.int32()),
    ('offset', pa.int64()),
    ('size', pa.int64()),
    ('class', pa.string()),
  ]
)
# Members that tell the class, the first that a sample has.
_CLASS_SUFFIXES = ('cls', 'json', 'txt')
_MAX_CLASS_BYTES = 1 << 20
_BLOCK = 512


def load(shards: list[str], data_dir: str) -> pa.Table:
  """The samples of shards, in their order; built if none is stored.

  The index is built again if the name, size or time of a shard changes.

  Args:
    shards: paths of the tar files.
    data_dir: data folder, which stores the index.

  Returns:
    A table, mapped into memory, with a row for each sample: name (binary) of
    its image, shard (its number), offset and size of the image in it, and
    class: its name, or its number.

  Raises:
    ConfigError: naming the shard, and the sample, that is not as expected.
  """

  def build(path):
    start = time.monotonic()
    with pa.OSFile(path, 'wb') as file, pa.ipc.new_file(file, _SCHEMA) as out:
      for number, shard in enumerate(shards):
        out.write_batch(_batch(shard, number))
    logging.info('Indexed %d tar shards, once, in %.1f s.', len(shards), time.monotonic() - start)

  return table_cache.read(table_cache.ensure(data_dir, _KIND, shards, build))


def places(table: pa.Table) -> np.ndarray:
  """The shard, first byte and size of each image: (n, 3) int64."""
  columns = [table[c].to_numpy() for c in ('shard', 'offset', 'size')]
  return np.stack(columns, 1).astype(np.int64)


def _batch(path, number):
  """The samples of a shard as rows."""
  try:
    with open(path, 'rb') as file:
      samples = _samples(path, file)
      rows = [_row(path, file, number, key, members) for key, members in samples.items()]
  except OSError as e:
    raise config_lib.ConfigError(f'cannot read {path}: {e.strerror}') from e
  columns = list(zip(*rows)) or [[]] * len(_SCHEMA)
  arrays = [pa.array(c, f.type) for c, f in zip(columns, _SCHEMA)]
  return pa.record_batch(arrays, schema=_SCHEMA)


def _samples(path, file):
  """{name up to the suffix: {suffix: (name, first byte, size)}}."""
  samples = {}
  for member in _members(path, file):
    folder, _, base = member.name.rpartition('/')
    key, dot, suffix = base.partition('.')
    # Files of the archive rather than of a sample, and hidden ones.
    if not (member.isreg() and key and dot) or key.startswith('__'):
      continue
    members = samples.setdefault(f'{folder}/{key}' if folder else key, {})
    suffix = suffix.lower()
    if suffix in members:
      raise config_lib.ConfigError(f'{path}: two members {member.name!r}')
    members[suffix] = (member.name, member.offset_data, member.size)
  return samples


def _members(path, file):
  """Yields the members of a whole tar file."""
  file.seek(0)
  position = 0
  try:
    with tarfile.open(fileobj=file, mode='r:') as tar:
      for member in iter(tar.next, None):
        position = member.offset
        yield member
        tar.members.clear()  # else it keeps those of a million
      end = tar.offset
  except (tarfile.TarError, ValueError, OverflowError) as e:
    # A compressed one has no random access, and images do not shrink.
    raise config_lib.ConfigError(
      f'{path} is no whole tar file, or a compressed one (byte {position:,}): {e}'
    ) from e
  # The library takes a damaged header for the end.
  file.seek(end)
  block = file.read(_BLOCK)
  if any(block) or end > os.fstat(file.fileno()).st_size:
    raise config_lib.ConfigError(f'{path} is no whole tar file: expected a header at byte {end:,}')


def _row(path, file, number, key, members):
  """The image of a sample and its class."""
  pictures = [members[s] for s in members if f'.{s}'.endswith(image_folder.ALL_SUFFIXES)]
  if len(pictures) != 1:
    raise config_lib.ConfigError(
      f'{path}: sample {key!r} has {len(pictures)} images, expected one (its '
      f'members: {", ".join(members)})'
    )
  (name, start, size) = pictures[0]
  return (os.fsencode(name), number, start, size, _class(path, file, key, members))


def _class(path, file, key, members):
  """The name or the number of a sample's class."""
  suffix = next((s for s in _CLASS_SUFFIXES if s in members), '')
  if not suffix:
    raise config_lib.ConfigError(
      f'{path}: sample {key!r} has no .cls, .json or .txt that tells its class '
      f'(its members: {", ".join(members)})'
    )
  name, start, size = members[suffix]
  data = os.pread(file.fileno(), min(size, _MAX_CLASS_BYTES), start)
  try:
    text = data.decode('utf-8-sig').strip()
    text = _class_of_json(json.loads(text)) if suffix == 'json' else text
    text.encode()  # not so half of a pair of characters, which JSON can escape
  except (ValueError, RecursionError):
    text = ''
  if not text or vocabulary_lib.has_control(text):
    form = (
      f'an object with one of {", ".join(class_texts.LABELS)}, or adjective and noun'
      if suffix == 'json'
      else 'a line, the name or the number of a class'
    )
    raise config_lib.ConfigError(f'{path}: {name} is {data[:40]!r}, expected {form}')
  return text


def _class_of_json(value):
  """The class that an object names; '' if it names none."""
  if not isinstance(value, dict):
    return ''
  words = {
    key: str(word).strip()
    for key, word in value.items()
    if isinstance(word, (str, int, float)) and not isinstance(word, bool)
  }
  return '_'.join(words[key] for key in class_texts.columns(words))
