"""The weights as one flat vector, which is cut into slices and blocks.

Each server owns a slice, and updates it block by block. A program per slice, or
per leaf, would be less code, but not the same weights from any number of
servers: XLA rounds Adam's update of one leaf otherwise than that of the same
leaf among others (measured: one element of ten, by the last bit).
"""

from collections.abc import Callable
import dataclasses
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from anp_jax import config as config_lib
from anp_jax.parallel import mesh as mesh_lib

# Elements between two places where a vector may be cut: whole vector registers,
# so that no element is computed by the code for a rest.
_ALIGNED = 64


class FlatTree:
  """A tree of float arrays as one vector: matrices first, then vectors.

  Weight decay depends on a leaf's rank: in this order, leaves that are treated
  alike are neighbours.

  Attributes:
    names: leaves' names, such as 'stage1/conv1/kernel', in the vector's order.
    size: elements.
    matrices: elements of the leaves of two or more axes.
    dtype: dtype of all leaves.
  """

  def __init__(self, tree: Any, dtype: Any):
    """Reads the shapes of a tree.

    Args:
      tree: pytree of arrays or shapes.
      dtype: dtype that every leaf must have.

    Raises:
      ConfigError: naming a leaf of another dtype.
    """
    leaves = [*mesh_lib.leaves_by_name(tree).items()]
    self.dtype = np.dtype(dtype)
    for name, leaf in leaves:
      if leaf.dtype != self.dtype:
        raise config_lib.ConfigError(
          f"config.strategy.name='parameter_server' carries {self.dtype} only, but the "
          f"network's {name} is {leaf.dtype}"
        )
    self._structure = jax.tree.structure(tree)
    self._order = sorted(range(len(leaves)), key=lambda i: leaves[i][1].ndim < 2)
    self._shapes = [tuple(leaves[i][1].shape) for i in self._order]
    self._sizes = [int(np.prod(shape)) for shape in self._shapes]
    self.names = [leaves[i][0] for i in self._order]
    self.size = sum(self._sizes)
    self.matrices = sum(n for n, shape in zip(self._sizes, self._shapes) if len(shape) > 1)

  def flatten(self, tree: Any, xp: ModuleType = jnp) -> Any:
    """Returns a tree's leaves as a (size,) vector; xp is the library to use."""
    leaves = jax.tree.leaves(tree)
    vectors = [xp.ravel(leaves[i]) for i in self._order]
    # A network without batch norm has no statistics, and nothing to join.
    return xp.concatenate(vectors or [xp.zeros(0, self.dtype)])

  def unflatten(self, vector: Any) -> Any:
    """Returns the tree whose leaves are views of a (size,) vector."""
    leaves: list[Any] = [None] * len(self._order)
    start = 0
    for i, shape, size in zip(self._order, self._shapes, self._sizes):
      leaves[i] = vector[start : start + size].reshape(shape)
      start += size
    return jax.tree.unflatten(self._structure, leaves)

  def flatten_within(self, tree: Any, xp: ModuleType = jnp) -> Any:
    """Flattens each subtree that has this structure, as an optimizer's has."""

    def is_tree(node):
      return jax.tree.structure(node) == self._structure

    def flatten(node):
      return self.flatten(node, xp) if is_tree(node) else node

    return jax.tree.map(flatten, tree, is_leaf=is_tree)

  def spread(self, value: Callable[[str], float]) -> np.ndarray:
    """Returns a (size,) vector with one value for all elements of a leaf.

    Args:
      value: leaf's name -> number.
    """
    values = np.array([value(name) for name in self.names], self.dtype)
    return np.repeat(values, self._sizes)

  def slices(self, count: int) -> list[slice]:
    """Cuts the vector into `count` slices of nearly as many elements.

    Raises:
      ConfigError: if there are not that many.
    """
    units = -(-self.size // _ALIGNED)
    if count > units:
      raise config_lib.ConfigError(
        f'config.strategy.servers={count}: {self.size} parameters are too few to cut'
      )
    cuts = [units * i // count * _ALIGNED for i in range(count)]
    return list(map(slice, cuts, [*cuts[1:], self.size]))

  def blocks(self, part: slice, matrices: int, vectors: int) -> list['Block']:
    """Cuts a slice into blocks of one rank.

    Args:
      part: slice of the vector.
      matrices: elements that a block of matrices has room for.
      vectors: the same for vectors.
    """
    stop = part.stop - part.start
    border = min(max(self.matrices - part.start, 0), stop)
    kinds = ((0, border, True, matrices), (border, stop, False, vectors))
    return [
      Block(start, min(start + size, end), is_matrix, size)
      for first, end, is_matrix, size in kinds
      for start in range(first, end, size)
    ]


@dataclasses.dataclass(frozen=True)
class Block:
  """Elements [start, stop) of a slice, all of matrices or all of vectors.

  Attributes:
    start: first element.
    stop: element after the last one.
    is_matrix: whether they are of matrices.
    size: elements that it is padded to.
  """

  start: int
  stop: int
  is_matrix: bool
  size: int

  def cut(self, vector: Any, xp: ModuleType = np) -> Any:
    """Returns this block of a slice's vector, padded with zeros.

    Returns:
      (size, 1) for matrices, else (size,): what depends on a leaf's rank, such
      as the mask of weight decay, is the same as for the whole leaf.
    """
    block = vector[self.start : self.stop]
    if len(block) < self.size:
      padding = xp.zeros(self.size - len(block), block.dtype)
      block = xp.concatenate([block, padding])
    return block.reshape(-1, 1) if self.is_matrix else block

  def trim(self, block: Any) -> np.ndarray:
    """Returns the (stop - start,) elements of what `cut` has padded."""
    return np.asarray(block).reshape(-1)[: self.stop - self.start]


class Layout:
  """How the weights and statistics of a run are cut and carried.

  Attributes:
    abstract_state: TrainState of shapes.
    params: FlatTree of the weights.
    stats: FlatTree of the running statistics, which server 0 alone keeps.
    slices: slice of the weights of each server.
  """

  def __init__(self, config: ml_collections.ConfigDict, abstract_state: Any):
    """Cuts the weights for config.strategy.servers.

    Raises:
      ConfigError: if a leaf has another dtype, or there are too few parameters.
    """
    dtype = config.model.param_dtype
    self.abstract_state = abstract_state
    self.params = FlatTree(abstract_state.params, dtype)
    self.stats = FlatTree(abstract_state.stats, dtype)
    self.slices = self.params.slices(config.strategy.servers)
