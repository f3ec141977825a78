"""The source of weights: a file or a checkpoint, by our names for tensors."""

from collections.abc import Iterable, Mapping
import dataclasses
import os

from flax import traverse_util
import jax.numpy as jnp
import ml_collections
import numpy as np

from anp_jax import config as config_lib
from anp_jax.checkpoint import trained as trained_lib
from anp_jax.checkpoint.weights import families, naming as naming_lib, published_weights
from anp_jax.config import data_keys, errors, networks
from anp_jax.data import vocabulary as vocabulary_lib
from anp_jax.data.sources import features
from anp_jax.models import layers

# CLIP's: its temperature is learnt, and held at 100 (arXiv 2103.00020, section 2.5).
_TEXT_SCALE = 100.0
_LENGTH_ERROR = 0.01  # of an image's features; half floats round at 0.001


@dataclasses.dataclass(frozen=True)
class Source:
  """Weights that a run can begin with.

  Attributes:
    path: path that was read.
    tensors: (name in the source, array in our order of axes) by our names.
    unused: names in the source that no tensor of ours corresponds to.
    outputs: meaning of the outputs, see `outputs`; None where the source does not
      say.
  """

  path: str
  tensors: Mapping[str, tuple[str, np.ndarray]]
  unused: tuple[str, ...]
  outputs: tuple | None


def read(path: str, config: ml_collections.ConfigDict, names: Iterable[str]) -> Source:
  """Reads a file of weights, a folder with one, a package's, or a checkpoint of ours.

  Args:
    path: value of config.init.from.
    config: config of the run that begins.
    names: names of its network's tensors, for example 'params/head/kernel'.

  Raises:
    ConfigError: if the weights cannot be read, or have another architecture.
  """
  path = published_weights.weights_file(path)
  if not os.path.isfile(path):
    return _of_checkpoint(path, config)
  return _of_file(path, config, names)


def of_texts(
  path: str,
  config: ml_collections.ConfigDict,
  names: Iterable[str],
  classes: tuple[str, ...],
  exact: bool = False,
) -> Source:
  """A linear network that scores as CLIP does, by 100 times the cosine of image and text.

  The features of an image must have length 1 where nothing will train it.

  Args:
    path: text:FILE, features of the names of classes.
    config: config of the run that begins.
    names: names of its network's tensors.
    classes: classes of the run, in their order.
    exact: whether nothing will train the network.

  Raises:
    ConfigError: if the file cannot be read or lacks a class, for another network, or for
      an image's features of another length.
  """
  place = f'config.init.from={path!r}'
  good = config.model.name == 'linear' and config.model.head == 'joint'
  errors.check(good, 'init.from', path, 'config.model.name=linear and config.model.head=joint')
  texts, values = features.read(path.removeprefix(published_weights.TEXT))
  rows = {text: i for i, text in enumerate(texts)}
  if missing := [name for name in classes if name not in rows]:
    raise config_lib.ConfigError(f'{place} has no text of the class {missing[0]!r}')
  values = values[[rows[name] for name in classes]]
  norms = np.linalg.norm(values, axis=1, keepdims=True)
  if not norms.all():
    raise config_lib.ConfigError(f'{place}: the text of {classes[norms.argmin()]!r} has length 0')
  if exact and config.data.source.startswith(data_keys.FEATURES):
    _check_lengths(place, config.data.source, config.data.eval_split)
  kernel = _TEXT_SCALE * (values / norms).T
  tensors = {'params/head/kernel': kernel, 'params/head/bias': np.zeros(len(classes))}
  for name in {*names} - {*tensors}:  # a normalisation that changes nothing
    fill = 1 - layers.BatchNorm.epsilon if name.endswith('var') else float(name.endswith('scale'))
    tensors[name] = np.full(len(kernel), fill)
  return Source(path, {name: (name, value) for name, value in tensors.items()}, (), None)


