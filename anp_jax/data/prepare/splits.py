"""The splits of a set: their files, and their names."""

import argparse
import dataclasses
import re

import numpy as np

from anp_jax import config as config_lib
from anp_jax.data.sources import image_folder, listings

DEFAULT_NAMES = ('train', 'validation')


def find(flags: argparse.Namespace) -> tuple[list[str], list[image_folder.Listing]]:
  """Finds the files of training and, if there is such a split, of evaluation.

  Args:
    flags: command line of `prepare.main`.

  Returns:
    The splits' names in the set, and their files, all of the same classes.

  Raises:
    ConfigError: naming the flag, file or folder at fault.
  """
  splits = [flags.train_split] + [flags.eval_split] * bool(flags.eval_split)
  if len(set(splits)) < len(splits):
    raise config_lib.ConfigError(f'--train_split and --eval_split are both {flags.train_split!r}')
  listings = [_listing(flags, splits, i) for i in range(len(splits))]
  for listing in listings:
    if listing.vocabulary != listings[0].vocabulary:
      text = f'has other classes than {listings[0].name}: give them by --lists'
      raise config_lib.ConfigError(f'{listing.name} {text}')
  for name in listings[0].vocabulary.names:
    # Nor are bytes that are no UTF-8; and tfds takes spaces at the ends away.
    if not name.isprintable() or name != name.strip():
      text = f'class {ascii(name)} has a name that cannot be stored'
      raise config_lib.ConfigError(f'{flags.source}: {text}')
  return _names(splits), listings


def _names(splits):
  """Names of splits in the set: those of the flags, if tfds accepts them."""
  # 'all' means every split to tfds.
  if all(re.fullmatch(r'[A-Za-z]\w*', split, re.ASCII) and split != 'all' for split in splits):
    return splits
  return [*DEFAULT_NAMES[: len(splits)]]


def _listing(flags, splits, i):
  """The files of the split of index i."""
  split, sibling = splits[i], ''.join(splits[:i] + splits[i + 1 :])
  try:
    is_all = not sibling and split == 'train' and not listings.has_splits(flags.source, flags.path)
    suffixes = (*image_folder.SUFFIXES, *image_folder.convertible())
    listing = listings.find(flags, '' if is_all else split, sibling, flags.data_dir, suffixes)
    classes = listing.vocabulary.with_pairs(flags.pairs)
  except config_lib.ConfigError as e:
    raise config_lib.ConfigError(_flags_for_keys(str(e), flags.source)) from e
  listing = dataclasses.replace(listing, vocabulary=classes, files=tuple(listing.files))
  if not listing.files:
    raise config_lib.ConfigError(f'{listing.name} has no files')
  unlabelled = np.flatnonzero(listing.labels < 0)
  if len(unlabelled):
    path = listing.paths()[unlabelled[0]]
    raise config_lib.ConfigError(f'{path} has no class, which a set needs')
  return listing


def _flags_for_keys(text, source):
  """An error of a run's keys, with the flags of this command."""
  flag = '--from' if listings.kind(source) == 'folder' else '--path'
  text = text.replace('config.data.path', flag).replace('config.data.dir', '--data_dir')
  return text.replace('config.data.', '--')
