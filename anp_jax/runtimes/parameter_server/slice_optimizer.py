"""One server's slice of the state, and its update, compiled for a CPU."""

from collections.abc import Sequence
import functools
import os
from typing import Any, NamedTuple

from flax import struct
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from anp_jax import config as config_lib
from anp_jax.parallel import state as state_lib
from anp_jax.runtimes.parameter_server import layout as layout_lib, look_ahead as look_ahead_lib
from anp_jax.training import multipliers, optimizer as optimizer_lib

# Elements that one call of the compiled update takes, padded with zeros. One
# size for matrices and one for vectors, so one program each: an element's bits
# do not depend on how the weights are cut. (Compiled for each slice's own
# shapes, Adam's did.) Vectors are few.
_MATRICES, _VECTORS = 2**18, 2**14


class BlockState(struct.PyTreeNode):
  """The state of one block of a server's slice.

  Attributes:
    params: (_VECTORS,) weights, or (_MATRICES, 1).
    opt_state: state of the optax chain.
    average: like params, averaged over steps; None without config.ema.
    momentum: within an update of dana, its worker's momentum; else None.
  """

  params: Any
  opt_state: Any
  average: Any
  momentum: Any = None


class SliceState(struct.PyTreeNode):
  """A server's part of the TrainState.

  Attributes:
    step: () int32, updates applied.
    stats: (m,) the network's running statistics; (0,) but on server 0.
    average: (m,) the same averaged over steps; None without config.ema.
    blocks: tuple of BlockState.
    momenta: tuple of (`look_ahead.Holder`, arrays by block); (): all are as the trace.
      No part of the pytree, so neither sent nor saved.
  """

  step: Any
  stats: Any
  average: Any
  blocks: Any
  momenta: tuple = struct.field(pytree_node=False, default=())


class Factors(NamedTuple):
  """What one block's elements are multiplied by.

  Attributes:
    rate: like the weights, factors of the update; None: 1.
    decay: like the weights, weight decay of each; None without rules.
  """

  rate: Any
  decay: Any


