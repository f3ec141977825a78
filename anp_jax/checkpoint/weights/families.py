"""The families of networks whose tensors have published names."""

from collections.abc import Collection
from typing import TYPE_CHECKING

import ml_collections
import numpy as np
from safetensors import numpy as safetensors_numpy

from anp_jax import config as config_lib
from anp_jax.checkpoint.weights import (
  caffenet_names,
  convnext_names,
  efficientnet_names,
  naming,
  resnet_names,
)
from anp_jax.system import files

if TYPE_CHECKING:
  from anp_jax.checkpoint import trained as trained_lib

RESNET = resnet_names.ResNet()
CONVNEXT = convnext_names.ConvNeXt()
EFFICIENTNET = efficientnet_names.EfficientNet()
_ALL: tuple[naming.Family, ...] = (RESNET, CONVNEXT, EFFICIENTNET, caffenet_names.CaffeNet())


def of_config(config: ml_collections.ConfigDict) -> naming.Family | None:
  """Returns the family of a config's network, or None."""
  return next((family for family in _ALL if config.model.name in family.models), None)


def of_tensors(path: str, names: Collection[str]) -> tuple[naming.Family, str]:
  """Returns the family of a file's tensors, and their naming.

  Raises:
    ConfigError: if they are those of none.
  """
  for family in _ALL:
    if kind := family.detect(names):
      return family, kind
  expected = '; or '.join(
    f'{family.name}, named as in {" or in ".join(n.label for n in family.namings.values())}'
    for family in _ALL
  )
  raise config_lib.ConfigError(
    f'config.init.from={path!r}: expected the tensors of {expected}; its first are '
    f'{", ".join(sorted(names)[:3]) or "none"}'
  )


def names() -> str:
  """Returns the families' names, for people."""
  return ' or '.join(family.name for family in _ALL)


def save(trained: 'trained_lib.Trained', kind: str, path: str) -> None:
  """Writes the `tensors` of a network into a .safetensors file."""
  files.write_atomic(path, safetensors_numpy.save(tensors(trained, kind), {'format': 'pt'}))


def tensors(trained: 'trained_lib.Trained', kind: str) -> dict[str, np.ndarray]:
  """Returns arrays, float32, by their published names.

  Args:
    trained: network of a family.
    kind: one of its family's namings.
  """
  from flax import traverse_util  # heavy: it imports JAX

  flat = traverse_util.flatten_dict({'params': trained.params, **trained.stats}, sep='/')
  family = of_config(trained.config)
  assert family
  prefix = family.prefix(trained.config, kind)
  result = {}
  for path, name in family.published_names(flat, kind, prefix).items():
    value = family.to_published(path, np.asarray(flat[path], np.float32), kind)
    result[name] = np.ascontiguousarray(value)
    if path.endswith('/mean'):
      count = name.replace('running_mean', naming.UNUSED)
      result[count] = np.asarray(trained.step, np.int64)
  return result
