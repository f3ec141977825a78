"""Weights that workers read ahead of the servers', by the momentum to come.

When a gradient is applied, momentum has moved the weights since its worker read
them. That part of the move is known beforehand, so workers read weights w that
have made it already. With rate r, momentum k, gradients g and n of them under
way, element by element:

  dana (Hakimi et al., 2019, arXiv 1907.11612): a momentum v_i for each gradient
    under way, of the worker that computes it.
      v_i <- k v_i + g,  w <- w - r v_i;  workers read w - r k sum(v_i)
  smega2 (Cohen, Hakimi and Schuster, ICPP 2022): one momentum v for all, which
    stays for a cycle of n gradients, and then becomes the mean of its m.
      m = k v + g,  w <- w - r m;  workers read w - r k ((n - c) v + c u)
    after c gradients of a cycle, with u = (sum(m) + (n - c) k v) / n: the next
    v, if the gradients that the cycle lacks were zero.

Both read w - r k n e, where e is the mean momentum of the next n updates. This
is what a checkpoint keeps as the trace, so it has the form that all strategies
have, workers read the same weights after a resume, and for one worker nothing
is lost. After a resume each v_i, or v, is e.

With optimizer.name=nesterov the servers keep (score, average, save) what
workers read, as Nesterov's momentum of optax does: for one worker both methods
are that optimizer.
"""

