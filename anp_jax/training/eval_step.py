"""Steps without a gradient: evaluation, and evaluation by example."""

from collections.abc import Callable

import jax
from jax import lax
import jax.numpy as jnp

from anp_jax.models import linear
from anp_jax.parallel import mesh as mesh_lib
from anp_jax.training import microsteps, mixing, step_context

P = mesh_lib.P


class EvalStep(step_context.StepContext):
  """Steps that score a batch; each method gives a jitted function."""

  def sums(self) -> Callable:
    """The step of an evaluation.

    Returns:
      (params, stats, batch) -> sums of metrics and weight over the global batch,
      a dict of () float arrays; rows of weight 0 are ignored.
    """
    return self._summed(lambda outputs, batch, stats, logits_of: None)

  def examples(self) -> Callable:
    """The step of an evaluation that also gives the scores of each example.

    Returns:
      (params, stats, batch) -> (those of `sums`, rows): arrays by name of the global
      batch in its order, whole on every device: logits (batch, classes), label and
      weight; for pairs also adjective (batch, adjectives) and noun (batch, nouns),
      logarithms of probabilities; with several files of features contributions
      (batch, files) to the logit of the example's class, see `linear.contributions`.
    """

    def rows(outputs, batch, stats, logits_of):
      label = batch['label']
      more = {}
      if linear.is_fused(self.config, self.objective.head):
        values = linear.contributions(logits_of, batch['image'], stats, self.config.data.widths)
        more['contributions'] = jnp.take_along_axis(values, label[:, None, None], 2)[..., 0]
      logs = self.objective.head.log_scores(outputs)
      words = {factor.name: logs[factor.name] for factor in self.objective.head.factors}
      logits = self.objective.head.logits(outputs)
      return words | more | {'logits': logits, 'label': label, 'weight': batch['weight']}

    return self._summed(rows)

  def _outputs(self, params, stats, batch):
    """The network's outputs (batch, outputs) for one device's part."""
    d = self.config.data
    images = mixing.normalise(batch['image'], d.mean, d.std, self.config.model.dtype)
    variables = {'params': self.strategy_step.gather(params), **stats}
    with self.strategy_step.convolution_context():
      outputs = self.model.apply(variables, images, False)
    return outputs.astype(self.config.model.param_dtype)

  def _summed(self, rows_of):
    """Sums of metrics over the global batch, and rows of all of it, jitted.

    Args:
      rows_of: (outputs, batch, stats, images -> logits) -> rows of a part of a batch,
        or None.

    Returns:
      (params, stats, batch) -> sums, or (sums, rows) if there are rows.
    """
    strategy, mesh = self.strategy_step, self.mesh

    def shard(params, stats, batch):
      outputs = self._outputs(params, stats, batch)
      values = self.objective.metrics(outputs, batch['label'])
      sums = microsteps.weighted_sums(values, batch['weight'].astype(outputs.dtype))

      def logits_of(images):
        return self.objective.head.logits(self._outputs(params, stats, {'image': images}))

      return sums, rows_of(outputs, batch, stats, logits_of)

    def whole(*shards):
      sums, rows = zip(*shards, strict=True)
      sums = strategy.sum_scores(strategy.add_shards(sums) if len(sums) > 1 else sums[0])
      if rows[0] is None:
        return sums
      rows = jax.tree.map(lambda *x: jnp.concatenate(x), *rows)
      return sums, lax.all_gather(rows, mesh_lib.BATCH, tiled=True)

    if not strategy.separate_programs:
      return self._jitted(lambda *args: whole(shard(*args)), P())
    batch_spec = P(mesh_lib.BATCH)
    count = strategy.shards_per_device(mesh)

    def one_shard(params, stats, batch, index):
      micro = microsteps.micro_batch(batch, index, count)
      return microsteps.with_axis(shard(params, stats, micro))

    def add(*shards):
      return whole(*jax.tree.map(lambda x: x[0], shards))

    return microsteps.SequentialScores(
      count=count,
      shard=self._jitted(one_shard, batch_spec, P()),
      add=jax.jit(mesh_lib.mapped(add, mesh, (batch_spec,) * count, P())),
      mesh=mesh,
    )

  def _jitted(self, shard, out_specs, *more_specs):
    """A shard's function of evaluated params, stats and a batch, jitted."""
    specs = jax.tree.map(lambda s: s.sharding.spec, self.abstract_replica.evaluated())
    in_specs = *specs, P(mesh_lib.BATCH), *more_specs
    return jax.jit(mesh_lib.mapped(shard, self.mesh, in_specs, out_specs))
