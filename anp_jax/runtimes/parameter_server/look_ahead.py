"""Weights that workers read ahead of the servers', by the momentum to come.

When a gradient is applied, momentum has moved the weights since its worker read
them. That part of the move is known beforehand, so workers read weights that
have made it already. With weights w, rate r, momentum k and gradients g, element by
element, `dana` (DANA-Zero; Hakimi et al., 2019, arXiv 1907.11612) has a momentum v_i
for each gradient under way, of the worker that computes it:

  v_i <- k v_i + g,  w <- w - r v_i;  workers read w - r k sum(v_i)

A checkpoint keeps the mean of all v_i as the trace, so it has the form that all
strategies have, workers read the same weights after a resume, and for one worker
nothing is lost. After a resume each v_i is that mean.

With optimizer.name=nesterov the servers keep (score, average, save) what
workers read, as Nesterov's momentum of optax does: for one worker `dana` is that
optimizer.
"""

from collections.abc import Callable
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax

# Updates without a gradient of a worker, in cycles of all gradients under way,
# after which it counts as gone: its momentum, which nobody lets fade any more,
# would keep all others away from the weights for ever.
_GONE = 16


@dataclasses.dataclass(frozen=True)
class Settings:
  """What decides how far ahead workers read; JSON values for the log.

  Attributes:
    method: config.strategy.look_ahead.
    under_way: gradients that are computed at a time, of all workers.
    in_flight: gradients of a worker at a time.
  """

  method: str = 'none'
  under_way: int = 1
  in_flight: int = 1


def settings(config: ml_collections.ConfigDict, workers: int) -> Settings:
  """Returns the settings of a run of so many workers."""
  s = config.strategy
  if s.look_ahead == 'none':
    return Settings()
  return Settings(s.look_ahead, workers * s.in_flight, s.in_flight)


def describe(ahead: Settings) -> str:
  """Returns the end of the line about the servers."""
  if ahead.method == 'none':
    return ''
  return f', {ahead.method} looks {ahead.under_way} gradients ahead'


class Holder(NamedTuple):
  """The worker of a momentum.

  Attributes:
    worker: name; '': nobody's yet.
    order: last update that it made.
    is_gone: whether its worker is gone, and the momentum zero.
  """

  worker: str
  order: int
  is_gone: bool = False


def first_holders(ahead: Settings, order: int) -> list[Holder]:
  """Returns the holders of all momenta before the first update, of this number; or []."""
  count = ahead.under_way if ahead.method == 'dana' else 0
  return [Holder('', order - 1)] * count


def claim(
  holders: list[Holder], worker: str, order: int, in_flight: int
) -> tuple[list[Holder], int, int | None]:
  """Finds the momentum that a worker's next gradient changes.

  A worker's gradients take turns. A worker that joins takes a momentum that
  is nobody's, or that of the worker that has been silent for longest.

  Args:
    holders: holder of each momentum.
    worker: name, as in the log.
    order: number of the update.
    in_flight: gradients of a worker at a time.

  Returns:
    The new holders, the momentum's index, and that of one whose worker is gone, or None.
  """
  holders = [*holders]
  late = order - _GONE * len(holders)
  gone = next((i for i, h in enumerate(holders) if not h.is_gone and h.order < late), None)
  if gone is not None:
    holders[gone] = Holder('', holders[gone].order, is_gone=True)
  candidates = [i for i, h in enumerate(holders) if h.worker == worker]
  if len(candidates) < in_flight:
    candidates = [i for i, h in enumerate(holders) if h.worker != worker]
  index = min(candidates, key=lambda i: holders[i].order)
  holders[index] = Holder(worker, order)
  return holders, index, gone


