"""WebDataset's tar shards: their samples by index."""

import glob
import os
import re
from typing import Any

import numpy as np

from anp_jax import config as config_lib
from anp_jax.data.sources import (
  class_texts,
  image_folder,
  skipped_files,
  splits,
  stored_images,
  tar_index,
)
from anp_jax.system import files

_RANGE = re.compile(r'\{(\d{1,6})\.\.(\d{1,6})\}')


def find(
  d: Any, split: str, other_split: str, data_dir: str, suffixes: tuple[str, ...]
) -> image_folder.Listing:
  """The samples of a split of config.data.source=tar:PATTERN.

  Where the pattern holds {split}, each split has shards of its own: its name,
  or another that it usually goes by, stands there. Otherwise the samples are
  divided as those of a tree without splits, by a hash of each sample's name;
  the split '' is then all of them.

  Args:
    d: namespace with source, path (that a relative pattern starts from), lists
      and pairs, as config.data.
    split: name of the split.
    other_split: other split of the run, or ''; its classes count too.
    data_dir: data folder, which stores the index.
    suffixes: suffixes of the images, in lower case; others are left out.

  Returns:
    The samples, by shard and by their order in it.

  Raises:
    ConfigError: naming the pattern, or the shard and the sample, at fault.
  """
  pattern = os.path.join(
    os.path.expanduser(d.path), os.path.expanduser(d.source.removeprefix('tar:'))
  )
  shards = _shards_of_split(pattern, split)
  table = tar_index.load(shards, data_dir)
  names = [os.fsdecode(name) for name in table['name'].to_pylist()]
  places = tar_index.places(table)
  labels, classes = class_texts.classify(
    table['class'].to_pylist(),
    d,
    os.path.dirname(shards[0]),
    lambda i: f'{shards[places[i, 0]]}: {names[i]}',
    _other_texts(pattern, split, other_split, data_dir),
  )
  chosen, skipped = [], skipped_files.SkippedFiles()
  for i in np.flatnonzero(labels >= 0):  # the lists may leave classes out
    if splits.SPLIT not in pattern and not splits.in_half(_key(names[i]), split):
      continue
    if names[i].lower().endswith(suffixes):
      chosen.append(i)
    else:
      skipped.add(names[i])
  left_out = skipped.text(image_folder.hints(suffixes))
  places = places[chosen]
  root = os.path.dirname(os.path.commonprefix(shards)) or '.'
  tars = [os.path.relpath(shard, root) for shard in shards]
  return image_folder.Listing(
    root,
    tuple(f'{tars[s]}/{names[i]}' for s, i in zip(places[:, 0], chosen)),
    labels[chosen],
    classes,
    f'{pattern}: {split}' if split else pattern,
    stored_images.FileRanges(tuple(shards), places, [*map(files.state, shards)]),
    left_out and f'{pattern}: left out {left_out}',
  )


def expand(pattern: str) -> list[str]:
  """The paths that a pattern of shards stands for, in order.

  Args:
    pattern: path with *, ? and [...], or with a range {000..015}.

  Raises:
    ConfigError: if no file has such a name.
  """
  paths = sorted(glob.glob(pattern)) if glob.has_magic(pattern) else _numbered(pattern)
  for path in paths or [pattern]:
    if not os.path.isfile(path):
      folder, name = os.path.split(path)
      tars = sorted(glob.glob(os.path.join(glob.escape(folder), '*.tar')))
      raise config_lib.ConfigError(
        f'no file is called {path}; expected tar shards'
        f'{config_lib.nearest(name, map(os.path.basename, tars))}'
      )
  return paths


def _numbered(pattern):
  """The paths with each number of a range in its place, or the one path."""
  bounds = _RANGE.search(pattern)
  if not bounds:
    return [pattern]
  first, last = bounds.groups()
  width = len(first) if first.startswith('0') else 0
  before, after = pattern[: bounds.start()], pattern[bounds.end() :]
  return [f'{before}{i:0{width}}{after}' for i in range(int(first), int(last) + 1)]


def _shards_of_split(pattern, split):
  """The shards of a split; all shards of a set without splits."""
  if splits.SPLIT not in pattern:
    splits.check_half(pattern, split)
    return expand(pattern)
  names = [n for n in splits.usual_names(split) if _exists(pattern.replace(splits.SPLIT, n))]
  name = splits.choose(pattern, split, names) if names else split
  return expand(pattern.replace(splits.SPLIT, name))


def _exists(pattern):
  """Whether the first path of a pattern is there."""
  return bool(glob.glob(pattern)) or any(map(os.path.exists, _numbered(pattern)[:1]))


def _other_texts(pattern, split, other_split, data_dir):
  """The classes of the run's other split, if that has shards."""
  if splits.SPLIT not in pattern or other_split in ('', split):
    return ()
  try:
    shards = _shards_of_split(pattern, other_split)
  except config_lib.ConfigError:  # opening it says so, if the run needs it
    return ()
  return tar_index.load(shards, data_dir)['class'].unique().to_pylist()


def _key(name):
  """A sample's name, which all of its members have."""
  folder, _, base = name.rpartition('/')
  return f'{folder}/{base.partition(".")[0]}'
