"""One step, written once for one shard and mapped over the mesh.

Inside `jax.shard_map`: forward, backward, reduce. The optimizer's update
follows outside it, in the same jit, where norms see whole arrays.
"""

from collections.abc import Callable
import functools

import jax
from jax import lax
import jax.numpy as jnp
import optax

from anp_jax.cluster import preemption
from anp_jax.models.layers import sums as sums_lib
from anp_jax.parallel import mesh as mesh_lib
from anp_jax.parallel import state as state_lib
from anp_jax.training import microsteps
from anp_jax.training import mixing
from anp_jax.training import multipliers
from anp_jax.training import per_example

P = mesh_lib.P


def metric_names(objective) -> tuple[str, ...]:
  """Names of the values of a train step's metrics, in order."""
  return (*objective.train_names, 'grad_norm', 'learning_rate', 'damaged',
          'finite', 'vote')  # fmt: skip


def make_train_step(
  model, objective, optimizer, schedule, strategy, config, mesh, like
) -> Callable:
  """The jitted step of training.

  Args:
    model: Flax module called (images, train).
    objective: `objective.Objective`.
    optimizer: optax chain.
    schedule: step to learning rate.
    strategy: how gradients travel, such as `strategies.sync.Sync`.
    config: the run's config.
    mesh: of the run.
    like: of one network, TrainState of jax.ShapeDtypeStruct, with shardings.

  Returns:
    (state, batch) -> (state, values): the state is donated; values (n,) are
    those of `metric_names`, means over the global batch. `damaged` counts its
    rows of weight 0; `finite` is 1 where loss, gradient, update and statistics
    are all finite; `vote` is the largest vote of any process.
  """
  whole = strategy.whole(like)
  names = objective.train_names
  norm = functools.partial(sums_lib.norm, platform=mesh_lib.platform(mesh))
  divided = jax.tree.map(lambda s: any(s.sharding.spec), like.params)

  def update(state, reduced):
    gradients, stats, weight, sums, damaged, vote = reduced
    weight = jnp.maximum(weight, 1)
    gradients = jax.tree.map(lambda g: g / weight.astype(g.dtype), gradients)
    updates, opt_state = optimizer.update(
      gradients, state.opt_state, state.params
    )
    means = [sums[name] / weight for name in names]
    grad_norm = norm(gradients, divided=divided)
    sizes = (means[0], grad_norm, norm(updates, divided=divided), norm(stats))
    finite = jnp.isfinite(jnp.stack([s.astype(weight.dtype) for s in sizes]))
    values = [
      *means, grad_norm, schedule(state.step), damaged, finite.all(), vote,
    ]  # fmt: skip
    params = optax.apply_updates(state.params, updates)
    state = state_lib.TrainState(
      step=state.step + 1,
      params=params,
      stats=stats,
      opt_state=opt_state,
      average=state_lib.averaged(config.ema, state, params, stats),
    )
    return state, jnp.stack([jnp.asarray(v, weight.dtype) for v in values])

  update = _frozen(config, like).keeping(
    strategy.updates(update, _joined, like)
  )

  shardings = jax.tree.map(lambda s: s.sharding, whole)
  jit = functools.partial(
    jax.jit,
    donate_argnums=0,
    out_shardings=(shardings, mesh_lib.replicated(mesh)),
  )
  if strategy.in_turns:
    part, add = _make_turns(model, objective, strategy, config, mesh, like)
    return microsteps.InTurns(
      count=config.strategy.logical_shards // mesh_lib.batch_devices(mesh),
      part=part,
      add=add,
      update=jit(update),
      mesh=mesh,
    )
  mapped = make_gradient(model, objective, strategy, config, mesh, like)

  def train_step(state, batch):
    return update(state, mapped(state.params, state.stats, state.step, batch))

  return jit(train_step)