class LookAhead:
  """The optax chain of a run, and how far ahead of its weights workers read.

  Attributes:
    keeps_read: whether the weights that are kept are those that workers read.
  """

  def __init__(
    self,
    ahead: Settings,
    config: ml_collections.ConfigDict,
    chain: optax.GradientTransformation,
    schedule: optax.Schedule,
    scale: Callable[[Any], Any] = lambda move: move,
  ):
    """Keeps what every update needs.

    Args:
      ahead: how far workers look ahead.
      config: the run's config.
      chain: effects from `optimizer.create`; `momentum` for a run of `nesterov`
        that looks ahead.
      schedule: update to learning rate.
      scale: function of a move that multiplies it, as the chain does its updates.
    """
    self._ahead = ahead
    self.keeps_read = ahead.method == 'none' or config.optimizer.name == 'nesterov'
    self._chain = optax.with_extra_args_support(chain)
    self._schedule, self._scale = schedule, scale
    self._momentum = config.optimizer.momentum if ahead.method != 'none' else 0.0

  def update(
    self, step: jax.Array, gradient: Any, state: Any, decays: jax.Array | None = None
  ) -> tuple[Any, Any, Any]:
    """Computes an update of a block of a slice, or of whole parameters.

    Args:
      step: () updates before this one.
      gradient: like the weights.
      state: object with `params`, `opt_state` and `momentum`, that of the gradient's
        worker, such as a `slice_optimizer.BlockState`.
      decays: like the gradient, the block's part of `optimizer.slice_decays`;
        or None.

    Returns:
      What is added to the kept weights; the new opt_state; the new momentum.
    """
    old = state.opt_state
    if self._ahead.method == 'none':
      updates, new = self._chain.update(gradient, old, state.params, decays=decays)
      return updates, new, None
    inner = optax.tree.set(old, trace=state.momentum)
    updates, new = self._chain.update(gradient, inner, state.params, decays=decays)
    momentum = trace(new)
    # For one worker the mean is its own, to the bit.
    count = self._ahead.under_way
    mean = jax.tree.map(
      lambda all_, before, after: (count * all_ - before + after) / count,
      trace(old),
      state.momentum,
      momentum,
    )
    if self.keeps_read:
      moved = jax.tree.map(jnp.subtract, mean, trace(old))
      updates = jax.tree.map(jnp.add, updates, self.move(step, moved))
    return updates, optax.tree.set(new, trace=mean), momentum

  def claim(self, state: Any, worker: str) -> tuple[Any, int | None]:
    """Gives an update of dana the momentum of its worker's gradient.

    Args:
      state: `slice_optimizer.SliceState`.
      worker: name, as in the log.

    Returns:
      The state, and the momentum's index for `release`.
    """
    if self._ahead.method == 'none':
      return state, None
    blocks, momenta, order = state.blocks, [*state.momenta], int(state.step)
    if not momenta:
      traces = tuple(trace(block.opt_state) for block in blocks)
      momenta = [(holder, traces) for holder in first_holders(self._ahead, order)]
    holders, arrays = map(list, zip(*momenta, strict=True))
    holders, index, gone = claim(holders, worker, order, self._ahead.in_flight)
    if gone is not None:
      blocks = [
        b.replace(opt_state=without(b.opt_state, m, self._ahead.under_way))
        for b, m in zip(blocks, arrays[gone], strict=True)
      ]
      arrays[gone] = tuple(np.zeros_like(m) for m in arrays[gone])
    blocks = tuple(b.replace(momentum=m) for b, m in zip(blocks, arrays[index], strict=True))
    return state.replace(blocks=blocks, momenta=tuple(zip(holders, arrays, strict=True))), index

  def release(self, state: Any, index: int | None) -> Any:
    """Returns the SliceState after an update that has used `claim`."""
    if index is None:
      return state
    momenta = [*state.momenta]
    momenta[index] = momenta[index][0], tuple(b.momentum for b in state.blocks)
    blocks = tuple(block.replace(momentum=None) for block in state.blocks)
    return state.replace(blocks=blocks, momenta=tuple(momenta))

  def move(self, step: jax.Array, momentum: Any) -> Any:
    """Returns what momentum adds to the weights before a gradient counts.

    Args:
      step: () update whose learning rate it is.
      momentum: mean momentum.
    """

    def moved(m):
      rate = jnp.asarray(self._schedule(step), m.dtype)
      return -rate * self._momentum * self._ahead.under_way * m

    return self._scale(jax.tree.map(moved, momentum))


def trace(opt_state: Any) -> Any:
  """Returns the sum of gradients in the state of an optax chain."""
  return optax.tree.get(opt_state, 'trace')


def without(opt_state: Any, momentum: Any, count: int) -> Any:
  """Returns a chain's state whose trace, a mean of `count`, lacks a momentum."""
  rest = jax.tree.map(lambda all_, m: all_ - m / count, trace(opt_state), momentum)
  return optax.tree.set(opt_state, trace=rest)