def _check_lengths(place, text, split):
  names, arrays = features.read_all(text, split)
  lengths = np.linalg.norm(np.concatenate(arrays, 1), axis=1)
  worst = np.abs(lengths - 1).argmax()
  if abs(lengths[worst] - 1) > _LENGTH_ERROR:
    raise config_lib.ConfigError(
      f'{place}: the features of {names[worst]!r} in {text}: {split} have length '
      f'{lengths[worst]:.4g}, expected 1'
    )


def outputs(config: ml_collections.ConfigDict, vocabulary: vocabulary_lib.Vocabulary) -> tuple:
  """Returns what each output of a run's network means: classes, adjectives, nouns."""
  names = ('class', vocabulary.names)
  words = (('adj.', vocabulary.adjectives), ('noun', vocabulary.nouns))
  heads = {'joint': (names,), 'multitask': (names, *words), 'factored': words}
  heads['bilinear'] = words * (1 + config.model.get('head_rank', 0))
  # Of a head of the user's own, nothing but its name says what the outputs mean.
  return heads.get(config.model.head, (config.model.head, names, *words))


def _of_checkpoint(path, config):
  trained = trained_lib.load(path)
  keys = ['name']
  if config.model.name in networks.RESNETS:
    keys.append('version')
  for key in keys:
    value, expected = trained.config.model[key], config.model[key]
    if value != expected:
      raise config_lib.ConfigError(
        f'config.init.from={path!r} holds weights of model.{key}={value!r}, '
        f'but config.model.{key}={expected!r}'
      )
  flat = traverse_util.flatten_dict({'params': trained.params, **trained.stats}, sep='/')
  return Source(
    path=trained.folder,
    tensors={name: (name, np.asarray(value)) for name, value in flat.items()},
    unused=(),
    outputs=outputs(trained.config, trained.vocabulary),
  )


def _of_file(path, config, names):
  if not families.of_config(config):
    raise config_lib.ConfigError(
      f'config.init.from={path!r}: a file of weights has a '
      f'{families.names()}, but config.model.name={config.model.name!r}; '
      'expected one of these, or a checkpoint of the same network'
    )
  tensors = published_weights.tensors(path)
  file_names = set(tensors)
  family, kind = families.of_tensors(path, file_names)
  if family is not families.of_config(config):
    raise config_lib.ConfigError(
      f'config.init.from={path!r} holds weights of {family.name}, but '
      f'config.model.name={config.model.name!r}'
    )
  saved_config = published_weights.architecture(path)
  if problem := family.mismatch(config, names, kind, saved_config):
    raise config_lib.ConfigError(f'config.init.from={path!r} {problem}')
  table = family.namings[kind]
  prefix = next((p for p in table.prefixes if any(n.startswith(p) for n in file_names)), '')
  ours = {name: path for path, name in family.published_names(names, kind, prefix).items()}
  unused = sorted(n for n in file_names - set(ours) if not n.endswith(naming_lib.UNUSED))
  missing = sorted(n for n in set(ours) - file_names if not n.startswith(f'{table.classifier}.'))
  foreign = [n for n in unused if family.is_backbone(n, kind)]
  if missing or foreign:
    what = f'has no {missing[0]}' if missing else f'has {foreign[0]} too'
    raise config_lib.ConfigError(
      f'config.init.from={path!r} {what}: it holds a network of '
      f'{family.describe(file_names, kind)}, but {config.model.name} has '
      f'{family.describe(ours, kind)}'
    )
  result = {}
  for file_name in sorted(set(ours) & file_names):
    value, name = tensors[file_name], ours[file_name]
    if not jnp.issubdtype(value.dtype, jnp.floating):
      raise config_lib.ConfigError(
        f'config.init.from={path!r}: {file_name} is {value.dtype}, expected floating point'
      )
    result[name] = file_name, family.from_published(name, value, kind)
  # The classes of a published network, whatever they are, are no words.
  meaning = None if config.model.head == 'joint' else ()
  return Source(path, result, tuple(unused), meaning)
