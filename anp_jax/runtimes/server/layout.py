"""Trees as flat vectors, and these cut into slices of whole blocks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from anp_jax import config as config_lib
from anp_jax.parallel import mesh as mesh_lib

# Elements between two places where a vector may be cut: whole vector registers,
# so that no element is computed by the code for a rest.
_ALIGNED = 64


class Flat:
  """A tree of float arrays as one vector: matrices first, then vectors.

  In this order, since weight decay asks for a leaf's rank: what is treated
  alike lies side by side.

  Attributes:
    names: of the leaves, such as 'stage1/conv1/kernel', in the vector's order.
    size: elements.
    matrices: elements of the leaves of two or more axes.
    dtype: of all leaves.
  """

  def __init__(self, like, dtype):
    """Makes it.

    Args:
      like: pytree of arrays or shapes.
      dtype: that every leaf must have.

    Raises:
      ConfigError: naming a leaf of another dtype.
    """
    leaves = jax.tree_util.tree_leaves_with_path(like)
    self.dtype = np.dtype(dtype)
    for path, leaf in leaves:
      if leaf.dtype != self.dtype:
        raise config_lib.ConfigError(
          f"config.strategy.name='server' carries {self.dtype} only, but the "
          f"network's {mesh_lib.path_name(path)} is {leaf.dtype}"
        )
    self._tree = jax.tree.structure(like)
    self._order = sorted(
      range(len(leaves)), key=lambda i: leaves[i][1].ndim < 2
    )
    self._shapes = [tuple(leaves[i][1].shape) for i in self._order]
    self._sizes = [int(np.prod(shape)) for shape in self._shapes]
    self.names = [mesh_lib.path_name(leaves[i][0]) for i in self._order]
    self.size = sum(self._sizes)
    self.matrices = sum(
      n for n, shape in zip(self._sizes, self._shapes) if len(shape) > 1
    )

  def vector(self, tree, xp=jnp):
    """The tree's leaves as a (size,) vector; xp is the library to use."""
    leaves = jax.tree.leaves(tree)
    parts = [xp.ravel(leaves[i]) for i in self._order]
    return xp.concatenate([*parts, xp.zeros(0, self.dtype)])

  def tree(self, vector):
    """The tree whose leaves are parts of a (size,) vector."""
    leaves, at = [None] * len(self._order), 0
    for i, shape, size in zip(self._order, self._shapes, self._sizes):
      leaves[i] = vector[at : at + size].reshape(shape)
      at += size
    return jax.tree.unflatten(self._tree, leaves)

  def spread(self, value) -> np.ndarray:
    """The (size,) vector that has in all elements of a leaf one value.

    Args:
      value: called with the leaf's name, gives a number.
    """
    values = np.array([value(name) for name in self.names], self.dtype)
    return np.repeat(values, self._sizes)

  def slices(self, count: int) -> list['Slice']:
    """Cuts the vector into `count` slices of nearly as many elements.

    Raises:
      ConfigError: if there are not that many.
    """
    units = -(-self.size // _ALIGNED)
    if count > units:
      raise config_lib.ConfigError(
        f'config.strategy.servers={count}: {self.size} parameters are too few '
        'to cut'
      )
    cuts = [units * i // count * _ALIGNED for i in range(count)]
    return [
      Slice(a, b, self.matrices) for a, b in zip(cuts, [*cuts[1:], self.size])
    ]


@dataclasses.dataclass(frozen=True)
class Slice:
  """Elements [start, stop) of the vector of all weights."""

  start: int
  stop: int
  matrices: int  # elements of the whole vector that belong to matrices

  @property
  def size(self) -> int:
    """Number of elements."""
    return self.stop - self.start

  def blocks(self, size: int) -> list['Block']:
    """Cuts the slice into blocks of at most `size` elements of one kind."""
    border = min(max(self.matrices, self.start), self.stop) - self.start
    return [
      Block(at, min(at + size, stop), is_matrix)
      for start, stop, is_matrix in (
        (0, border, True), (border, self.size, False)
      )
      for at in range(start, stop, size)
    ]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Block:
  """Elements [start, stop) of a slice, all of matrices or all of vectors."""

  start: int
  stop: int
  is_matrix: bool

  def cut(self, vector: np.ndarray, size: int) -> np.ndarray:
    """This block of a slice's vector, with zeros up to `size` elements.

    Returns:
      (size, 1) for matrices, else (size,): what asks for a leaf's rank, as the
      mask of weight decay does, is answered as for the whole leaf.
    """
    part = vector[self.start : self.stop]
    if len(part) < size:
      part = np.concatenate([part, np.zeros(size - len(part), part.dtype)])
    return part.reshape(-1, 1) if self.is_matrix else part
