"""Weights that workers read ahead of the servers', by the momentum to come.

When a gradient is applied, momentum has moved the weights since its worker read
them. That part of the move is known beforehand, so workers read weights that
have made it already. With weights w, rate r, momentum k, gradients g and n of them
under way, element by element:

  dana (DANA-Zero; Hakimi et al., 2019, arXiv 1907.11612): a momentum v_i for each
    gradient under way, of the worker that computes it.
      v_i <- k v_i + g,  w <- w - r v_i;  workers read w - r k sum(v_i)
  smega2 (Cohen, Hakimi and Schuster, ICPP 2022): one momentum v for all, which
    stays for a cycle of n gradients, and then becomes the mean of its m.
      m = k v + g,  w <- w - r m;  workers read w - r k ((n - c) v + c u)
    after c gradients of a cycle, with u = (sum(m) + (n - c) k v) / n: the next
    v, if the gradients that the cycle lacks were zero.

Both read w - r k n e, where e is the mean momentum of the next n updates. A
checkpoint keeps e as the trace, so it has the form that all strategies have,
workers read the same weights after a resume, and for one worker nothing is lost.
After a resume each v_i, or v, is e.

With optimizer.name=nesterov the servers keep (score, average, save) what
workers read, as Nesterov's momentum of optax does: for one worker both methods
are that optimizer.
"""

import dataclasses
from typing import Any

from flax import struct
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
  if s.mode != 'async':
    under_way = min(under_way, s.max_staleness + 1)
  return Settings(s.look_ahead, under_way, workers, s.in_flight)


def describe(ahead: Settings) -> str:
  """Returns the end of the line about the servers."""
  if ahead.method == 'none':
    return ''
  return f', {ahead.method} looks {ahead.under_way} gradients ahead'


class Cycle(struct.PyTreeNode):
  """The gradients since the momentum changed, of smega2.

  Attributes:
    total: sum of their m.
    count: () int32, c.
  """

  total: Any
  count: Any


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
    self._method = ahead.method
    self.keeps_read = ahead.method == 'none' or config.optimizer.name == 'nesterov'
    self._under_way, self._in_flight = ahead.under_way, ahead.in_flight
    self._count = ahead.workers * ahead.in_flight
    self._chain = optax.with_extra_args_support(chain)
    self._schedule = schedule
    self._momentum = config.optimizer.momentum if ahead.method != 'none' else 0.0

  def start(self, opt_state: Any, xp: Any = jnp) -> Cycle | None:
    """Returns the cycle that a session begins with; None but for smega2."""
    if self._method != 'smega2':
      return None
    return Cycle(total=xp.zeros_like(trace(opt_state)), count=xp.zeros((), xp.int32))

  def update(
    self, step: jax.Array, gradient: jax.Array, state: Any, decays: jax.Array | None
  ) -> tuple[jax.Array, Any, Any]:
    """Computes a block's update.

    Args:
      step: () updates before this one.
      gradient: like the block's weights.
      state: `slice_optimizer.BlockState`; its `momentum` is the Cycle, or the
        momentum of the gradient's worker.
      decays: like the gradient, the block's part of `optimizer.slice_decays`;
        or None.

    Returns:
      What is added to the kept weights; the new opt_state; the new momentum.
    """
    old = state.opt_state
    if self._method == 'dana':
      old = optax.tree.set(old, trace=state.momentum)
    updates, new = self._chain.update(gradient, old, state.params, decays=decays)
    if self._method == 'none':
      return updates, new, None
    momentum: Any = trace(new)
    if self._method == 'dana':
      # For one worker the mean is its own, to the bit.
      total = self._count * trace(state.opt_state) - state.momentum + momentum
      new = optax.tree.set(new, trace=total / self._count)
    else:
      total, count = state.momentum.total + momentum, state.momentum.count + 1
      is_full = count == self._under_way
      new = optax.tree.set(new, trace=jnp.where(is_full, total / self._under_way, trace(old)))
      momentum = Cycle(total=jnp.where(is_full, 0, total), count=jnp.where(is_full, 0, count))
    if self.keeps_read:
      before = self.expected(state.opt_state, state.momentum)
      updates = updates + self.move(step, self.expected(new, momentum) - before)
    return updates, new, momentum

  def saved(self, block: Any) -> Any:
    """Returns a `slice_optimizer.BlockState` as a checkpoint keeps it, in NumPy arrays."""
    block = jax.device_get(block)
    if block.momentum is None:
      return block
    expected = self.expected(block.opt_state, block.momentum)
    return block.replace(opt_state=optax.tree.set(block.opt_state, trace=expected), momentum=None)

  def expected(self, opt_state: Any, momentum: Any) -> Any:
    """Returns the mean momentum of the next updates, one for each gradient under way.

    Args:
      opt_state: state of the chain; NumPy arrays give NumPy arrays.
      momentum: Cycle of smega2.
    """
    current, n = trace(opt_state), self._under_way
    if not isinstance(momentum, Cycle):
      return current
    done = (momentum.count / n).astype(current.dtype)
    later = momentum.total / n + (1 - done) * self._momentum * current
    return current + done * (later - current)

  def claim(self, state: Any, worker: str) -> tuple[Any, int | None]:
    """Gives an update of dana the momentum of its worker's gradient.

    A worker's gradients take turns. A worker that joins takes a momentum that
    is nobody's, or that of the worker that has been silent for longest.

    Args:
      state: `slice_optimizer.SliceState`.
      worker: name, as in the log.

    Returns:
      The state, and the momentum's index for `release`.
    """
    if self._method != 'dana':
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
      momentum: mean momentum, from `expected`.
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
