"""Data sets: one interface for every kind.

A source is one split: it has a vocabulary, a length, and examples by index.
"""

import os
import types

import ml_collections

from anp_jax import config as config_lib
from anp_jax.config import data_keys, trust, urls
from anp_jax.data import vocabulary
from anp_jax.data.sources import (
  arrays,
  digits,
  features,
  image_folder,
  label_mapping,
  mapped,
  own_source,
  store_copy,
  subset,
  synthetic,
  tfds_set,
)
from anp_jax.data.sources.agreement import fingerprint
from anp_jax.data.sources.source import Source

__all__ = ['Source', 'fingerprint', 'open_source', 'open_split']


def open_source(config: ml_collections.ConfigDict, training: bool) -> Source:
  """The split of config.data that a run trains or evaluates on.

  The training split lacks the examples that config.data.held_out and imbalance
  leave out.

  Raises:
    ConfigError: if it does not exist or is empty, naming the path; or as
      `subset.wrap`.
  """
  d = config.data
  split, other_split = d.train_split, d.eval_split
  if not training:
    split, other_split = other_split, split
  if d.source == 'synthetic':
    return synthetic.Synthetic(d, split)
  if training and (split == other_split or {'', '.'} & {split, other_split}):
    image_folder.warn_once(
      f'config.data.train_split={split!r} and eval_split={other_split!r} share examples: scores '
      'would be of images that a run is trained on'
    )
  source = open_split(config, split, other_split)
  if not len(source):
    raise config_lib.ConfigError(f'{source.name} has no examples')
  # Trees and lists refuse that where they name the place; published sets are as they are.
  if d.pairs == 'auto' and d.source.startswith(('arrays', data_keys.FEATURES, 'hf:')):
    vocabulary.refuse_mixed(source.vocabulary.names, f'{source.name}: class ')
  source = mapped.wrap(source, config)  # here: runs on different parts of a split share it
  for pair in vocabulary.look_alikes(source.vocabulary.names):
    first, second = map(ascii, pair)
    image_folder.warn_once(
      f'the classes {first} and {second} differ by case or Unicode form only: one class?'
    )
  source.vocabulary = source.vocabulary.with_pairs(d.pairs)
  if training:
    source = subset.wrap(source, config)
  if d.pairs in data_keys.WORDS:
    source = label_mapping.of_words(source, d.pairs)
  return source


def open_split(config: ml_collections.ConfigDict, split: str, other_split: str) -> Source:
  """A whole split as its files have it: nothing cached, not synthetic.

  Args:
    config: the run's config.
    split: name, as in config.data.train_split.
    other_split: other split of the run; its classes count too.

  Raises:
    ConfigError: if it does not exist, naming the path.
  """
  d = config.data
  if trust.is_source_class(d.source):
    arguments = {'split': split, 'path': d.path, 'config': config}
    source = trust.made('data.source', d.source, Source, arguments, required='split')
    return own_source.OwnSource(d.source, source)
  if d.source == 'arrays':
    path = store_copy.path('config.data.path', d.path, config)
    return arrays.Arrays(os.path.expanduser(path), split)
  if d.source.startswith(data_keys.FEATURES):
    return features.Features(d.source, split, other_split)
  if d.source == 'digits':
    return digits.Digits(split)
  # With PyArrow, which takes time to import and the kinds above do without.
  from anp_jax.data.sources import anp_shapes, listings

  if d.source == 'folder' or listings.kind(d.source) != 'folder':
    path = store_copy.path('config.data.path', d.path, config)
    place = types.SimpleNamespace(source=d.source, path=path, lists=d.lists, pairs=d.pairs)
    directory = store_copy.local_root(config)
    return listings.StoredImages(listings.find(place, split, other_split, directory))
  directory = config_lib.data_dir(config)
  if d.source == 'anp_shapes':
    urls.check('config.data.dir', directory, ())  # the set is stored there
    return anp_shapes.open_split(split, directory)
  name = d.source.removeprefix('tfds:')
  directory = store_copy.prepared_path(directory, name, config)
  builder = tfds_set.open_builder(name, directory)
  enlargement = tfds_set.enlargement(builder, d)
  if enlargement:
    image_folder.warn_once(enlargement)
  return tfds_set.TfdsSet(builder, split)
