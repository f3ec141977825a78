"""Long sums, taken so that a CPU computes their terms on the way."""

from collections.abc import Callable
import functools
import math
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

# On a CPU, YNNPACK adds terms that XLA has written out before. A sum of two slices,
# element by element, takes their producer in and leaves half to YNNPACK: 0.6 to 0.8 of the
# time of a ResNet-50's step (64 and 224 px, JAX 0.10.2).
_SLICES = 2
_LARGE = 2**15  # elements


def over_rows(term: Callable, *arrays: jax.Array, platform: str) -> jax.Array:
  """The sum of term(*arrays) over axis 1.

  Args:
    term: maps arrays (groups, rows, channels) to one of as many groups and
      rows; called for some of the rows at a time, or XLA writes out what the
      slices have in common.
    *arrays: (groups, rows, channels), each with channels of its own.
    platform: platform of the device that computes.

  Returns:
    (groups, the term's channels).
  """
  groups, rows, _ = arrays[0].shape
  slices = math.gcd(_SLICES, rows) if platform.startswith('cpu') else 1
  if slices == 1:
    return term(*arrays).sum(1)
  parts = [a.reshape(groups, slices, -1, a.shape[-1]) for a in arrays]
  terms = [term(*(lax.index_in_dim(p, i, 1, keepdims=False) for p in parts)) for i in range(slices)]
  return functools.reduce(jnp.add, terms).sum(1)


def pair_over_rows(first: tuple, second: tuple, platform: str) -> tuple[jax.Array, jax.Array]:
  """Two results of `over_rows`, each from (term, *arrays).

  On a GPU they are one reduction of two operands: with two reductions, XLA would
  compute the sums over all groups once more in the next pass over the rows.
  """
  if platform != 'gpu':
    sum_of_first, sum_of_second = (
      over_rows(term, *arrays, platform=platform) for term, *arrays in (first, second)
    )
    return sum_of_first, sum_of_second
  terms = tuple(term(*arrays) for term, *arrays in (first, second))
  zeros = tuple(jnp.zeros((), x.dtype) for x in terms)
  return lax.reduce(terms, zeros, lambda x, y: (x[0] + y[0], x[1] + y[1]), [1])


@jax.jit
def of_squares(x: jax.Array) -> jax.Array:
  """The sum of x^2 over all elements, in float32 or wider."""
  # In slices, as `over_rows`, the norms of a ResNet-50 took a fifth to a third of a CPU's step.
  return jnp.square(x.astype(jnp.promote_types(x.dtype, jnp.float32))).sum()


def norm(tree: Any, platform: str, divided: Any = None) -> jax.Array:
  """The L2 norm of all leaves of a float dtype, as one vector.

  Args:
    tree: pytree of arrays.
    platform: platform of the mesh.
    divided: pytree of bools, whether a mesh divides the array; None: none is.
  """
  leaves = jax.tree.leaves(tree)
  kinds = jax.tree.leaves(divided) if divided else [False] * len(leaves)
  parts, small = [], []
  for x, is_divided in zip(leaves, kinds, strict=True):
    if not jnp.issubdtype(x.dtype, jnp.inexact):
      continue
    if is_divided:
      parts.append(jnp.square(x).sum())
    elif x.size < _LARGE or platform == 'gpu':
      small.append(lax.reshape(x, (x.size,)))  # `ravel` takes ten times as long to trace
    else:
      parts.append(of_squares(x))
  # Hundreds of small sums take longer to compile and to start than to compute.
  # On a GPU all are small: of ResNet-50's step they were a quarter of the
  # kernels, and one copy of its 102 MB takes less.
  if small:
    parts.append(of_squares(jnp.concatenate(small)))
  return jnp.sqrt(sum(parts)) if parts else jnp.zeros(())
