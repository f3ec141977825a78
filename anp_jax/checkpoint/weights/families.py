"""The families of networks whose tensors have published names.

A family is a module: which networks are of it, how the libraries name their
tensors, and what network a file's tensors, or a config, are of.
"""

from collections.abc import Iterable
from types import ModuleType
from typing import TYPE_CHECKING

import ml_collections
import numpy as np
from safetensors import numpy as safetensors_numpy

from anp_jax.checkpoint.weights import convnext_names, efficientnet_names, naming as resnet
from anp_jax.system import files

if TYPE_CHECKING:
  from anp_jax.checkpoint import trained as trained_lib

_ALL = (resnet, convnext_names, efficientnet_names)


def of_config(config: ml_collections.ConfigDict) -> ModuleType | None:
  """Returns the family of a config's network, or None."""
  name = config.model.name
  return next((family for family in _ALL if name in family.MODELS), None)


def of_tensors(names: Iterable[str]) -> tuple[ModuleType, str] | tuple[None, None]:
  """Returns the family of a file's tensors and their naming, or two Nones."""
  names = set(names)
  for family in _ALL:
    if naming := family.detect(names):
      return family, naming
  return None, None


def names() -> str:
  """Returns the families' names, for people."""
  return ' or '.join(family.NAME for family in _ALL)


def namings() -> str:
  """Returns what files can be read, for people."""
  return '; or '.join(
    f'{family.NAME}, named as in {" or in ".join(family.CLASSIFIERS)}' for family in _ALL
  )


def save(trained: 'trained_lib.Trained', naming: str, path: str) -> None:
  """Writes the `tensors` of a network into a .safetensors file."""
  with files.atomic_path(path) as draft:
    safetensors_numpy.save_file(tensors(trained, naming), draft, metadata={'format': 'pt'})


def tensors(trained: 'trained_lib.Trained', naming: str) -> dict[str, np.ndarray]:
  """Returns arrays, float32, by their published names.

  Args:
    trained: network of a family.
    naming: one of its family's.
  """
  from flax import traverse_util  # heavy: it imports JAX

  flat = traverse_util.flatten_dict({'params': trained.params, **trained.stats}, sep='/')
  family = of_config(trained.config)
  assert family
  names = family.published_names(flat, naming, family.prefix(trained.config))
  result = {}
  for name, published_name in names.items():
    value = np.asarray(flat[name], np.float32)
    value = family.to_published(name, value, naming)
    result[published_name] = np.ascontiguousarray(value)
    if name.endswith('/mean'):
      count = published_name.replace('running_mean', resnet.UNUSED)
      result[count] = np.asarray(trained.step, np.int64)
  return result