class SliceOptimizer:
  """Makes and updates the state of one server's slice.

  The chain is that of `optimizer.create` without its clipping by norm, which
  the workers have done, and without multipliers, which a slice has as a vector:
  the rest is computed element by element (and by the rank of the leaf), so a
  slice's update is the slice of the whole update.

  Attributes:
    slice: elements of the weights that the server keeps.
    blocks: the slice's `layout.Block`s.
    stats_size: number of statistics; 0 but on server 0.
    device: CPU that computes the updates.
  """

  def __init__(
    self,
    config: ml_collections.ConfigDict,
    look_ahead: look_ahead_lib.LookAhead,
    layout: layout_lib.Layout,
    index: int,
  ):
    """Prepares the update; nothing is compiled yet.

    Args:
      config: the run's config.
      look_ahead: optax chain of the run.
      layout: layout of the weights.
      index: number of the server.
    """
    self._config = config
    self._look_ahead = look_ahead
    self._layout = layout
    self.slice = layout.slices[index]
    self.blocks = layout.params.blocks(self.slice, _MATRICES, _VECTORS)
    self.stats_size = layout.stats.size if index == 0 else 0
    self.device = _cpu()
    frozen = multipliers.Frozen(config.optimizer.multipliers, layout.abstract_state.params)
    self._frozen_stats = layout.stats.spread(frozen.is_frozen_stat)[: self.stats_size] > 0
    self._update = jax.jit(self._updated)
    self._update_stats = jax.jit(self._updated_stats)
    self._ahead = jax.jit(self._weights_ahead)

  @functools.cached_property
  def abstract_state(self) -> SliceState:
    """Shapes and dtypes of the slice's state."""
    start = functools.partial(self._start, xp=jnp)
    return jax.eval_shape(start, self._layout.abstract_state)

  @property
  def abstract_gradient(self) -> jax.ShapeDtypeStruct:
    """Shape and dtype of the slice of a gradient."""
    size = self.slice.stop - self.slice.start
    return jax.ShapeDtypeStruct((size,), self._layout.params.dtype)

  def start(self, state: state_lib.TrainState) -> SliceState:
    """Returns the slice of a whole state of NumPy arrays."""
    return jax.device_put(self._start(state, np), self.device)

  def weights(self, state: SliceState) -> list[np.ndarray]:
    """Returns the slice's (n,) weights as they are sent, block by block."""
    weights = [block.params for block in state.blocks]
    if not self._look_ahead.keeps_read:
      pairs = zip(state.blocks, self._factors, strict=True)
      weights = [self._ahead(state.step, block, factors) for block, factors in pairs]
    return [block.trim(w) for block, w in zip(self.blocks, weights, strict=True)]

  def apply(
    self,
    state: SliceState,
    gradients: Sequence[np.ndarray],
    stats_deltas: Sequence[np.ndarray],
    contributions: Sequence[dict],
  ) -> tuple[SliceState, bool]:
    """Returns the state after an update, and whether all of it is finite.

    Args:
      state: state before the update.
      gradients: (n,) arrays, of the data shards of one batch in order.
      stats_deltas: (m,) arrays, of the same data shards.
      contributions: records of the log, of the same data shards.
    """
    weights = [c['weight'] for c in contributions]
    dtype = self._layout.params.dtype
    shares = np.asarray(weights, dtype) / max(sum(weights), 1)
    if len(gradients) == 1:  # a mean already
      shares = np.ones(1, dtype)
    worker = contributions[0]['worker']
    state, index = self._look_ahead.claim(state, worker)
    step, shares = jax.device_put((state.step, shares), self.device)
    stats, average, finite = self._update_stats(
      step, state.stats, state.average, jax.device_put(stats_deltas, self.device)
    )
    blocks, checks = [], [finite]
    for block, old, factors in zip(self.blocks, state.blocks, self._factors, strict=True):
      # NumPy arrays, which follow the state's device.
      cuts = [block.cut(g) for g in gradients]
      new, finite = self._update(step, old, cuts, shares, factors)
      blocks.append(new)
      checks.append(finite)
    state = SliceState(step + 1, stats, average, tuple(blocks), state.momenta)
    finite = all(bool(check) for check in checks)
    return self._look_ahead.release(state, index), finite

  @functools.cached_property
  def _factors(self):
    """The Factors of each block."""
    params = self._layout.abstract_state.params
    rates = multipliers.rate_factors(self._config, params)

    def cut(values):
      if values is None:
        return [None] * len(self.blocks)
      vector = self._layout.params.spread(values.__getitem__)[self.slice]
      return jax.device_put([block.cut(vector) for block in self.blocks], self.device)

    decays = optimizer_lib.slice_decays(self._config, params)
    return list(map(Factors, cut(None if set(rates.values()) == {1.0} else rates), cut(decays)))

  def _start(self, state, xp):
    params, stats = self._layout.params, self._layout.stats
    average = state.average or {'params': state.params, 'stats': state.stats}
    weights = params.flatten(state.params, xp)
    averages = params.flatten(average['params'], xp)
    opt_state = params.flatten_within(state.opt_state, xp)
    ema, size = self._config.ema, self.stats_size

    def block_state(block):
      def cut(leaf):
        return block.cut(leaf[self.slice], xp) if xp.ndim(leaf) else leaf

      return BlockState(
        params=cut(weights),
        opt_state=jax.tree.map(cut, opt_state),
        average=cut(averages) if ema else None,
      )

    return SliceState(
      step=state.step,
      stats=stats.flatten(state.stats, xp)[:size],
      average=stats.flatten(average['stats'], xp)[:size] if ema else None,
      blocks=tuple(map(block_state, self.blocks)),
    )

  def _updated(self, step, state, gradients, shares, factors):
    """A block's new state, and whether its update is finite."""
    dtype = state.params.dtype
    gradient = sum(s * g.astype(dtype) for s, g in zip(shares, gradients))
    updates, opt_state, momentum = self._look_ahead.update(step, gradient, state, factors.decay)
    updates = _scaled(updates, factors.rate)
    params = state.params + updates
    if factors.rate is not None:  # to the bit, also the sign of a zero
      params = jnp.where(factors.rate > 0, params, state.params)
    average = self._averaged(step, state.average, params)
    return BlockState(params, opt_state, average, momentum), jnp.isfinite(updates).all()

  def _weights_ahead(self, step, state, factors):
    """The weights of a block that workers read before update `step`."""
    move = self._look_ahead.move(step, look_ahead_lib.trace(state.opt_state))
    return state.params + _scaled(move, factors.rate)

  def _updated_stats(self, step, stats, average, deltas):
    # A network without batch norm has neither the key nor statistics.
    momentum = self._config.model.get('norm_momentum', 0.0)
    momentum = jnp.asarray(momentum, stats.dtype)
    new = momentum * stats + sum(deltas) / len(deltas)
    if self._frozen_stats.any():
      new = jnp.where(self._frozen_stats, stats, new)
    return new, self._averaged(step, average, new), jnp.isfinite(new).all()

  def _averaged(self, step, old, new):
    if not self._config.ema:
      return None
    decay = state_lib.ema_decay(self._config.ema, step).astype(new.dtype)
    return old + (1 - decay) * (new - old)


def join(
  layout: layout_lib.Layout, optimizers: list[SliceOptimizer], states: list[SliceState]
) -> state_lib.TrainState:
  """Returns the TrainState of all servers' slices, as NumPy arrays.

  Args:
    layout: layout of the weights.
    optimizers: the servers' optimizers.
    states: the servers' states, of the same step.
  """
  blocks = [block for optimizer in optimizers for block in optimizer.blocks]
  saved = jax.device_get([block for state in states for block in state.blocks])

  def join_leaf(*leaves):
    if not leaves[0].ndim:
      return np.asarray(leaves[0])
    trimmed = [block.trim(leaf) for block, leaf in zip(blocks, leaves)]
    return layout.params.unflatten(np.concatenate(trimmed))

  params = jax.tree.map(join_leaf, *saved)
  first, average = states[0], {}
  if first.average is not None:
    stats_average = layout.stats.unflatten(np.asarray(first.average))
    average = {'params': params.average, 'stats': stats_average}
  return layout.abstract_state.replace(
    step=np.asarray(first.step),
    params=params.params,
    stats=layout.stats.unflatten(np.asarray(first.stats)),
    opt_state=params.opt_state,
    average=average,
  )


def _scaled(updates, factors):
  """What is added to weights, with multipliers."""
  if factors is None:
    return updates
  return jnp.where(factors > 0, updates * factors, 0)


def _cpu():
  try:
    return jax.local_devices(backend='cpu')[0]
  except RuntimeError as e:
    raise config_lib.ConfigError(
      f'JAX_PLATFORMS={os.environ.get("JAX_PLATFORMS", "")!r}: servers compute '
      'on the CPU, which has to be among them'
    ) from e
