"""Kernels in a run's state: each device holds its channels of a split kernel.

The parts follow one another, each padded with zeros to the most features that a
device has, so that the mesh's axis 'model' divides them: an array's shards have one
size. Optimizer moments and averages lie like their kernel. An update leaves the
padding zero, since its gradient, weight and moments are zero.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from anp_jax.parallel import mesh as mesh_lib
from anp_jax.parallel.channel_split import split_operation

_SPEC = mesh_lib.P(None, None, None, mesh_lib.MODEL)

# Features of each device, by the path of each kernel that is split.
Counts = Mapping[str, Sequence[int]]


def divided(tree: Any, counts: Counts) -> Any:
  """A state, or a part of it, with split kernels in the run's layout.

  Args:
    tree: pytree of arrays; kernels (height, width, channels, features) are whole.
    counts: features of each device for the split kernels.

  Returns:
    The tree with split kernels (height, width, channels, devices * widest).
  """

  def divide(x, numbers):
    cuts = np.cumsum(numbers)[:-1].tolist()
    widest = max(numbers)
    parts = [
      jnp.pad(part, [(0, 0)] * 3 + [(0, widest - part.shape[-1])])
      for part in jnp.split(x, cuts, axis=-1)
    ]
    return jnp.concatenate(parts, -1)

  return _of_kernels(divide, tree, counts)


def joined(tree: Any, counts: Counts) -> Any:
  """The inverse of `divided`."""

  def join(x, numbers):
    return split_operation.join(jnp.split(x, len(numbers), axis=-1), numbers)

  return _of_kernels(join, tree, counts)


def abstract(tree: Any, counts: Counts, mesh: jax.sharding.Mesh) -> Any:
  """Shapes and shardings of `divided`, from those of whole kernels."""

  def divide(x, numbers):
    shape = (*x.shape[:-1], len(numbers) * max(numbers))
    sharding = jax.NamedSharding(mesh, _SPEC)
    return jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharding)

  return _of_kernels(divide, tree, counts)


def surrounded(params: Any, counts: Counts) -> Any:
  """Whole kernels on one device, zero outside of the channels that it holds.

  Args:
    params: this device's parameters, inside a shard_map; split kernels (height,
      width, channels, widest).
    counts: features of each device for the split kernels.

  Returns:
    The parameters with split kernels (height, width, channels, features).
  """

  def surround(x, numbers):
    begins = np.cumsum([0, *numbers[:-1]])
    begin = jnp.asarray(begins)[lax.axis_index(mesh_lib.MODEL)]
    # What follows the part is its padding: zeros, or beyond the last feature.
    zeros = jnp.zeros((*x.shape[:-1], sum(numbers) + max(numbers)), x.dtype)
    padded = lax.dynamic_update_slice_in_dim(zeros, x, begin, axis=-1)
    return padded[..., : sum(numbers)]

  return _of_kernels(surround, params, counts)


def _of_kernels(function: Callable, tree, counts: Counts):
  """The tree with function(leaf, counts) for split kernels, moments and averages."""

  def apply(name, leaf):
    kernel = mesh_lib.parameter_name(name, counts)
    if kernel is None or len(leaf.shape) != len(_SPEC):
      return leaf
    return function(leaf, tuple(counts[kernel]))

  return mesh_lib.map_by_name(apply, tree)
