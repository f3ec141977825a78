"""A step of two compiled programs, with the face of one."""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class TwoPrograms:
  """(state, batch) -> (state, values), the optimizer's update by itself.

  Attributes:
    gradients: jitted (params, stats, step, batch) -> what the update needs.
    update: jitted (state, that) -> (state, values).
    sharding: of what passes between them.
  """

  gradients: Callable
  update: Callable
  sharding: jax.sharding.Sharding

  def __call__(self, state, batch):
    """Runs both."""
    return self.update(
      state, self.gradients(state.params, state.stats, state.step, batch)
    )

  def lower(self, state, batch) -> 'Lowered':
    """As of a jitted function."""
    first = self.gradients.lower(state.params, state.stats, state.step, batch)
    between = jax.tree.map(
      lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=self.sharding),
      first.out_info,
    )
    return Lowered(first, self.update.lower(state, between))


@dataclasses.dataclass(frozen=True)
class Lowered:
  """As jax.stages.Lowered, of which it has two."""

  first: Any
  second: Any

  def as_text(self) -> str:
    """Of the first program, which has all products and all that is sent."""
    return self.first.as_text()

  def compile(self) -> 'Compiled':
    """Compiles both."""
    return Compiled(self.first.compile(), self.second.compile())


@dataclasses.dataclass(frozen=True)
class Compiled:
  """As jax.stages.Compiled, of which it has two."""

  first: Any
  second: Any

  def __call__(self, state, batch):
    """Runs both."""
    return self.second(
      state, self.first(state.params, state.stats, state.step, batch)
    )

  def as_text(self) -> str:
    """Of the first program, which has all products and all that is sent."""
    return self.first.as_text()

  def memory_analysis(self):
    """Of the first program, which needs more."""
    return self.first.memory_analysis()
