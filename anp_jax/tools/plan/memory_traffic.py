"""Bytes that a program moves through a device's memory, from its jaxpr.

A compiler that fuses reads and writes few arrays: the operands and results of
convolutions and matrix products, what reductions read, and nothing in between.
That rule is applied to the jaxpr here. Nothing is compiled, so the count is the
same for a device that is not here.
"""

import dataclasses
import math

import jax
from jax.extend import core

_PRODUCTS = frozenset(('conv_general_dilated', 'dot_general'))
_REDUCTIONS = frozenset(
  'reduce_sum reduce_max reduce_min argmax argmin cumsum sort '
  'reduce_window reduce_window_max reduce_window_sum '
  'select_and_scatter_add select_and_gather_add gather scatter scatter-add'.split()
)
# Below this share of the largest array that a pass reads, one is a statistic.
_SMALL = 0.05


@dataclasses.dataclass(frozen=True)
class Traffic:
  """What a program does with a device's memory.

  Attributes:
    size: bytes that are read and written.
    kernels: separate passes over arrays: products, reductions, and element-wise
      work whose result a product reads.
  """

  size: int
  kernels: int


def count(jaxpr: core.ClosedJaxpr) -> Traffic:
  """Counts a program's traffic, each group of fused operations as one pass.

  Args:
    jaxpr: program, as from `jax.make_jaxpr`; calls are inlined, a loop or branch is one
      operation.
  """
  flat = _Flat()
  names = {v: flat.add_array(v) for v in jaxpr.jaxpr.invars}
  flat.inline(jaxpr.jaxpr, names)
  outputs = jaxpr.jaxpr.outvars
  return flat.traffic([names[v] for v in outputs if v in names])


class _Flat:
  """A program's operations with its calls inlined; arrays are numbers."""

  def __init__(self):
    self._operations = []  # (primitive's name, operands, results)
    self._sizes = []  # bytes of each array

  def add_array(self, variable) -> int:
    """Adds an array; returns its number."""
    self._sizes.append(_bytes(variable.aval))
    return len(self._sizes) - 1

  def inline(self, jaxpr, names):
    """Appends operations; `names` maps variables to arrays and is extended."""
    for v in jaxpr.constvars:
      names.setdefault(v, self.add_array(v))
    for equation in jaxpr.eqns:
      operands = [v for v in equation.invars if isinstance(v, core.Var)]
      inner = _called(equation)
      if inner is None:
        results = [self.add_array(v) for v in equation.outvars]
        names.update(zip(equation.outvars, results))
        arrays = [names[v] for v in operands]
        self._operations.append((equation.primitive.name, arrays, results))
        continue
      pairs = zip(inner.invars, equation.invars)
      inner_names = {
        v: names[w] if isinstance(w, core.Var) else self.add_array(v) for v, w in pairs
      }
      self.inline(inner, inner_names)
      for outer, result in zip(equation.outvars, inner.outvars):
        is_array = isinstance(result, core.Var)
        names[outer] = inner_names[result] if is_array else self.add_array(outer)

  def traffic(self, outputs: list[int]) -> Traffic:
    """Adds up what is read and written."""
    stored = set(outputs)
    for name, operands, _ in self._operations:
      stored.update(operands if name in _PRODUCTS else ())
    origins: dict[int, frozenset[int]] = {}  # array to the stored arrays that it is computed from
    size, kernels, passes = 0, 0, set()
    for name, operands, results in self._operations:
      inputs = frozenset().union(*(origins.get(a, frozenset((a,))) for a in operands))
      if name in _PRODUCTS:
        size += self._bytes(operands) + self._bytes(results)
        kernels += 1
      elif name in _REDUCTIONS:
        passes.add(self._large(inputs))
        size += self._bytes(results)
      else:
        written = [a for a in results if a in stored]
        if written:
          size += self._bytes(inputs) + self._bytes(written)
          kernels += 1
        for a in results:
          origins[a] = frozenset((a,)) if a in stored else inputs
    # Reductions of the same arrays are one pass, as in a fused batch norm.
    largest = [p for p in passes if not any(p < q for q in passes)]
    size += sum(map(self._bytes, largest))
    kernels += len(largest)
    return Traffic(size, kernels)

  def _large(self, arrays) -> frozenset[int]:
    """The arrays that are not small next to the largest one."""
    most = max((self._sizes[a] for a in arrays), default=0)
    return frozenset(a for a in arrays if self._sizes[a] >= _SMALL * most)

  def _bytes(self, arrays) -> int:
    return sum(self._sizes[a] for a in arrays)


def _called(equation):
  """The jaxpr that an equation calls once, or None."""
  if equation.primitive.name in ('scan', 'while', 'cond'):
    return None
  for value in equation.params.values():
    inner = getattr(value, 'jaxpr', value)
    if isinstance(inner, core.Jaxpr) and (
      len(inner.invars) == len(equation.invars) and len(inner.outvars) == len(equation.outvars)
    ):
      return inner
  return None


def _bytes(aval) -> int:
  if not hasattr(aval, 'shape') or jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended):
    return 0
  return math.prod(aval.shape) * aval.dtype.itemsize