import dataclasses
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
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
    under_way: n, gradients that are computed at a time, and count.
    workers: of the run.
    in_flight: gradients of a worker at a time.
  """

  method: str = 'none'
  under_way: int = 1
  workers: int = 1
  in_flight: int = 1


def settings(config, workers: int) -> Settings:
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


@struct.dataclass
class Cycle:
  """The gradients since the momentum changed, of smega2.

  Attributes:
    total: sum of their m.
    count: () int32, c.
  """

  total: Any
  count: Any


@dataclasses.dataclass(frozen=True)
class WorkerMomentum:
  """The v_i of dana.

  Attributes:
    worker: its name; '': nobody's yet.
    order: of the last update that it made.
    blocks: arrays, by block of the slice; None: zero.
  """

  worker: str
  order: int
  blocks: tuple | None


class LookAhead:
  """The optax chain of a run, and what it sends workers ahead.

  Attributes:
    settings: `Settings`.
    keeps_read: whether the servers' weights are those that workers read.
  """

  def __init__(self, ahead: Settings, config, chain, schedule):
    """Keeps what every block's update needs.

    Args:
      ahead: the settings.
      config: of the run.
      chain: from `optimizer.create` with whole_leaves=False; of `momentum` for
        a run of `nesterov` that looks ahead.
      schedule: update to learning rate.
    """
    self.settings = ahead
    is_ahead = ahead.method != 'none'
    self.keeps_read = not is_ahead or config.optimizer.name == 'nesterov'
    self._chain = optax.with_extra_args_support(chain)
    self._schedule = schedule
    self._decay = config.optimizer.momentum if is_ahead else 0.0

  def start(self, opt_state, xp=jnp):
    """Returns the Cycle that a session begins with; None if there is none."""
    if self.settings.method != 'smega2':
      return None
    total = xp.zeros_like(_trace(opt_state))
    return Cycle(total=total, count=xp.zeros((), xp.int32))

  def update(self, step, gradient, state, decays):
    """Computes a block's update.

    Args:
      step: () updates before this one.
      gradient: of the block.
      state: `slice_optimizer.BlockState`; its `momentum` is the Cycle, or the
        v_i of the gradient's worker.
      decays: like the gradient, the block's part of `optimizer.slice_decays`;
        or None.

    Returns:
      What is added to the kept weights; the new opt_state; the new momentum.
    """
    method, n = self.settings.method, self.settings.under_way
    old = state.opt_state
    if method == 'dana':
      old = optax.tree.set(old, trace=state.momentum)
    updates, new = self._chain.update(gradient, old, state.params, decays=decays)
    momentum = None
    if method == 'dana':
      momentum = _trace(new)
      count = self.settings.workers * self.settings.in_flight
      # For one worker the mean is its own, to the bit.
      total = count * _trace(state.opt_state) - state.momentum + momentum
      new = optax.tree.set(new, trace=total / count)
    if method == 'smega2':
      total = state.momentum.total + _trace(new)
      count = state.momentum.count + 1
      is_full = count == n
      trace = jnp.where(is_full, total / n, _trace(old))
      new = optax.tree.set(new, trace=trace)
      momentum = Cycle(total=jnp.where(is_full, 0, total), count=jnp.where(is_full, 0, count))
    if method != 'none' and self.keeps_read:
      before = self.expected(state.opt_state, state.momentum)
      after = self.expected(new, momentum)
      updates = updates + self.move(step, after - before)
    return updates, new, momentum

  def claim(self, state, worker: str):
    """Gives a dana update the momentum of its worker's gradient.

    A worker's gradients take turns. One that joins takes what is nobody's, or
    over from the one that has been silent for longest.

    Args:
      state: `slice_optimizer.SliceState`.
      worker: name, of the log.

    Returns:
      The state, and the momentum's index for `release`.
    """
    if self.settings.method != 'dana':
      return state, None
    order, blocks, momenta = int(state.step), state.blocks, [*state.momenta]
    in_flight = self.settings.in_flight
    count = self.settings.workers * in_flight
    if not momenta:
      traces = tuple(_trace(block.opt_state) for block in blocks)
      momenta = [WorkerMomentum('', order - 1, traces)] * count
    for i, old in enumerate(momenta):
      if old.blocks and order - old.order > _GONE * count:
        blocks = [_without(b, m, count) for b, m in zip(blocks, old.blocks)]
        momenta[i] = WorkerMomentum('', old.order, None)
    index = _claim(momenta, worker, in_flight)
    vectors = momenta[index].blocks or [np.zeros_like(_trace(block.opt_state)) for block in blocks]
    momenta[index] = WorkerMomentum(worker, order, None)
    blocks = [b.replace(momentum=m) for b, m in zip(blocks, vectors, strict=True)]
    return state.replace(blocks=tuple(blocks), momenta=tuple(momenta)), index

  def release(self, state, index: int | None):
    """Returns the state after an update that has used `claim`."""
    if index is None:
      return state
    momenta, new = [*state.momenta], tuple(b.momentum for b in state.blocks)
    momenta[index] = dataclasses.replace(momenta[index], blocks=new)
    blocks = tuple(block.replace(momentum=None) for block in state.blocks)
    return state.replace(blocks=blocks, momenta=tuple(momenta))

  def saved(self, block):
    """Returns a block's state as a checkpoint keeps it, in NumPy arrays.

    Args:
      block: `slice_optimizer.BlockState`.
    """
    block = jax.device_get(block).replace(ahead=None)
    if block.momentum is None:
      return block
    expected = self.expected(block.opt_state, block.momentum)
    return block.replace(opt_state=optax.tree.set(block.opt_state, trace=expected), momentum=None)

  def expected(self, opt_state, momentum):
    """Returns e, the mean momentum of the next n updates.

    Args:
      opt_state: of the chain; NumPy arrays give NumPy arrays.
      momentum: the Cycle of smega2.
    """
    trace = _trace(opt_state)
    if self.settings.method != 'smega2':
      return trace
    n = self.settings.under_way
    done = (momentum.count / n).astype(trace.dtype)
    later = momentum.total / n + (1 - done) * self._decay * trace
    return trace + done * (later - trace)

  def move(self, step, expected):
    """Returns what momentum adds to the weights before a gradient counts.

    Args:
      step: () update whose learning rate it is.
      expected: see `expected`.
    """
    rate = jnp.asarray(self._schedule(step), expected.dtype)
    return -rate * self._decay * self.settings.under_way * expected


def _claim(momenta, worker, in_flight):
  """The index of the momentum that a worker's next gradient changes."""
  candidates = [i for i, m in enumerate(momenta) if m.worker == worker]
  if len(candidates) < in_flight:
    candidates = [i for i, m in enumerate(momenta) if m.worker != worker]
  return min(candidates, key=lambda i: momenta[i].order)


def _without(block, momentum, count):
  """A block's state whose trace, a mean of `count`, lacks a momentum."""
  trace = _trace(block.opt_state) - momentum / count
  return block.replace(opt_state=optax.tree.set(block.opt_state, trace=trace))


def _trace(opt_state):
  return optax.tree.get(opt_state, 'trace')
