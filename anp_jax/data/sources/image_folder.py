"""Image files in a tree of class folders: those of a split, their classes."""

import dataclasses
import functools
import hashlib
import os

from absl import logging
import numpy as np

from anp_jax import config as config_lib
from anp_jax.data import vocabulary as vocabulary_lib
from anp_jax.data.image_files import images
from anp_jax.data.sources import folder_names, skipped_files, split_file, stored_images

SUFFIXES = ('.jpg', '.jpeg', '.jpe', '.jfif', '.png', '.bmp', '.gif')
# Those that training cannot decode, and `prepare` turns into others.
CONVERTIBLE = ('.webp', '.tif', '.tiff', '.avif', '.jp2', '.ppm', '.pgm')
# Share of a tree without splits that is used for training.
_TRAIN_SHARE = 0.8
_ALL = '.'  # the split that is all of a tree without splits
# Names that folders of splits go by, in any case; one row is one split.
_SPLITS = (
  ('train', 'training', 'training_set', 'train_set'),
  ('validation', 'valid', 'val', 'validation_set', 'valid_set', 'val_set'),
  ('test', 'testing', 'test_set', 'testing_set'),
)
# These need no class folders of their own, whose absence is told then.
_PLAIN_SPLITS = ('train', 'validation', 'val', 'test')
_DEEPER, _OUTSIDE = 'in deeper folders', 'outside of class folders'