def make_gradient(
  model, objective, strategy, config, mesh, like
) -> Callable:  # fmt: skip
  """One shard's gradient, mapped over the mesh; not jitted.

  Args:
    model: Flax module called (images, train).
    objective: `objective.Objective`.
    strategy: how gradients travel, such as `strategies.sync.Sync`.
    config: the run's config.
    mesh: of the run.
    like: of one network, TrainState of jax.ShapeDtypeStruct, with shardings.

  Returns:
    (params, stats, step, batch) -> (gradients, stats, weight, sums, damaged,
    vote): sums over the batch, new statistics, and the largest vote.
  """
  frozen = _frozen(config, like)
  shard = strategy.shards(
    _shard_step(model, objective, strategy, config, frozen)
  )
  whole = strategy.whole(like)
  specs, own = jax.tree.map(lambda s: s.sharding.spec, whole), strategy.own
  return jax.shard_map(
    shard,
    mesh=mesh,
    in_specs=(specs.params, specs.stats, P(), P(mesh_lib.BATCH)),
    out_specs=(specs.params, specs.stats, own, own, own, own),
    # Off, so that a user's module may scan over constants; what travels is
    # explicit in the strategy, and tests read it off the compiled program.
    check_vma=False,
  )


def _make_turns(model, objective, strategy, config, mesh, like):
  """`make_gradient` in two programs, jitted: of a part, and of their sum."""
  frozen = _frozen(config, like)
  totals = _totals(model, objective, strategy, config, frozen)
  specs = jax.tree.map(lambda s: s.sharding.spec, like)
  each = P(mesh_lib.BATCH)

  def part(params, stats, step, batch, turn):
    micro = _micro_batch(batch, turn, strategy.micro_batches())
    return _with_axis(totals(params, stats, step, micro))

  def add(stats, batch, *parts):
    parts = jax.tree.map(lambda x: x[0], parts)
    return _reduced(strategy, stats, batch, strategy.add(parts), frozen)

  mapped = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
  return (
    jax.jit(
      mapped(
        part,
        in_specs=(specs.params, specs.stats, P(), each, P()),
        out_specs=each,
      )
    ),
    jax.jit(
      lambda stats, batch, *parts: mapped(
        add,
        in_specs=(specs.stats, each, *(each for _ in parts)),
        out_specs=P(),
      )(stats, batch, *parts)
    ),
  )


