"""Image files in a tree of class folders: those of a split, their classes."""

import dataclasses
import functools
from multiprocessing import pool
import os

from absl import logging
import numpy as np

from anp_jax import config as config_lib
from anp_jax.data import vocabulary as vocabulary_lib
from anp_jax.data.image_files import images
from anp_jax.data.sources import folder_names, skipped_files, split_file, splits, stored_images

SUFFIXES = ('.jpg', '.jpeg', '.jpe', '.jfif', '.png', '.bmp', '.gif')
# Those that training cannot decode, and `prepare` turns into others.
CONVERTIBLE = ('.webp', '.tif', '.tiff', '.avif', '.jp2', '.ppm', '.pgm')
# Those of all files that may be images.
ALL_SUFFIXES = SUFFIXES + CONVERTIBLE + images.HEIF_SUFFIXES
# Splits even without class folders, so that an error names what they lack.
_PLAIN_SPLITS = ('train', 'validation', 'val', 'test')
_DEEPER, _OUTSIDE = 'in deeper folders', 'outside of class folders'
_THREADS = 16  # threads that read the states of files
_ALL = '.'  # the split that is all of a tree without splits
_USUAL_SPLITS = [name for names in splits.USUAL for name in names]


@dataclasses.dataclass(frozen=True)
class Listing:
  """The files of one split, in the order of its indices.

  Attributes:
    root: folder that `files` are relative to.
    files: paths, which may go on within a file.
    labels: (n,) int32, class of each file; -1 for none.
    vocabulary: classes of the labels.
    name: name of the split in messages.
    storage: bytes of the files.
    left_out: line about files that are in no split; '': none.
  """

  root: str
  files: tuple[str, ...]
  labels: np.ndarray
  vocabulary: vocabulary_lib.Vocabulary
  name: str
  storage: stored_images.Storage
  left_out: str = ''

  def paths(self) -> list[str]:
    """The path of every file."""
    return [os.path.join(self.root, file) for file in self.files]

  def states(self) -> np.ndarray:
    """(files, 2) int64: size in bytes and time in ns of every file."""
    with pool.ThreadPool(_THREADS) as threads:
      states = threads.map(self.storage.state, range(len(self.files)))
    return np.array(states, np.int64).reshape(-1, 2)

  def select(self, indices: np.ndarray) -> 'Listing':
    """The files of these indices."""
    return dataclasses.replace(
      self,
      files=tuple(self.files[i] for i in indices),
      labels=self.labels[indices],
      storage=self.storage.select(indices),
    )


def convertible() -> tuple[str, ...]:
  """Suffixes that training cannot decode, and Pillow can here."""
  return CONVERTIBLE + images.HEIF_SUFFIXES * images.has_heif()


def find(
  path: str,
  split: str,
  lists: str = '',
  other_splits: tuple[str, ...] = (),
  suffixes: tuple[str, ...] = SUFFIXES,
  pairs: str = 'auto',
) -> Listing:
  """The files of a split.

  A tree has a folder for each class: ROOT/SPLIT/CLASS/image, ROOT/CLASS/image.
  The split's folder may be in any case, or go by another of its usual names
  (training, val, valid, testing). A tree without splits is divided into train
  and validation by a hash of each file's CLASS/NAME, about 80 to 20 in every
  class. The split '.' is all of it.

  `split_file` describes split files.

  Args:
    path: ROOT.
    split: name, or the path of a split file (.txt) from here or from ROOT.
    lists: 'ANPS.txt' or 'ANPS.txt,ADJECTIVES.txt,NOUNS.txt', which give classes
      their ids; folders that they do not name are left out.
    other_splits: other splits of the run; without lists, their classes count too.
    suffixes: suffixes of a tree's files, in lower case; others are left out.
    pairs: whether listed classes are adjective_noun, as config.data.pairs.

  Returns:
    Files in the order of their labels and names, or of the split file's lines.

  Raises:
    ConfigError: naming the file and line, or the folder, and what is expected.
  """
  root = os.path.expanduser(path)
  if not os.path.isdir(root):
    raise config_lib.ConfigError(f'{root} is not a folder')
  vocabulary = vocabulary_lib.from_spec(lists, pairs) if lists else None
  if split.endswith('.txt'):
    file, files, labels, vocabulary = split_file.read(root, split, vocabulary, other_splits)
    storage = stored_images.DiskFiles(root, files, confined_to=root)
    return Listing(root, files, labels, vocabulary, file, storage)
  return _from_tree(root, split, vocabulary, other_splits, suffixes, pairs)


def _from_tree(root, split, vocabulary, other_splits, suffixes, pairs):
  base, is_split = _base(root, split)
  folders = folder_names.class_folders(base)
  left_out = skipped_files.SkippedFiles()
  for file in _images(base):
    left_out.add(file, _OUTSIDE)
  if not folders:
    raise config_lib.ConfigError(
      f'{base} has no class folders' + _shape(root, base, suffixes, left_out)
    )
  chosen = set(vocabulary.names if vocabulary else folders)
  files_of = {
    name: _class_files(base, name, suffixes, left_out) for name in folders if name in chosen
  }
  if vocabulary is None:
    vocabulary = _vocabulary_of_folders(root, base, files_of, other_splits, pairs)
  else:
    _check_listed(base, folders, vocabulary)
  files, labels, total = [], [], 0
  for label, name in enumerate(vocabulary.names):
    for file in files_of.get(name, ()):
      total += 1
      inside = f'{name}/{file}'
      if is_split or splits.in_half(inside, split):
        files.append(inside)
        labels.append(label)
  if total and not files:
    raise config_lib.ConfigError(
      f'{root}: {split} has no examples: none of the {total:,} images falls '
      f'into {split} by its hash; give each split a folder'
    )
  if not files:
    raise config_lib.ConfigError(
      f'{base} has no images in its class folders' + _shape(root, base, suffixes, left_out)
    )
  text = left_out.text(hints(suffixes))
  return Listing(
    base,
    tuple(files),
    np.array(labels, np.int32),
    vocabulary,
    f'{root}: {split}' if split else root,
    stored_images.DiskFiles(base, files),
    text and f'{base}: left out {text}',
  )


