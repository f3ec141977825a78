"""A file or a checkpoint with weights, read by our names for its tensors."""

from collections.abc import Mapping
import dataclasses
import os

from flax import traverse_util
import numpy as np
import safetensors

from anp_jax import config as config_lib
from anp_jax import models
from anp_jax.checkpoint import trained as trained_lib
from anp_jax.checkpoint.weights import naming as naming_lib
from anp_jax.checkpoint.weights import published

# What `safetensors` calls the types that weights can have.
_FLOATS = ('F64', 'F32', 'F16', 'BF16')


@dataclasses.dataclass(frozen=True)
class Source:
  """What there is to begin with.

  Attributes:
    path: that was read.
    what: its kind, for people.
    tensors: our name to (their name, array in our order of axes).
    others: names in the source for which there is none of ours.
    outputs: see `outputs`; None where the source does not say.
  """

  path: str
  what: str
  tensors: Mapping[str, tuple[str, np.ndarray]]
  others: tuple[str, ...]
  outputs: tuple | None


def read(path: str, config, names) -> Source:
  """Reads a .safetensors file, a folder with one, or a checkpoint of ours.

  Args:
    path: as config.init.from has it.
    config: of the run that begins.
    names: of its network's tensors, for example 'params/head/kernel'.

  Raises:
    ConfigError: for what cannot be read, or is of another architecture.
  """
  path = published.weights_file(path)
  if not os.path.isfile(path):
    return _of_checkpoint(path, config)
  _check_version(path, config)
  return _of_file(path, config, names)


def outputs(config, vocabulary) -> tuple:
  """What each output of a network is: of classes, adjectives and nouns.

  Args:
    config: of its run.
    vocabulary: of its run.
  """
  names = ('class', vocabulary.names)
  words = (('adj.', vocabulary.adjectives), ('noun', vocabulary.nouns))
  return {
    'joint': (names,), 'multitask': (names, *words), 'factored': words,
  }[config.model.head]  # fmt: skip


def _of_checkpoint(path, config):
  trained = trained_lib.load(path)
  keys = ['name']
  if models.is_resnet(config):
    keys.append('version')
  for key in keys:
    have, want = trained.config.model[key], config.model[key]
    if have != want:
      raise config_lib.ConfigError(
        f'config.init.from={path!r} holds weights of model.{key}={have!r}, but '
        f'config.model.{key}={want!r}'
      )
  flat = traverse_util.flatten_dict(
    {'params': trained.params, **trained.stats}, sep='/'
  )
  return Source(
    path=trained.folder,
    what=f'checkpoint of step {trained.step}',
    tensors={name: (name, np.asarray(value)) for name, value in flat.items()},
    others=(),
    outputs=outputs(trained.config, trained.vocabulary),
  )


def _check_version(path, config):
  """Where a bottleneck strides, no tensor tells: transformers' config does."""
  told = published.architecture(path)
  folder = os.path.dirname(path)
  if told.get('layer_type', 'bottleneck') != 'bottleneck':
    return
  version = 'v1' if told.get('downsample_in_bottleneck') else 'v1.5'
  if told.get('model_type') == 'resnet' and config.model.version != version:
    raise config_lib.ConfigError(
      f'config.init.from={folder!r} holds a ResNet of version {version!r}, but '
      f'config.model.version={config.model.version!r}'
    )


def _of_file(path, config, names):
  if not models.is_resnet(config):
    raise config_lib.ConfigError(
      f'config.init.from={path!r}: a .safetensors file has a ResNet, but '
      f'config.model.name={config.model.name!r}; expected a ResNet, or a '
      'checkpoint of the same network'
    )
  try:
    with safetensors.safe_open(path, framework='numpy') as file:
      return _of_tensors(path, file, names, config)
  except (safetensors.SafetensorError, OSError) as e:
    raise config_lib.ConfigError(
      f'config.init.from={path!r} cannot be read: {str(e).splitlines()[0]}'
    ) from e


def _of_tensors(path, file, names, config):
  have = set(file.keys())
  naming = published.naming(path, have)
  prefix = 'resnet.' if any(n.startswith('resnet.') for n in have) else ''
  ours = {naming_lib.published_name(n, naming, prefix): n for n in names}
  others = {n for n in have - set(ours) if not n.endswith(naming_lib.UNUSED)}
  missing = sorted(
    n
    for n in set(ours) - have
    if not n.startswith(naming_lib.CLASSIFIERS[naming])
  )
  foreign = sorted(n for n in others if naming_lib.is_backbone(n, naming))
  if missing or foreign:
    what = f'has no {missing[0]}' if missing else f'has {foreign[0]} too'
    raise config_lib.ConfigError(
      f'config.init.from={path!r} {what}: it holds a network of '
      f'{naming_lib.describe(have, naming)}, but {config.model.name} has '
      f'{naming_lib.describe(ours, naming)}'
    )
  tensors = {}
  for theirs in sorted(set(ours) & have):
    kind = file.get_slice(theirs).get_dtype()
    if kind not in _FLOATS:
      raise config_lib.ConfigError(
        f'config.init.from={path!r}: {theirs} is {kind}, expected one of '
        f'{", ".join(_FLOATS)}'
      )
    name = ours[theirs]
    value = naming_lib.from_published(name, file.get_tensor(theirs))
    tensors[name] = (theirs, value)
  # The classes of a published network, whatever they are, are no words.
  meaning = None if config.model.head == 'joint' else ()
  return Source(path, f'in the naming of {naming}', tensors,
                tuple(sorted(others)), meaning)  # fmt: skip
