"""Periodic averaging: groups of devices that exchange weights now and then.

Inside a group training is synchronous. Each group has weights, statistics and
an optimizer state of its own, and every so many steps all groups go on from
their mean (McMahan et al., AISTATS 2017; Stich, "Local SGD converges fast and
communicates little", ICLR 2019), or from a step of an outer momentum towards
it: Nesterov's (Douillard et al., "DiLoCo", 2023), or heavy ball (Wang et al.,
"SlowMo", ICLR 2020).

It is one program on all devices. Leaves of the state have a leading axis, the
groups', which the mesh divides; a device that has several groups computes them
one after another, so that a run restores on fewer devices than groups.
"""

import functools
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from anp_jax.parallel import buckets, mesh as mesh_lib, state as state_lib
from anp_jax.parallel.local_sgd import exchanges
from anp_jax.parallel.sync import sync_step as sync

P = mesh_lib.P


class OptState(NamedTuple):
  """The optimizer state of a run of groups.

  Attributes:
    groups: of the optax chain, with a leading axis.
    outer: {'weights': of the last exchange, 'momentum'}, each like one
      network's parameters; {} where groups take their mean. Nesterov's momentum
      is of weights, heavy ball's of gradients.
  """

  groups: Any
  outer: Any


class LocalStep(sync.SyncStep):
  """Sums of gradients inside a group, sums of weights between groups.

  Weights travel in their own dtype: what is rounded off them is lost for good.
  """

  per_group_spec = P(mesh_lib.GROUP)

  def __init__(self, config, specs, order=()):
    """Makes the strategy; see `sync_step.SyncStep`."""
    super().__init__(config, specs, order)
    self._run_config = config
    self._config = config.strategy

  def init_fn(self, init):
    """(weights) -> a new state, in which all groups are alike."""
    copies = functools.partial(_copies, self._config.groups)
    # A copy: one buffer must not be donated twice.
    return lambda weights=(): self._state(init(weights), copies, jnp.array, jnp.zeros_like)

  def abstract_state(self, abstract_replica):
    """The abstract state of all groups, from that of one network."""

    def copies(s):
      spec = P(mesh_lib.GROUP, *s.sharding.spec)
      return jax.ShapeDtypeStruct(
        (self._config.groups, *s.shape), s.dtype, sharding=jax.NamedSharding(s.sharding.mesh, spec)
      )

    return self._state(abstract_replica, copies, lambda s: s, lambda s: s)

  def _state(self, single, copies, same, zeros):
    """A run's state from one network's, by what becomes of a leaf."""
    outer = {}
    if self._config.outer != 'average':
      outer = {
        'weights': jax.tree.map(same, single.params),
        'momentum': jax.tree.map(zeros, single.params),
      }
    all_groups = jax.tree.map(copies, single).replace(step=single.step)
    return all_groups.replace(opt_state=OptState(all_groups.opt_state, outer))

  def wrap_shard_step(self, shard):
    """The step of a device's groups, one after another."""

    def all_groups(params, stats, step, batch):
      count = len(jax.tree.leaves(params)[0])
      groups = (params, stats, sync.split(batch, count))

      def group_step(group):
        params, stats, batch = group
        return shard(params, stats, step, batch)

      if count == 1:  # no loop where none is needed
        results = group_step(jax.tree.map(lambda x: x[0], groups))
        return jax.tree.map(lambda x: x[None], results)
      # Unrolled, 32 groups of LeNet took 14 to 19 s to compile on two cores, in
      # a loop of XLA's 2 s; steps of 8 groups were equally fast.
      return lax.map(group_step, groups)

    return all_groups

  def wrap_update(self, update, mean_values, abstract_replica):
    """Each group's update, then an exchange if one is due.

    Arguments and result are those of `sync_step.SyncStep.wrap_update`.
    """
    axes = state_lib.TrainState(step=None, params=0, stats=0, opt_state=0, average=0)
    update_groups = jax.vmap(update, in_axes=(axes, 0), out_axes=(axes, 0))
    abstract_state = self.abstract_state(abstract_replica)
    replicated = mesh_lib.replicated(_mesh(abstract_replica))
    abstract_rate = jax.ShapeDtypeStruct((), jnp.float32, sharding=replicated)
    exchange = self._on_each_device(
      self._exchanged, (abstract_state, abstract_rate), abstract_state
    )

    def update_and_exchange(state, reduced):
      groups, outer = state.opt_state
      state, values = update_groups(state.replace(opt_state=groups), reduced)
      state = state.replace(opt_state=OptState(state.opt_state, outer))
      rate = values['learning_rate'][0]
      state = lax.cond(self._is_due(state.step), exchange, lambda state, _: state, state, rate)
      # Some numbers of each group, once around.
      numbers = jnp.stack([*values.values(), reduced.weight], axis=1)
      *columns, weight = lax.with_sharding_constraint(numbers, replicated).T
      return state, mean_values(dict(zip(values, columns, strict=True)), weight)

    return update_and_exchange

  def eval_state_fn(self, abstract_replica):
    """The mean over groups of weights, statistics and their averages."""

    def trees(state):
      return state.params, state.stats, state.average

    mean = jax.jit(
      self._on_each_device(
        self._mean, (trees(self.abstract_state(abstract_replica)),), trees(abstract_replica)
      )
    )

    def eval_state(state):
      params, stats, average = mean(trees(state))
      return state_lib.TrainState(state.step, params, stats, (), average)

    return eval_state

  def _is_due(self, step):
    """Whether groups exchange after `step` updates: alike on all devices."""
    return exchanges.is_due(self._run_config, step)

  def _exchanged(self, state, rate):
    """One device's part of the state after an exchange at a learning rate."""
    groups, outer = state.opt_state
    common = {'params': state.params, 'stats': state.stats, 'average': state.average}
    if self._config.moments == 'average':
      common['opt_state'] = groups
    common = self._mean(common)
    if outer:
      common['params'], outer = self._outer_step(common['params'], outer, rate)
    count = len(jax.tree.leaves(state.params)[0])
    common = jax.tree.map(functools.partial(_copies, count), common)
    moments = OptState(common.pop('opt_state', groups), outer)
    return state.replace(**common, opt_state=moments)

  def _outer_step(self, mean, outer, rate):
    """What groups moved by is the gradient of an outer optimizer.

    SlowMo divides it by the learning rate, so that its momentum is of gradients
    and does not outlast a rate that falls.
    """
    keep = self._config.outer_momentum
    outer_rate = self._config.outer_learning_rate
    old, momentum = outer['weights'], outer['momentum']
    moved = jax.tree.map(jnp.subtract, old, mean)
    if self._config.outer == 'nesterov':
      momentum = jax.tree.map(lambda m, g: keep * m + g, momentum, moved)
      weights = jax.tree.map(lambda w, m, g: w - outer_rate * (keep * m + g), old, momentum, moved)
    else:
      inverse = jnp.where(rate > 0, 1 / rate, 0)
      momentum = jax.tree.map(lambda m, g: keep * m + inverse.astype(g.dtype) * g, momentum, moved)
      # With a rate of 0 the steps before it would be lost.
      weights = jax.tree.map(
        lambda w, m, x: jnp.where(rate > 0, w - outer_rate * (rate.astype(m.dtype) * m), x),
        old,
        momentum,
        mean,
      )
    return weights, {'weights': weights, 'momentum': momentum}

  def _mean(self, tree):
    """Over groups; of integers, which count alike in all of them, the most."""
    leaves, treedef = jax.tree.flatten(tree)
    kinds = [jnp.issubdtype(x.dtype, jnp.inexact) for x in leaves]
    sums = iter(
      buckets.fused(
        self._over_groups, [x.sum(0).ravel() for x, real in zip(leaves, kinds) if real], self._size
      )
    )
    count = self._config.groups
    return treedef.unflatten(
      next(sums).reshape(x.shape[1:]) / count if real else lax.pmax(x.max(0), mesh_lib.GROUP)
      for x, real in zip(leaves, kinds)
    )

  def _over_groups(self, x):
    return lax.psum(x, mesh_lib.GROUP)

  def _on_each_device(self, function, arguments, result):
    """A function mapped over the mesh, all its sums its own."""

    def specs(tree):
      return jax.tree.map(lambda s: s.sharding.spec, tree)

    return jax.shard_map(
      function,
      mesh=_mesh(arguments),
      in_specs=specs(arguments),
      out_specs=specs(result),
      check_vma=False,
    )


def _copies(count, x):
  return jnp.broadcast_to(x, (count, *x.shape))


def _mesh(abstract_tree):
  return jax.tree.leaves(abstract_tree)[0].sharding.mesh