def _vocabulary_of_folders(root, base, files_of, other_splits, pairs):
  """The classes that this split or another of the run has images of."""
  siblings = [_split_folder(root, s) for s in other_splits if not s.endswith('.txt')]
  bases = [base, *filter(None, siblings)]
  names = {name for b in bases for name in folder_names.class_folders(b)}
  empty = {
    name
    for name in names
    if not files_of.get(name)
    and not any(next(_images(f'{b}/{name}', below=True), '') for b in bases)
  }
  if empty and empty != names:
    warn_once(
      f'{root}: no file can be an image in {len(empty)} of {len(names)} folders, '
      f'which are no classes: {", ".join(sorted(empty)[:8])}'
    )
    names -= empty
  return vocabulary_lib.from_names(names, root, pairs)


def _check_listed(base, folders, vocabulary):
  """Refuses a tree without any class of the vocabulary; warns of others."""
  unlisted = set(folders).difference(vocabulary.names)
  if len(unlisted) == len(folders):
    raise config_lib.ConfigError(
      f'{base} has none of the {len(vocabulary)} listed classes: its first '
      f'folder is {folders[0]!r}, the first class {vocabulary.names[0]!r}'
      f'{vocabulary_lib.nearest(folders[0], vocabulary.names)}'
    )
  if unlisted:
    warn_once(
      f'{base}: {len(unlisted)} of {len(folders)} folders are no listed class and are '
      f'left out, such as {min(unlisted)}'
    )


def _shape(root, base, suffixes, left_out):
  """The difference of a tree without images from the expected tree."""
  text = f'; left out {left_out.text(hints(suffixes))}' if left_out else ''
  text += f'; expected {root}/CLASS/IMAGE or {root}/SPLIT/CLASS/IMAGE'
  deep = {
    path[0] for path in (p.split(os.sep) for p in _images(base, below=True)) if len(path) == 3
  }
  proposed = folder_names.training_first(sorted(deep))
  if base == root and proposed:
    path = os.path.join(root, proposed[0])
    text += f'; is config.data.path={path} meant?'
  return text


def hints(suffixes: tuple[str, ...]) -> dict[str, str]:
  """Hints about files that are left out, by suffix."""
  hints = skipped_files.heif_hints()
  for suffix in convertible():
    if suffix not in suffixes:
      hints[suffix] = 'prepare converts them'
  return hints


def split_folders(root: str, split: str = '') -> list[str]:
  """Names of the folders in a tree that go by a usual name of a split, or by this one."""
  usual = [*_USUAL_SPLITS, split.casefold()]
  folders = [
    name
    for name in folder_names.class_folders(root)
    if name.casefold() in usual
    and (name in _PLAIN_SPLITS or folder_names.class_folders(os.path.join(root, name)))
  ]
  return sorted(folders, key=lambda name: usual.index(name.casefold()))


def _split_folder(root, split):
  """The folder of a split of a tree; '' if there is none."""
  if os.path.isdir(os.path.join(root, split)):
    return os.path.join(root, split)
  names = split_folders(root, split)
  if not splits.matches(split, names):
    return ''
  return os.path.join(root, splits.choose(root, split, names))


@functools.cache
def warn_once(text: str) -> None:
  """Logs a warning that another split of the same set would repeat."""
  logging.warning('%s', text)


def _base(root, split):
  """The folder of the class folders, and whether all in it is one split."""
  base = root if split in ('', _ALL) else _split_folder(root, split)
  if base:
    return base, True
  names = split_folders(root)
  if names:
    splits.choose(root, split, names, f'config.data.path={root}/')
  splits.check_half(root, split)
  return root, False


def _class_files(base, name, suffixes, left_out):
  """Names of a class's files; counts what else its folder has."""
  files = []
  folder = os.path.join(base, name)
  for entry in sorted(folder_names.entries(folder), key=lambda e: e.name):
    # macOS leaves a hidden ._NAME.jpg, no image, for each file it copies.
    if entry.name.startswith('.'):
      continue
    # By name first: of a link, is_dir() would ask the file system.
    if entry.name.lower().endswith(suffixes):
      files.append(entry.name)
    elif folder_names.is_folder(entry):
      if folder_names.is_foreign(entry.name):
        continue
      for file in _images(entry.path, below=True):
        left_out.add(os.path.join(name, entry.name, file), _DEEPER)
    else:
      left_out.add(os.path.join(name, entry.name))
  return files


def _images(folder, below=False):
  """Yields the image files in a folder, or also below it, by suffix."""
  for place, folders, names in os.walk(folder):
    folders[:] = sorted(f for f in folders if below and not folder_names.is_foreign(f))
    for name in sorted(names):
      if name.lower().endswith(ALL_SUFFIXES) and not name.startswith('.'):
        yield os.path.relpath(os.path.join(place, name), folder)
