"""The splits of a set: their files, and their names."""

import dataclasses
import os
import re

from anp_jax import config as config_lib
from anp_jax.data.sources import image_folder

DEFAULT_NAMES = ('train', 'validation')


def find(flags) -> tuple[list[str], list[image_folder.Listing]]:
  """Finds the files of training and, if there is such a split, of evaluation.

  Args:
    flags: of the command line.

  Returns:
    The splits' names in the set, and their files, all of the same classes.

  Raises:
    ConfigError: naming the flag, file or folder at fault.
  """
  splits = [flags.train_split] + [flags.eval_split] * bool(flags.eval_split)
  if len(set(splits)) < len(splits):
    raise config_lib.ConfigError(
      f'--train_split and --eval_split are both {flags.train_split!r}'
    )
  listings = [_listing(flags, splits, i) for i in range(len(splits))]
  for listing in listings:
    if listing.vocabulary != listings[0].vocabulary:
      raise config_lib.ConfigError(
        f'{listing.name} has other classes than {listings[0].name}: give them '
        'by --lists'
      )
  for name in listings[0].vocabulary.names:
    if not name.isprintable():  # nor are bytes that are no UTF-8
      raise config_lib.ConfigError(
        f'{flags.source}: class {ascii(name)} has a name that cannot be stored'
      )
  return _names(splits), listings


def _names(splits):
  """Names of splits in the set, where tfds would not take every text."""
  names = []
  for split, default in zip(splits, DEFAULT_NAMES):
    # 'all' means every split to tfds.
    plain = re.fullmatch(r'[A-Za-z]\w*', split, re.ASCII) and split != 'all'
    names.append(split if plain else default)
  if len(set(names)) < len(names):
    return list(DEFAULT_NAMES)
  return names


def _listing(flags, splits, i):
  """The files of the split of index i."""
  root = os.path.expanduser(flags.source)
  split, siblings = splits[i], tuple(splits[:i] + splits[i + 1 :])
  is_all = not siblings and split == 'train' and not _has_splits(root)
  try:
    listing = image_folder.find(
      flags.source, '' if is_all else split, flags.lists, other_splits=siblings,
      suffixes=(*image_folder.SUFFIXES, *image_folder.convertible()),
      pairs=flags.pairs,
    )  # fmt: skip
    classes = listing.vocabulary.with_pairs(flags.pairs)
  except config_lib.ConfigError as e:
    # A run's keys; the flags here have the names of all but one.
    text = str(e).replace('config.data.path', '--from')
    text = text.replace('config.data.', '--')
    raise config_lib.ConfigError(text) from e
  listing = dataclasses.replace(listing, vocabulary=classes)
  if is_all:
    listing = dataclasses.replace(listing, root=root, name=root)
  if not listing.files:
    raise config_lib.ConfigError(f'{listing.name} has no files')
  return listing


def _has_splits(root):
  return os.path.isdir(root) and bool(image_folder.split_folders(root))
