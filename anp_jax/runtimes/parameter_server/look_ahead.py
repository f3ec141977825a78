"""Weights that workers read ahead of the servers', by the momentum to come.

When a gradient is applied, momentum has moved the weights since its worker read
them. That part of the move is known beforehand, so workers read weights that
have made it already. DANA-Zero (Hakimi et al., 2019, arXiv 1907.11612) keeps a
momentum v_i for each of n gradients under way, of the worker that computes it.
With weights w, rate r, momentum k and a gradient g, element by element:

  v_i <- k v_i + g,  w <- w - r v_i;  workers read w - r k sum(v_i)

A checkpoint keeps the mean of the v_i as the trace, so it has the form that all
strategies have, workers read the same weights after a resume, and for one
worker nothing is lost. After a resume each v_i is that mean.

With optimizer.name=nesterov the servers keep (score, average, save) what
workers read, as Nesterov's momentum of optax does: for one worker it is that
optimizer.
"""

import dataclasses
from typing import Any

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
    under_way: gradients that are computed at a time, and count.
    workers: number of processes that train.
    in_flight: gradients of a worker at a time.
  """

  method: str = 'none'
  under_way: int = 1
  workers: int = 1
  in_flight: int = 1


def settings(config: ml_collections.ConfigDict, workers: int) -> Settings:
  """Returns the settings of a run of so many workers."""
  s = config.strategy
  if s.look_ahead == 'none':
    return Settings()
  under_way = workers * s.in_flight
  if s.mode == 'bounded':
    under_way = min(under_way, s.max_staleness + 1)
  return Settings(s.look_ahead, under_way, workers, s.in_flight)


def describe(ahead: Settings) -> str:
  """Returns the end of the line about the servers."""
  if ahead.method == 'none':
    return ''
  return f', {ahead.method} looks {ahead.under_way} gradients ahead'


@dataclasses.dataclass(frozen=True)
class WorkerMomentum:
  """The momentum of a gradient under way.

  Attributes:
    worker: name of the worker that computes it; '': nobody's yet.
    order: last update that it made.
    blocks: arrays, by block of the slice; None: zero.
  """

  worker: str
  order: int
  blocks: tuple | None


class LookAhead:
  """The optax chain of a run, and how far ahead of its weights workers read.

  Attributes:
    keeps_read: whether the servers' weights are those that workers read.
  """

  def __init__(
    self,
    ahead: Settings,
    config: ml_collections.ConfigDict,
    chain: optax.GradientTransformation,
    schedule: optax.Schedule,
  ):
    """Keeps what every block's update needs.

    Args:
      ahead: how far workers look ahead.
      config: the run's config.
      chain: effects from `optimizer.create` with whole_leaves=False; `momentum`
        for a run of `nesterov` that looks ahead.
      schedule: update to learning rate.
    """
    self._is_ahead = ahead.method != 'none'
    self.keeps_read = not self._is_ahead or config.optimizer.name == 'nesterov'
    self._under_way, self._in_flight = ahead.under_way, ahead.in_flight
    self._count = ahead.workers * ahead.in_flight
    self._chain = optax.with_extra_args_support(chain)
    self._schedule = schedule
    self._momentum = config.optimizer.momentum if self._is_ahead else 0.0

  def update(
    self, step: jax.Array, gradient: jax.Array, state: Any, decays: jax.Array | None
  ) -> tuple[jax.Array, Any, jax.Array | None]:
    """Computes a block's update.

    Args:
      step: () updates before this one.
      gradient: like the block's weights.
      state: `slice_optimizer.BlockState`, with the momentum of the gradient's
        worker.
      decays: like the gradient, the block's part of `optimizer.slice_decays`;
        or None.

    Returns:
      What is added to the kept weights; the new opt_state; the new momentum of
      the worker, None without look-ahead.
    """
    if not self._is_ahead:
      updates, new = self._chain.update(gradient, state.opt_state, state.params, decays=decays)
      return updates, new, None
    old = optax.tree.set(state.opt_state, trace=state.momentum)
    updates, new = self._chain.update(gradient, old, state.params, decays=decays)
    before, momentum = trace(state.opt_state), trace(new)
    # For one worker the mean is its own, to the bit.
    mean = (self._count * before - state.momentum + momentum) / self._count
    if self.keeps_read:
      updates = updates + self.move(step, mean - before)
    return updates, optax.tree.set(new, trace=mean), momentum

  def claim(self, state: Any, worker: str) -> tuple[Any, int | None]:
    """Gives an update the momentum of its worker's gradient.

    A worker's gradients take turns. A worker that joins takes a momentum that
    is nobody's, or that of the worker that has been silent for longest.

    Args:
      state: `slice_optimizer.SliceState`.
      worker: name, as in the log.

    Returns:
      The state, and the momentum's index for `release`.
    """
    if not self._is_ahead:
      return state, None
    order, blocks, momenta = int(state.step), state.blocks, [*state.momenta]
    count = self._count
    if not momenta:
      traces = tuple(trace(block.opt_state) for block in blocks)
      momenta = [WorkerMomentum('', order - 1, traces)] * count
    for i, old in enumerate(momenta):
      if old.blocks and order - old.order > _GONE * count:
        blocks = [_without(b, m, count) for b, m in zip(blocks, old.blocks)]
        momenta[i] = WorkerMomentum('', old.order, None)
    index = _claim(momenta, worker, self._in_flight)
    vectors = momenta[index].blocks or [np.zeros_like(trace(b.opt_state)) for b in blocks]
    momenta[index] = WorkerMomentum(worker, order, None)
    blocks = [b.replace(momentum=m) for b, m in zip(blocks, vectors, strict=True)]
    return state.replace(blocks=tuple(blocks), momenta=tuple(momenta)), index

  def release(self, state: Any, index: int | None) -> Any:
    """Returns the SliceState after an update that has used `claim`."""
    if index is None:
      return state
    momenta, new = [*state.momenta], tuple(b.momentum for b in state.blocks)
    momenta[index] = dataclasses.replace(momenta[index], blocks=new)
    blocks = tuple(block.replace(momentum=None) for block in state.blocks)
    return state.replace(blocks=blocks, momenta=tuple(momenta))

  def move(self, step: jax.Array, momentum: jax.Array) -> jax.Array:
    """Returns what momentum adds to the weights before a gradient counts.

    Args:
      step: () update whose learning rate it is.
      momentum: mean of the gradients under way.
    """
    rate = jnp.asarray(self._schedule(step), momentum.dtype)
    return -rate * self._momentum * self._under_way * momentum


def trace(opt_state: Any) -> Any:
  """Returns the sum of gradients in the state of an optax chain."""
  return optax.tree.get(opt_state, 'trace')


def _claim(momenta, worker, in_flight):
  """The index of the momentum that a worker's next gradient changes."""
  candidates = [i for i, m in enumerate(momenta) if m.worker == worker]
  if len(candidates) < in_flight:
    candidates = [i for i, m in enumerate(momenta) if m.worker != worker]
  return min(candidates, key=lambda i: momenta[i].order)


def _without(block, momentum, count):
  """A block's state whose trace, a mean of `count`, lacks a momentum."""
  rest = trace(block.opt_state) - momentum / count
  return block.replace(opt_state=optax.tree.set(block.opt_state, trace=rest))
