"""Periodic averaging: groups of devices that exchange weights periodically.

Inside a group training is synchronous. Each group has separate weights,
statistics and optimizer state, and after each period all groups continue from
their mean (McMahan et al., AISTATS 2017; Stich, "Local SGD converges fast and
communicates little", ICLR 2019), or from a step of an outer momentum towards
it: Nesterov's (Douillard et al., "DiLoCo", 2023), or heavy ball (Wang et al.,
"SlowMo", ICLR 2020).

It is one program on all devices. Leaves of the state have a leading axis of
groups, which the mesh divides; a device with several groups computes them one
after another, so that a run restores on fewer devices than groups.
"""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from anp_jax.parallel import buckets, mesh as mesh_lib, state as state_lib, step_sums
from anp_jax.parallel.local_sgd import exchanges
from anp_jax.parallel.sync import sync_step as sync

P = mesh_lib.P


class OptState(NamedTuple):
  """The optimizer state of a run of groups.

  Attributes:
    groups: state of the optax chain, with a leading axis of groups.
    outer: {'weights' after the last exchange, 'momentum'}, each like one network's
      parameters; {} for `outer=average`. Nesterov's momentum sums changes of
      weights, heavy ball's sums gradients.
  """

  groups: Any
  outer: Any


class LocalStep(sync.SyncStep):
  """Sums of gradients inside a group, sums of weights between groups.

  Weights are sent in their own dtype: rounding them would lose information for good.
  """

  per_group_spec = P(mesh_lib.GROUP)

  def init_fn(self, init: state_lib.Init) -> Callable:
    """(weights) -> a new state, in which all groups are alike."""
    copies = functools.partial(_copies, self._config.strategy.groups)
    # A copy: one buffer must not be donated twice.
    return lambda weights=(): self._state(init(weights), copies, jnp.array, jnp.zeros_like)

  def abstract_state(self, abstract_replica: state_lib.TrainState) -> state_lib.TrainState:
    """The abstract state of all groups, from that of one network."""

    def copies(s):
      spec = P(mesh_lib.GROUP, *s.sharding.spec)
      return jax.ShapeDtypeStruct(
        (self._config.strategy.groups, *s.shape),
        s.dtype,
        sharding=jax.NamedSharding(s.sharding.mesh, spec),
      )

    return self._state(abstract_replica, copies, lambda s: s, lambda s: s)

  def _state(self, single, copies, same, zeros):
    """A run's state, from one network's and functions of its leaves."""
    outer = {}
    if self._config.strategy.outer != 'average':
      outer = {
        'weights': jax.tree.map(same, single.params),
        'momentum': jax.tree.map(zeros, single.params),
      }
    all_groups = jax.tree.map(copies, single).replace(step=single.step)
    return all_groups.replace(opt_state=OptState(all_groups.opt_state, outer))

  def wrap_shard_step(self, shard: Callable) -> Callable:
    """The step of a device's groups, one after another."""

    def all_groups(params, stats, step, batch):
      count = len(jax.tree.leaves(params)[0])
      groups = (params, stats, sync.split(batch, count))

      def group_step(group):
        params, stats, batch = group
        return shard(params, stats, step, batch)

      if count == 1:  # without a loop
        results = group_step(jax.tree.map(lambda x: x[0], groups))
        return jax.tree.map(lambda x: x[None], results)
      # Unrolled, 32 groups of LeNet took 14 to 19 s to compile on two cores, in an
      # XLA loop 2 s; steps of 8 groups were equally fast.
      return lax.map(group_step, groups)

    return all_groups

  def wrap_update(self, update: Callable, mean_values: Callable, abstract_replica: Any) -> Callable:
    """Each group's update, then an exchange if one is due.

    Arguments and result are those of `sync_step.SyncStep.wrap_update`.
    """
    axes = state_lib.TrainState(step=None, params=0, stats=0, opt_state=0, average=0)
    names: list[str] = []

    # Within the map: XLA's compiler for GPUs fails (jaxlib 0.10.2) on values of
    # all groups that are stacked after it.
    def update_and_stack(state: state_lib.TrainState, reduced: step_sums.Reduced):
      state, values = update(state, reduced)
      names[:] = values
      return state, jnp.stack([*values.values()])

    update_groups = jax.vmap(update_and_stack, in_axes=(axes, 0), out_axes=(axes, 0))
    abstract_state = self.abstract_state(abstract_replica)
    replicated = mesh_lib.replicated(mesh_lib.mesh_of(abstract_replica))
    abstract_rate = jax.ShapeDtypeStruct((), jnp.float32, sharding=replicated)
    exchange = self._on_each_device(
      self._exchanged, (abstract_state, abstract_rate), abstract_state
    )

    def update_and_exchange(state: state_lib.TrainState, reduced: step_sums.Reduced):
      groups, outer = state.opt_state
      state, values = update_groups(state.replace(opt_state=groups), reduced)
      state = state.replace(opt_state=OptState(state.opt_state, outer))
      rate = values[0, names.index('learning_rate')]
      is_due = exchanges.is_due(self._config, state.step)
      state = lax.cond(is_due, exchange, lambda state, _: state, state, rate)
      # All groups' values in one collective.
      numbers = jnp.concatenate([values, reduced.weight[:, None]], axis=1)
      *columns, weight = lax.with_sharding_constraint(numbers, replicated).T
      return state, mean_values(dict(zip(names, columns, strict=True)), weight)

    return update_and_exchange

  def eval_state_fn(self, abstract_replica: state_lib.TrainState) -> Callable:
    """The mean over groups of weights, statistics and their averages."""
    abstract_state = _exchanged_trees(self.abstract_state(abstract_replica))
    mean = jax.jit(
      self._on_each_device(self._mean, (abstract_state,), _exchanged_trees(abstract_replica))
    )
    return lambda state: state.replace(opt_state=(), **mean(_exchanged_trees(state)))

  def _exchanged(self, state, rate):
    """One device's part of the state after an exchange at a learning rate."""
    groups, outer = state.opt_state
    common = _exchanged_trees(state)
    if self._config.strategy.moments == 'average':
      common['opt_state'] = groups
    common = self._mean(common)
    if outer:
      common['params'], outer = self._outer_step(common['params'], outer, rate)
    count = len(jax.tree.leaves(state.params)[0])
    common = jax.tree.map(functools.partial(_copies, count), common)
    moments = OptState(common.pop('opt_state', groups), outer)
    return state.replace(**common, opt_state=moments)

  def _outer_step(self, mean, outer, rate):
    """A step of the outer optimizer, whose gradient is the groups' mean change.

    SlowMo divides the change by the learning rate, so that its momentum sums
    gradients and falls with the rate.
    """
    keep = self._config.strategy.outer_momentum
    outer_rate = self._config.strategy.outer_learning_rate
    old, momentum = outer['weights'], outer['momentum']
    moved = jax.tree.map(jnp.subtract, old, mean)
    if self._config.strategy.outer == 'nesterov':
      momentum = jax.tree.map(lambda m, g: keep * m + g, momentum, moved)
      weights = jax.tree.map(lambda w, m, g: w - outer_rate * (keep * m + g), old, momentum, moved)
    else:
      inverse = jnp.where(rate > 0, 1 / rate, 0)
      momentum = jax.tree.map(lambda m, g: keep * m + inverse.astype(g.dtype) * g, momentum, moved)
      # At a rate of 0 the groups' steps before it would be lost.
      weights = jax.tree.map(
        lambda w, m, x: jnp.where(rate > 0, w - outer_rate * (rate.astype(m.dtype) * m), x),
        old,
        momentum,
        mean,
      )
    return weights, {'weights': weights, 'momentum': momentum}

  def _mean(self, tree):
    """The mean over groups, or the maximum of integers, which count steps."""
    leaves, treedef = jax.tree.flatten(tree)
    kinds = [jnp.issubdtype(x.dtype, jnp.inexact) for x in leaves]
    sums = iter(
      buckets.summed(
        [x.sum(0) for x, real in zip(leaves, kinds) if real], mesh_lib.GROUP, self._size
      )
    )
    return treedef.unflatten(
      next(sums) / self._config.strategy.groups if real else lax.pmax(x.max(0), mesh_lib.GROUP)
      for x, real in zip(leaves, kinds)
    )

  def _on_each_device(self, function, arguments, result):
    """A function mapped over the mesh, with explicit sums."""

    def specs(tree):
      return jax.tree.map(lambda s: s.sharding.spec, tree)

    return jax.shard_map(
      function,
      mesh=mesh_lib.mesh_of(arguments),
      in_specs=specs(arguments),
      out_specs=specs(result),
      check_vma=False,
    )


def _copies(count, x):
  return jnp.broadcast_to(x, (count, *x.shape))


def _exchanged_trees(state):
  """The fields of a state that groups average."""
  return {'params': state.params, 'stats': state.stats, 'average': state.average}
