"""The splits of a set: their files, and their names."""

import argparse
import dataclasses
import os
import re

import numpy as np

from anp_jax import config as config_lib
from anp_jax.data.sources import image_folder, listings

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
    raise config_lib.ConfigError(f'--train_split and --eval_split are both {flags.train_split!r}')
  listings = [_listing(flags, splits, i) for i in range(len(splits))]
  for listing in listings:
    if listing.vocabulary != listings[0].vocabulary:
      raise config_lib.ConfigError(
        f'{listing.name} has other classes than {listings[0].name}: give them by --lists'
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
  split, siblings = splits[i], splits[:i] + splits[i + 1 :]
  # A tree is named by its path alone.
  is_tree = listings.kind(flags.source) == 'folder'
  d = argparse.Namespace(
    source=flags.source,
    path=flags.source if is_tree else flags.path,
    lists=flags.lists,
    pairs=flags.pairs,
  )
  try:
    is_all = (
      not siblings
      and split == 'train'
      and not listings.has_splits(d.source, os.path.expanduser(d.path))
    )
    listing = listings.find(
      d,
      '' if is_all else split,
      ''.join(siblings),
      flags.data_dir,
      (*image_folder.SUFFIXES, *image_folder.convertible()),
    )
    classes = listing.vocabulary.with_pairs(flags.pairs)
  except config_lib.ConfigError as e:
    raise config_lib.ConfigError(_flags_for_keys(str(e), is_tree)) from e
  listing = dataclasses.replace(listing, vocabulary=classes, files=tuple(listing.files))
  if not listing.files:
    raise config_lib.ConfigError(f'{listing.name} has no files')
  unlabelled = np.flatnonzero(listing.labels < 0)
  if len(unlabelled):
    path = listing.paths()[unlabelled[0]]
    raise config_lib.ConfigError(f'{path} has no class, which a set needs')
  return listing


def _flags_for_keys(text, is_tree):
  """An error of a run's keys, with the flags of this command."""
  text = text.replace('config.data.path', '--from' if is_tree else '--path')
  text = text.replace('config.data.dir', '--data_dir')
  return text.replace('config.data.', '--')
