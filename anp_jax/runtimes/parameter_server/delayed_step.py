"""The step of simulated workers: a gradient at older weights updates the newest ones.

One program makes the update of any worker. The versions that are still to be read lie
in slots on the devices; each batch carries the `Order` of its update, which
`simulation` works out beforehand. So a run of simulated workers is an ordinary run,
with the weights of a real one that has the same order, to rounding. Only where an update
collects gradients of several steps (rennala, or synchronous with backup workers), mixup,
dropout and RandAugment draw other numbers.
"""

from collections.abc import Callable
import types
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
from ml_collections import ConfigDict
import optax

from anp_jax import config as config_lib
from anp_jax.parallel import mesh as mesh_lib, state as state_lib
from anp_jax.parallel.sync import sync_step
from anp_jax.runtimes.parameter_server import layout, look_ahead
from anp_jax.training import multipliers

ORDER = 'order'  # name of an update's order in its batch


class Order(NamedTuple):
  """The order of one update, as int32 numbers.

  Attributes:
    ticket: step whose batch it is of; random numbers are folded from it.
    write: slot in which the newest version is kept; the last one if nobody reads it.
    read: slot of the version that the gradient is computed at.
    last: momentum that the update before has changed; the last one if there is none.
    momentum: momentum that it changes.
    is_new: 1 if that counts as zero, since its last worker is gone; else 0.
    gone: momentum of a worker that is gone; the last one, which is zero, if none is.
  """

  ticket: Any
  write: Any
  read: Any
  last: Any
  momentum: Any
  is_new: Any
  gone: Any


class DelayedState(NamedTuple):
  """The optimizer state of a run of simulated workers.

  Attributes:
    chain: state of the optax chain, which is saved.
    versions: {'params', 'stats'} that workers read, with a leading axis of slots.
    momenta: momenta of the gradients under way, and zeros, like the parameters with a
      leading axis of them; () without look-ahead.
    newest: momentum that the last update has changed, which is not in `momenta` yet, with
      a leading axis of 1.
  """

  chain: Any
  versions: Any
  momenta: Any
  newest: Any


def slots(config: ConfigDict) -> int:
  """Returns the most versions that are to be read at a time."""
  # Also that of the gradient whose update is made, and what nobody reads.
  return config.strategy.simulate.workers * config.strategy.in_flight + 2


class LookAheadOptimizer(NamedTuple):
  """Updates of a state that is (step, state of the chain, a worker's momentum).

  Attributes:
    update: (gradients, state, params) -> (updates, state).
    ahead: what workers read.
  """

  update: Callable
  ahead: look_ahead.LookAhead


