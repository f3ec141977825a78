"""The training step, written once for one shard and mapped over the mesh.

Inside `jax.shard_map`: forward, backward, reduce. The optimizer's update
follows outside it, in the same jit, where norms see whole arrays.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import jax
from jax import lax
from jax.experimental import layout
import jax.numpy as jnp
import optax

from anp_jax.cluster import preemption
from anp_jax.data.input import strong_augment
from anp_jax.models.layers import example_randomness, sums as sums_lib
from anp_jax.parallel import mesh as mesh_lib, state as state_lib, step_sums
from anp_jax.training import microsteps, mixing, multipliers, objective as losses_lib, step_context

P = mesh_lib.P


def metric_names(objective: losses_lib.Objective) -> tuple[str, ...]:
  """The names of the values of a step's metrics, in order."""
  return (*objective.train_names, 'grad_norm', 'learning_rate', 'damaged', 'finite', 'vote')


@dataclasses.dataclass(frozen=True)
class TrainStep(step_context.StepContext):
  """One update of the weights.

  Attributes:
    optimizer: optax chain, or what else the strategy's step has made of it.
    schedule: step to learning rate.
  """

  optimizer: Any
  schedule: Callable

  def jitted(self) -> Callable:
    """The step as one jitted function, or as several programs called as one.

    Returns:
      (state, batch) -> (state, values): the state is donated; values (n,) are
      those of `metric_names`, means over the global batch. `damaged` counts its
      rows of weight 0; `finite` is 1 where loss, gradient, new weights and
      statistics are all finite; `vote` is the largest vote of any process.
    """
    shardings = jax.tree.map(lambda s: s.sharding, self._abstract_state)
    jit = functools.partial(
      jax.jit, donate_argnums=0, out_shardings=(shardings, mesh_lib.replicated(self.mesh))
    )
    if self.strategy_step.separate_programs:
      shard, add = self._separate_programs()
      return microsteps.SequentialSteps(
        count=self.strategy_step.shards_per_device(self.mesh),
        shard=shard,
        add=add,
        update=jit(self._wrapped_update()),
        mesh=self.mesh,
      )
    return jit(self.step())

  def step(self) -> Callable:
    """The step in one function, not jitted: that of `jitted` if it has one program."""
    return self.strategy_step.step(self.gradient(), self._wrapped_update(), self.optimizer)

  def gradient(self) -> Callable:
    """One shard's gradient, mapped over the mesh; not jitted.

    Returns:
      (params, stats, step, batch) -> `parallel.step_sums.Reduced`, over the batch.
    """
    specs = jax.tree.map(lambda s: s.sharding.spec, self._abstract_state)
    group = self.strategy_step.per_group_spec
    return mesh_lib.mapped(
      self.strategy_step.wrap_shard_step(self._shard_step),
      self.mesh,
      (specs.params, specs.stats, P(), P(mesh_lib.BATCH)),
      step_sums.Reduced(specs.params, specs.stats, group, group, group, group),
    )

  @functools.cached_property
  def _abstract_state(self):
    return self.strategy_step.abstract_state(self.abstract_replica)

  @functools.cached_property
  def _frozen(self):
    return multipliers.Frozen(self.config.optimizer.multipliers, self.abstract_replica.params)

  def _wrapped_update(self):
    """(state, reduced gradients) -> (state, values) for the whole run."""
    update = self.strategy_step.wrap_update(self._update, _mean_values, self.abstract_replica)
    update = self._frozen.wrap_update(update)

    def update_and_stack(state, reduced):
      state, values = update(state, reduced)
      return state, jnp.stack([values[name] for name in metric_names(self.objective)])

    return update_and_stack

  def _update(self, state, reduced: step_sums.Reduced):
    """The update of one network, and its values by name."""
    gradients, stats, sums = reduced.gradients, reduced.stats, reduced.sums
    norm = functools.partial(sums_lib.norm, platform=mesh_lib.platform(self.mesh))
    # The axis of groups divides no parameter.
    divided = jax.tree.map(
      lambda s: any(axis not in (None, mesh_lib.GROUP) for axis in s.sharding.spec),
      self._abstract_state.params,
    )
    weight = jnp.maximum(reduced.weight, 1)
    gradients = jax.tree.map(lambda g: g / weight.astype(g.dtype), gradients)
    updates, opt_state = self.optimizer.update(gradients, state.opt_state, state.params)
    values = {name: sums[name] / weight for name in self.objective.train_names}
    grad_norm = norm(gradients, divided=divided)
    params = optax.apply_updates(state.params, updates)
    # Of the new weights, not of the update, which XLA then has no reason to write out.
    sizes = (values['loss'], grad_norm, norm(params, divided=divided), norm(stats))
    finite = jnp.isfinite(jnp.stack([s.astype(weight.dtype) for s in sizes]))
    values |= {
      'grad_norm': grad_norm,
      'learning_rate': self.schedule(state.step),
      'damaged': reduced.damaged,
      'finite': finite.all(),
      'vote': reduced.vote,
    }
    state = state_lib.TrainState(
      step=state.step + 1,
      params=params,
      stats=stats,
      opt_state=opt_state,
      average=state_lib.averaged(self.config.ema, state, params, stats),
    )
    return state, {name: jnp.asarray(v, weight.dtype) for name, v in values.items()}

  def _separate_programs(self):
    """`gradient` in two jitted programs: a logical shard, and the sum of shards."""
    specs = jax.tree.map(lambda s: s.sharding.spec, self.abstract_replica)
    batch_spec = P(mesh_lib.BATCH)

    def shard(params, stats, step, batch, index):
      micro = microsteps.micro_batch(batch, index, self.strategy_step.micro_batches())
      totals = self.strategy_step.compute_shard(
        lambda micro: self._local_sums(params, stats, step, micro), micro, index
      )
      return microsteps.with_axis(totals)

    def add(stats, batch, *shards):
      count = self.strategy_step.micro_batches()
      rows = [self._row_counts(microsteps.micro_batch(batch, i, count)) for i in range(count)]
      shards = jax.tree.map(lambda x: x[0], shards)
      return self._all_reduced(
        stats, *self.strategy_step.add_shards([*zip(shards, rows, strict=True)])
      )

    def add_mapped(stats, batch, *shards):
      in_specs = specs.stats, batch_spec, *(batch_spec for _ in shards)
      return mesh_lib.mapped(add, self.mesh, in_specs, P())(stats, batch, *shards)

    in_specs = specs.params, specs.stats, P(), batch_spec, P()
    mapped_shard = mesh_lib.mapped(shard, self.mesh, in_specs, batch_spec)
    return jax.jit(mapped_shard), jax.jit(add_mapped)

  def _shard_step(self, params, stats, step, batch):
    """One device's part of a step."""
    params = self.strategy_step.gather(params)
    totals = self.strategy_step.accumulate(
      lambda micro: self._local_sums(params, stats, step, micro), batch
    )
    return self._all_reduced(stats, totals, self._row_counts(batch))

  def _local_sums(self, params, stats, step, batch):
    """Sums over a micro-batch: gradients, new statistics, metrics."""
    key = jax.random.fold_in(jax.random.key(self.config.seed), step)
    gradient = jax.value_and_grad(self._loss, has_aux=True)
    (_, (sums, new_stats)), gradients = gradient(params, stats, batch, key)
    if mesh_lib.platform(self.mesh) == 'gpu':
      gradients = jax.tree.map(_row_major, gradients)
    return step_sums.Totals(gradients, new_stats, sums)

  def _loss(self, params, stats, batch, key):
    """The sum of losses, and (sums of metrics, new statistics)."""
    mixing_key, dropout_key = jax.random.split(key)
    config, wide = self.config, self.config.model.param_dtype
    d = config.data
    images = strong_augment.augmented(config, batch['image'], key, batch['row'])
    images = mixing.normalise(images, d.mean, d.std, config.model.dtype)
    targets = self.objective.targets(batch['label'], wide)
    images, targets = mixing.blend(
      images, targets, batch['row'], mixing_key, config.data.mixup, config.data.cutmix
    )
    with self.strategy_step.convolution_context(), self._frozen.applied():
      outputs, new_stats = self.model.apply(
        {
          'params': self._frozen.stop_gradients(params),
          example_randomness.EXAMPLE: {'row': batch['row']},
          **stats,
        },
        images,
        True,
        mutable=list(stats),
        rngs={
          'dropout': jax.random.fold_in(dropout_key, batch['row'][0]),
          example_randomness.EXAMPLE: dropout_key,
        },
      )
    outputs = outputs.astype(wide)
    losses = self.objective.loss(outputs, targets)
    weight = batch['weight'].astype(wide)
    values = {'loss': losses} | self.objective.train_metrics(outputs, batch['label'])
    sums = microsteps.weighted_sums(values, weight)
    return (losses * weight).sum(), (sums, new_stats)

  def _row_counts(self, batch):
    """The number of damaged rows, and how often each vote is cast.

    They are floats, to be summed together with the weight. A maximum of votes
    would be another collective, which costs as much as that of a small network's
    gradients.
    """
    damaged = (batch['weight'] == 0).sum(dtype=batch['weight'].dtype)
    vote = self.strategy_step.local_vote(batch['vote'].max())
    dtype = jnp.dtype(self.config.model.param_dtype)
    return damaged, jax.nn.one_hot(vote, preemption.VOTES, dtype=dtype)

  def _all_reduced(self, stats, totals, row_counts):
    """The result of `gradient`, from the totals of one device's batch."""
    strategy = self.strategy_step
    gradients, new_stats, sums = totals
    weight = sums.pop('weight')
    new_stats, counts = _split_counts(new_stats)
    # Statistics are sent with the gradients: a mean over groups of one size.
    metrics = strategy.weighted(step_sums.Metrics(new_stats, weight, sums, *row_counts))
    gradients, metrics = strategy.reduce(gradients, metrics)
    vote = jnp.where(metrics.votes > 0, jnp.arange(len(metrics.votes)), 0).max()
    micro_batches = strategy.micro_batches()
    parts = strategy.parts()
    new_stats = jax.tree.map(lambda s: s / parts, metrics.stats)
    counts = jax.tree.map(lambda c: c // micro_batches, counts)
    counts = lax.pmax(counts, mesh_lib.DATA)
    # A user's module may widen its statistics: the state must keep its dtypes, or
    # the next step is another program.
    new_stats = jax.tree.map(
      lambda old, mean, most: jnp.asarray(most if mean is None else mean, old.dtype),
      stats,
      new_stats,
      counts,
    )
    gradients = self._frozen.zero_gradients(gradients)
    return step_sums.Reduced(
      gradients, new_stats, metrics.weight, metrics.sums, metrics.damaged, vote
    )


def _split_counts(stats):
  """Floating statistics, which are averaged, and integer ones, which are not."""

  def keep(is_float):
    return jax.tree.map(
      lambda x: x if jnp.issubdtype(x.dtype, jnp.inexact) == is_float else None, stats
    )

  return keep(True), keep(False)


def _row_major(gradient):
  """A gradient with its axes in memory as the parameter has them.

  XLA's GPU backend leaves the gradient of a kernel in the convolution's order,
  and transposes the new parameter, moments and average instead, each by a
  separate kernel.
  """
  order = layout.Layout(tuple(range(gradient.ndim)))
  return layout.with_layout_constraint(gradient, order)


def _mean_values(values, weight):
  """The run's values from (groups,) values by name, and (groups,) weights."""
  share = jnp.maximum(weight, 1)
  joins = {'damaged': jnp.sum, 'finite': jnp.min, 'vote': jnp.max}
  names = [name for name in values if name not in joins]
  table = jnp.stack([values[name] for name in names], axis=1)
  means = (table * (share / share.sum())[:, None]).sum(0)
  return dict(zip(names, means, strict=True)) | {
    name: join(values[name]) for name, join in joins.items()
  }
