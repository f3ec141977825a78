"""Checksums of arrays, on the device as part of a save and on the host."""

import hashlib
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def of_json(value: Any) -> str:
  """Returns the SHA-256 of a JSON value, whatever the order of its keys."""
  text = json.dumps(value, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()


def of_array(x: np.ndarray) -> int:
  """The checksum of one leaf, see `of_tree`, computed on the host."""
  width = min(x.dtype.itemsize, 4)
  words = np.ascontiguousarray(x).view(f'<u{width}').ravel()
  weights = 2 * np.arange(words.size, dtype=np.uint32) + np.uint32(1)
  return int((words.astype(np.uint32) * weights).sum(dtype=np.uint32))


# One for all checkpoints of a process: models that are alike compile it once.
@jax.jit
def of_tree(tree: Any) -> jax.Array:
  """(leaves,) uint32: for each leaf the sum of (2i + 1) word_i, modulo 2^32.

  The weights are odd, hence invertible: any one changed word is always seen,
  and two that change places almost always. Integer sums do not depend on the
  order, hence not on how the leaf is divided over devices.
  """
  # One array: a save's cost on the host grows with the number of leaves.
  return jnp.stack([_of_leaf(x) for x in jax.tree.leaves(tree)])


def _of_leaf(x):
  if x.dtype == jnp.bool_:
    x = x.astype(jnp.uint8)
  bits = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, jnp.uint32)
  words = jax.lax.bitcast_convert_type(x, bits).astype(jnp.uint32)
  position = jnp.zeros(words.shape, jnp.uint32)
  stride = 1
  for axis in reversed(range(words.ndim)):
    iota = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
    position += iota * np.uint32(stride % 2**32)
    stride *= words.shape[axis]
  return (words * (2 * position + 1)).sum(dtype=jnp.uint32)