class DelayedStep(sync_step.SyncStep):
  """A step whose gradient is of the version that its order names."""

  def optimizer(self, create: Callable, config: ConfigDict, schedule: optax.Schedule) -> Any:
    """The chain of a config, or a `LookAheadOptimizer`; see `sync_step.SyncStep.optimizer`."""
    settings = self._settings()
    if settings.method == 'none':
      return create(config)
    effects: dict[str, Any] = {}
    if config.optimizer.multipliers or multipliers.layer_decay(config) != 1:
      scaled = multipliers.scaled(config)
      effects['scale'] = lambda move: scaled.update(move, optax.EmptyState())[0]
    # Look-ahead makes Nesterov's step itself.
    momentum = create(config_lib.replaced(config, {'optimizer.name': 'momentum'}))
    ahead = look_ahead.LookAhead(settings, config, momentum, schedule, **effects)

    def update(gradients, state, params):
      step, opt_state, velocity = state
      block = types.SimpleNamespace(params=params, opt_state=opt_state, momentum=velocity)
      updates, opt_state, velocity = ahead.update(step, gradients, block)
      return updates, (step, opt_state, velocity)

    return LookAheadOptimizer(update, ahead)

  def abstract_state(self, abstract_replica: state_lib.TrainState) -> state_lib.TrainState:
    """The abstract state with all slots, from that of one network.

    Raises:
      ConfigError: if real servers cannot carry a leaf's dtype.
    """
    layout.Layout(self._config, abstract_replica)

    def stacked(s, count, zeros=0):
      sharding = jax.NamedSharding(s.sharding.mesh, mesh_lib.P(None, *s.sharding.spec))
      return jax.ShapeDtypeStruct((count + zeros, *s.shape), s.dtype, sharding=sharding)

    return self._with_slots(abstract_replica, stacked)

  def init_fn(self, init: state_lib.Init) -> Callable:
    """(weights) -> new state of the run."""
    return lambda weights=(): self._with_slots(init(weights), _copies)

  def checkpoint_layout(self, abstract_replica: state_lib.TrainState) -> state_lib.CheckpointLayout:
    """Checkpoints have the newest version alone, as those of `sync`."""
    shardings = jax.tree.map(lambda s: s.sharding, self.abstract_state(abstract_replica))
    return state_lib.CheckpointLayout(
      abstract_replica,
      lambda state: state.replace(opt_state=state.opt_state.chain),
      jax.jit(lambda state: self._with_slots(state, _copies), out_shardings=shardings),
    )

  def step(self, gradient: Callable, update: Callable, optimizer: Any) -> Callable:
    """The step of the run; see `sync_step.SyncStep.step`."""
    ahead = optimizer.ahead if isinstance(optimizer, LookAheadOptimizer) else None
    decay = self._config.model.get('norm_momentum', 0.0)  # of the running statistics

    def train_step(state, batch):
      batch = dict(batch)
      order = Order(*batch.pop(ORDER))
      chain, versions, momenta, newest = state.opt_state
      sent = {'params': state.params, 'stats': state.stats}
      if ahead and not ahead.keeps_read:
        move = ahead.move(state.step, look_ahead.trace(chain))
        sent['params'] = jax.tree.map(jnp.add, state.params, move)
      versions = _written(versions, order.write, sent)
      read = _read(versions, order.read)
      reduced = gradient(read['params'], read['stats'], order.ticket, batch)
      changed = jax.tree.map(
        lambda new, before, now: decay * now + (new - decay * before),
        reduced.stats,
        read['stats'],
        state.stats,
      )
      if ahead:
        # Written before one is read, or XLA copies all momenta.
        momenta = _written(momenta, order.last, newest)
        velocity = jax.tree.map(
          lambda x: jnp.where(order.is_new > 0, 0, x), _read(momenta, order.momentum)
        )
        lost = _read(momenta, order.gone)
        chain = state.step, look_ahead.without(chain, lost, self._momenta), velocity
      state, values = update(state.replace(opt_state=chain), reduced._replace(stats=changed))
      chain = state.opt_state
      if ahead:
        _, chain, velocity = chain
        newest = jax.tree.map(lambda x: x[None], velocity)
      return state.replace(opt_state=DelayedState(chain, versions, momenta, newest)), values

    return train_step

  @property
  def _momenta(self):
    return self._settings().under_way

  def _settings(self):
    return look_ahead.settings(self._config, self._config.strategy.simulate.workers)

  def _with_slots(self, single, copies):
    """A state with slots, from one network's and a function like `_copies`."""
    momenta = newest = ()
    if self._settings().method != 'none':
      trace = look_ahead.trace(single.opt_state)
      momenta = jax.tree.map(lambda x: copies(x, self._momenta, 1), trace)
      newest = jax.tree.map(lambda x: copies(x, 0, 1), trace)
    # What is in a slot is written before it is read.
    versions = {'params': single.params, 'stats': single.stats}
    versions = jax.tree.map(lambda x: copies(x, slots(self._config)), versions)
    return single.replace(opt_state=DelayedState(single.opt_state, versions, momenta, newest))


def _copies(x, count, zeros=0):
  """Copies of an array along a leading axis, and zeros after them."""
  copies = jnp.broadcast_to(x, (count, *x.shape))
  return jnp.pad(copies, ((0, zeros), *((0, 0),) * x.ndim))


def _read(slots_, index):
  """The tree in a slot."""
  return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), slots_)


def _written(slots_, index, tree):
  """Slots with a tree in one of them."""
  # Not `at`: on a CPU a scatter is a loop.
  return jax.tree.map(
    lambda x, new: lax.dynamic_update_index_in_dim(x, new, index, 0), slots_, tree
  )
