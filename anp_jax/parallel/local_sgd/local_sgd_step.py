"""Periodic averaging: groups of devices that exchange weights periodically.

Inside a group training is synchronous. Each group has separate weights,
statistics and optimizer state, and after each period all groups continue from
their mean (McMahan et al., AISTATS 2017; Stich, "Local SGD converges fast and
communicates little", ICLR 2019).

It is one program on all devices. Leaves of the state have a leading axis of
groups, which the mesh divides; a device with several groups computes them one
after another, so that a run restores on fewer devices than groups.
"""

from collections.abc import Callable
import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from anp_jax.parallel import buckets, mesh as mesh_lib, state as state_lib, step_sums
from anp_jax.parallel.local_sgd import exchanges
from anp_jax.parallel.sync import sync_step as sync

P = mesh_lib.P


class LocalStep(sync.SyncStep):
  """Sums of gradients inside a group, sums of weights between groups.

  Weights are sent in their own dtype: rounding them would lose information for good.
  """

  per_group_spec = P(mesh_lib.GROUP)

  def init_fn(self, init: state_lib.Init) -> Callable:
    """(weights) -> a new state, in which all groups are alike."""
    copies = functools.partial(_copies, self._config.strategy.groups)
    return lambda weights=(): _of_groups(init(weights), copies)

  def abstract_state(self, abstract_replica: state_lib.TrainState) -> state_lib.TrainState:
    """The abstract state of all groups, from that of one network."""

    def copies(s):
      spec = P(mesh_lib.GROUP, *s.sharding.spec)
      return jax.ShapeDtypeStruct(
        (self._config.strategy.groups, *s.shape),
        s.dtype,
        sharding=jax.NamedSharding(s.sharding.mesh, spec),
      )

    return _of_groups(abstract_replica, copies)

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
    exchange = self._on_each_device(self._exchanged, (abstract_state,), abstract_state)

    def update_and_exchange(state: state_lib.TrainState, reduced: step_sums.Reduced):
      state, values = update_groups(state, reduced)
      is_due = exchanges.is_due(self._config, state.step)
      state = lax.cond(is_due, exchange, lambda state: state, state)
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

  def _exchanged(self, state):
    """One device's part of the state after an exchange."""
    common = _exchanged_trees(state)
    if self._config.strategy.moments == 'average':
      common['opt_state'] = state.opt_state
    count = len(jax.tree.leaves(state.params)[0])
    return state.replace(**jax.tree.map(functools.partial(_copies, count), self._mean(common)))

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

    mesh = mesh_lib.mesh_of(arguments)
    return mesh_lib.mapped(function, mesh, specs(arguments), specs(result))


def _of_groups(single, copies):
  """The state of all groups, from one network's and a function that copies a leaf."""
  return jax.tree.map(copies, single).replace(step=single.step)


def _copies(count, x):
  return jnp.broadcast_to(x, (count, *x.shape))


def _exchanged_trees(state):
  """The fields of a state that groups average."""
  return {'params': state.params, 'stats': state.stats, 'average': state.average}