def _micro_batch(batch, turn, count: int):
  """Part `turn` of the `count` equal parts of a device's batch."""
  return jax.tree.map(
    lambda x: lax.dynamic_slice_in_dim(
      x, turn * (len(x) // count), len(x) // count
    ),
    batch,
  )


def _with_axis(tree):
  """The arrays of a tree with a leading axis, which divides over devices."""
  return jax.tree.map(lambda x: x[None], tree)


def make_eval_step(model, objective, strategy, config, mesh, like) -> Callable:
  """The jitted step of evaluation.

  Returns:
    (params, stats, batch) -> (names..., weight) sums over the global batch as
    a dict of () float arrays; rows of weight 0 count for nothing.
  """
  outputs_of = _outputs(model, strategy, config)

  def shard(params, stats, batch):
    outputs = outputs_of(params, stats, batch)
    values = objective.metrics(outputs, batch['label'])
    return _weighted_sums(values, batch['weight'].astype(outputs.dtype)), None

  return _scoring(shard, strategy, config, mesh, like)


def make_examples_step(
  model, objective, strategy, config, mesh, like, held_out=()
) -> Callable:  # fmt: skip
  """The jitted step of an evaluation that tells of each example.

  Args as of `make_eval_step`; held_out as of `examples.rows`.

  Returns:
    (params, stats, batch) -> (sums as of `make_eval_step`, rows): those of
    `examples.rows` with label and weight, of the global batch in its order,
    whole on every device.
  """
  outputs_of = _outputs(model, strategy, config)

  def shard(params, stats, batch):
    outputs, label = outputs_of(params, stats, batch), batch['label']
    values = objective.metrics(outputs, label)
    sums = _weighted_sums(values, batch['weight'].astype(outputs.dtype))
    found = per_example.rows(objective, outputs, label, held_out)
    return sums, found | {'label': label, 'weight': batch['weight']}

  return _scoring(shard, strategy, config, mesh, like)


def make_predict_step(
  model, objective, strategy, config, mesh, like
) -> Callable:  # fmt: skip
  """The jitted step of prediction.

  Returns:
    (params, stats, batch) -> probabilities as of `objective.Objective.scores`.
  """
  outputs_of = _outputs(model, strategy, config)

  def shard(params, stats, batch):
    return objective.scores(outputs_of(params, stats, batch))

  return _evaluating(shard, P(mesh_lib.BATCH), mesh, like)


def _outputs(model, strategy, config):
  """(params, stats, batch) -> (batch, outputs), of one device's part."""

  def outputs(params, stats, batch):
    images = _normalised(batch['image'], config)
    variables = {'params': strategy.gather(params), **stats}
    with strategy.convolutions():
      found = model.apply(variables, images, False)
    return found.astype(config.model.param_dtype)

  return outputs


def _scoring(shard, strategy, config, mesh, like):
  """The step of an evaluation, jitted.

  Args:
    shard: (params, stats, batch) -> (sums, rows or None) of a part of a batch.
    strategy: as of `make_eval_step`.
    config: the run's config.
    mesh: of the run.
    like: as of `make_eval_step`.

  Returns:
    (params, stats, batch) -> sums over the global batch, or, where there are
    rows, (sums, rows of the global batch in its order).
  """

  def whole(*parts):
    sums, rows = zip(*parts, strict=True)
    sums = strategy.scores(strategy.add(sums) if len(sums) > 1 else sums[0])
    if rows[0] is None:
      return sums
    rows = jax.tree.map(lambda *x: jnp.concatenate(x), *rows)
    return sums, lax.all_gather(rows, mesh_lib.BATCH, tiled=True)

  if not strategy.in_turns:
    return _evaluating(lambda *args: whole(shard(*args)), P(), mesh, like)
  each = P(mesh_lib.BATCH)
  count = config.strategy.logical_shards // mesh_lib.batch_devices(mesh)

  def part(params, stats, batch, turn):
    return _with_axis(shard(params, stats, _micro_batch(batch, turn, count)))

  def add(*parts):
    return whole(*jax.tree.map(lambda x: x[0], parts))

  return microsteps.Scoring(
    count=count,
    part=_evaluating(part, each, mesh, like, P()),
    add=jax.jit(
      jax.shard_map(
        add, mesh=mesh, in_specs=(each,) * count, out_specs=P(), check_vma=False
      )
    ),
    mesh=mesh,
  )


def _evaluating(shard, out_specs, mesh, like, *more_specs):
  """A shard's function of evaluated params, stats and a batch, jitted."""
  specs = jax.tree.map(lambda s: s.sharding.spec, like.evaluated())
  return jax.jit(
    jax.shard_map(
      shard,
      mesh=mesh,
      in_specs=(*specs, P(mesh_lib.BATCH), *more_specs),
      out_specs=out_specs,
      check_vma=False,
    )
  )


def _shard_step(model, objective, strategy, config, frozen):
  """One device's part of a step."""
  totals = _totals(model, objective, strategy, config, frozen)

  def shard(params, stats, step, batch):
    params = strategy.gather(params)
    found = strategy.accumulate(
      lambda micro: totals(params, stats, step, micro), batch
    )
    return _reduced(strategy, stats, batch, found, frozen)

  return shard


def _totals(model, objective, strategy, config, frozen):
  """(params, stats, step, batch) -> sums of gradients, statistics, metrics."""
  gradient = jax.value_and_grad(
    _loss_fn(model, objective, strategy, config, frozen), has_aux=True
  )

  def totals(params, stats, step, batch):
    key = jax.random.fold_in(jax.random.key(config.seed), step)
    (_, (sums, new_stats)), grads = gradient(params, stats, batch, key)
    return grads, new_stats, sums

  return totals


def _reduced(strategy, stats, batch, totals, frozen):
  """What `make_gradient` gives, from the totals of one device's batch."""
  grads, new_stats, sums = totals
  weight = sums.pop('weight')
  # A float like the weight, to travel with it.
  damaged = (batch['weight'] == 0).sum(dtype=batch['weight'].dtype)
  new_stats, counts = _split_counts(new_stats)
  # How many vote so, for each vote: a sum, where a maximum would be another
  # collective, which costs as much as that of a small network's gradients.
  vote = strategy.voted(batch['vote'].max())
  votes = jax.nn.one_hot(vote, preemption.VOTES, dtype=weight.dtype)
  others = (new_stats, weight, sums, damaged, votes)
  # Statistics travel with the gradients: a mean over equally many groups.
  grads, others = strategy.reduce(grads, others)
  new_stats, weight, sums, damaged, votes = others
  vote = jnp.where(votes > 0, jnp.arange(len(votes)), 0).max()
  micro_batches = strategy.micro_batches()
  shards = lax.axis_size(mesh_lib.DATA) * micro_batches
  new_stats = jax.tree.map(lambda s: s / shards, new_stats)
  counts = jax.tree.map(lambda c: c // micro_batches, counts)
  counts = lax.pmax(counts, mesh_lib.DATA)
  # A user's module may widen its own: the state must keep its dtypes, or the
  # next step is another program.
  new_stats = jax.tree.map(
    lambda old, mean, most: jnp.asarray(
      most if mean is None else mean, old.dtype
    ),
    stats, new_stats, counts,
  )  # fmt: skip
  return frozen.mask(grads), new_stats, weight, sums, damaged, vote


def _frozen(config, like):
  return multipliers.Frozen(config.optimizer.multipliers, like.params)


def _loss_fn(model, objective, strategy, config, frozen):
  """(params, stats, batch, key) -> sum of losses, (sums, new statistics)."""

  def loss_fn(params, stats, batch, key):
    mixing_key, dropout_key = jax.random.split(key)
    wide = config.model.param_dtype
    images = _normalised(batch['image'], config)
    targets = objective.targets(batch['label'], wide)
    images, targets = mixing.blend(
      images, targets, batch['row'], mixing_key,
      config.data.mixup, config.data.cutmix,
    )  # fmt: skip
    with strategy.convolutions(), frozen.applied():
      outputs, new_stats = model.apply(
        {'params': frozen.hold(params), **stats},
        images,
        True,
        mutable=list(stats),
        rngs={'dropout': jax.random.fold_in(dropout_key, batch['row'][0])},
      )
    outputs = outputs.astype(wide)
    losses = objective.loss(outputs, targets)
    weight = batch['weight'].astype(wide)
    values = {'loss': losses} | objective.train_metrics(outputs, batch['label'])
    return (losses * weight).sum(), (_weighted_sums(values, weight), new_stats)

  return loss_fn


def _normalised(images, config):
  d = config.data
  return mixing.normalise(images, d.mean, d.std, config.model.dtype)


def _weighted_sums(values, weight):
  # A row of weight 0 must count for nothing even where its value is not finite.
  sums = {
    k: jnp.where(weight > 0, v * weight, 0).sum() for k, v in values.items()
  }
  return sums | {'weight': weight.sum()}


def _split_counts(stats):
  """Floating statistics, which are averaged, and integers, which are not."""

  def keep(is_float):
    return jax.tree.map(
      lambda x: x if jnp.issubdtype(x.dtype, jnp.inexact) == is_float else None,
      stats,
    )

  return keep(True), keep(False)


def _joined(values, weight):
  """Of groups' values (groups, n) those of the run, by their examples."""
  share = jnp.maximum(weight, 1)
  means = (values * (share / share.sum())[:, None]).sum(0)
  *_, damaged, finite, vote = values.T
  last = jnp.stack([damaged.sum(), finite.min(), vote.max()])
  return jnp.concatenate([means[: -len(last)], last])