@dataclasses.dataclass(frozen=True)
class Listing:
  """The files of one split, in the order of its indices.

  Attributes:
    root: folder that `files` are relative to.
    files: paths.
    labels: (n,) int32, class of each file.
    vocabulary: of the labels.
    name: what messages call the split.
    storage: of the files.
    left_out: a line about files of the tree that are in no split; '': none.
  """

  root: str
  files: tuple[str, ...]
  labels: np.ndarray
  vocabulary: vocabulary_lib.Vocabulary
  name: str
  storage: stored_images.Storage
  left_out: str = ''

  def paths(self) -> list[str]:
    """Returns the path of every file, which goes on within a file."""
    return [os.path.join(self.root, file) for file in self.files]

  def select(self, indices: np.ndarray) -> 'Listing':
    """Returns the files of these indices."""
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
  class. No file's side depends on other files, so one that is added moves none.
  The split '.' is all of it.

  For split files, see `split_file`.

  Args:
    path: ROOT.
    split: its name, or the path of a split file (.txt), seen from here or ROOT.
    lists: 'ANPS.txt' or 'ANPS.txt,ADJECTIVES.txt,NOUNS.txt', which give classes
      their ids; folders that they do not name are left out.
    other_splits: of the run; without lists, their classes count too.
    suffixes: of a tree's files, in lower case; others are left out.
    pairs: whether listed classes are adjective_noun, see config.data.pairs.

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
  base, is_divided = _base(root, split)
  folders = folder_names.class_folders(base)
  left_out = skipped_files.SkippedFiles()
  for file in _images(base):
    left_out.add(file, _OUTSIDE)
  if not folders:
    raise config_lib.ConfigError(
      f'{base} has no class folders' + _shape(root, base, suffixes, left_out)
    )
  chosen = set(vocabulary.names) if vocabulary else folders
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
      if is_divided or (_in_train(inside) == (split == 'train')):
        files.append(inside)
        labels.append(label)
  if total and not files:
    raise config_lib.ConfigError(
      f'{root}: {split} has no examples: none of its images ({total:,}) falls '
      f'to {split} by its hash; give each split a folder of its own'
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
  bases_of = {name: [base] for name in files_of}
  for folder in filter(None, siblings):
    for name in folder_names.class_folders(folder):
      bases_of.setdefault(name, []).append(folder)
  empty = [
    name
    for name, bases in bases_of.items()
    if not files_of.get(name)
    and not any(next(_images(f'{b}/{name}', below=True), '') for b in bases)
  ]
  names = set(bases_of).difference(empty) or set(bases_of)
  if empty and len(empty) < len(bases_of):
    warn_once(
      '%s: no file can be an image in %d of %d folders, which are no classes: %s',
      root,
      len(empty),
      len(bases_of),
      ', '.join(sorted(empty)[:8]),
    )
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
      '%s: %d of %d folders are no listed class and are left out, such as %s',
      base,
      len(unlisted),
      len(folders),
      min(unlisted),
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


def split_folders(root: str) -> list[str]:
  """Names of the folders in a tree that go by the name of a split."""
  usual = [name for names in _SPLITS for name in names]
  folders = [f for f in folder_names.class_folders(root) if _is_split(root, f, usual)]
  return sorted(folders, key=lambda f: usual.index(f.casefold()))


def _split_folder(root, split):
  """The folder of a split of a tree; '' if there is none."""
  if os.path.isdir(os.path.join(root, split)):
    return os.path.join(root, split)
  name = split.casefold()
  usual = next((names for names in _SPLITS if name in names), ())
  folders = [f for f in folder_names.class_folders(root) if _is_split(root, f, (name, *usual))]
  same = [f for f in folders if f.casefold() == name]
  folders = same or folders
  if len(folders) > 1:
    raise config_lib.ConfigError(
      f'{root} has no split {split!r}, but {" and ".join(folders)}; set '
      'config.data.train_split and config.data.eval_split'
    )
  return os.path.join(root, folders[0]) if folders else ''


def split_names(split: str) -> tuple[str, ...]:
  """The name of a split, then the others that it usually goes by."""
  usual = next((names for names in _SPLITS if split.casefold() in names), ())
  return (split, *(name for name in usual if name != split.casefold()))


def in_half(name: str, split: str) -> bool:
  """Whether an image of an undivided set is in train or validation.

  Args:
    name: of the image; its hash alone tells.
    split: 'train' or 'validation'; '' for both.
  """
  return not split or _in_train(name) == (split == 'train')


def check_half(root: str, split: str) -> None:
  """Refuses another split of an undivided set than train and validation."""
  if split not in ('', 'train', 'validation'):
    raise config_lib.ConfigError(
      f'{root} has no split {split!r}; a set without splits is divided into '
      'train and validation: set config.data.train_split and '
      'config.data.eval_split to these'
      f'{config_lib.nearest(split, ("train", "validation"))}'
    )


def _is_split(root, folder, names):
  """Whether a folder goes by one of these names, and is not a class's."""
  return folder.casefold() in names and (
    folder in _PLAIN_SPLITS or bool(folder_names.class_folders(os.path.join(root, folder)))
  )


@functools.cache
def warn_once(*text):
  """Logs a warning that another split of the same tree would repeat."""
  logging.warning(*text)


def _base(root, split):
  """The folder of the class folders, and whether it is one split's own."""
  base = root if split in ('', _ALL) else _split_folder(root, split)
  if base:
    return base, True
  splits = split_folders(root)
  if splits:
    text = (
      f'{root} has no split {split!r} (it has {", ".join(splits)}); set '
      'config.data.train_split and config.data.eval_split'
    )
    if len(splits) == 1:
      text += (
        f', or config.data.path={os.path.join(root, splits[0])} to have '
        'that divided into train and validation'
      )
    elif splits[0].casefold() in _SPLITS[0]:
      text += f', as in config.data.eval_split={splits[-1]}'
    raise config_lib.ConfigError(text)
  if split not in ('train', 'validation'):
    raise config_lib.ConfigError(
      f'{root} has no split {split!r}; a tree of classes without splits '
      'is divided into train and validation: set config.data.train_split and '
      'config.data.eval_split to these'
    )
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
    elif entry.is_dir():
      if folder_names.is_foreign(entry.name):
        continue
      for file in _images(entry.path, below=True):
        left_out.add(os.path.join(name, entry.name, file), _DEEPER)
    else:
      left_out.add(os.path.join(name, entry.name))
  return files


def _images(folder, below=False):
  """Yields the image files in a folder, or also below it, by suffix."""
  suffixes = SUFFIXES + CONVERTIBLE + images.HEIF_SUFFIXES
  for place, folders, names in os.walk(folder):
    folders[:] = sorted(f for f in folders if below and not folder_names.is_foreign(f))
    for name in sorted(names):
      if name.lower().endswith(suffixes) and not name.startswith('.'):
        yield os.path.relpath(os.path.join(place, name), folder)


def _in_train(path):
  """Whether a file of an undivided tree is trained on, by its own name."""
  digest = hashlib.sha256(path.encode(errors='surrogateescape')).digest()
  return int.from_bytes(digest[:8], 'big') / 2.0**64 < _TRAIN_SHARE
