"""The streams of a run: device batches from any source, at any step."""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
import ml_collections
import numpy as np

from anp_jax.config import strategy as strategy_lib
from anp_jax.data import sources
from anp_jax.data.input import batch_sampler, corruption, feed, pipeline, random_batches
from anp_jax.data.sources import balance


@dataclasses.dataclass(eq=False)
class Stream:
  """Device batches of a run, for training and for evaluation.

  Attributes:
    config: the run's config.
    sharding: sharding of arrays whose first axis is the batch.
    vote: function to this process's vote, which every batch carries.
    registries: damaged examples by source: an evaluation names one once a run.
  """

  config: ml_collections.ConfigDict
  sharding: jax.sharding.Sharding
  vote: Callable[[], int] = int
  registries: dict[sources.Source, corruption.Registry] = dataclasses.field(
    default_factory=dict, init=False
  )

  def train(
    self, source: sources.Source, batch_size: int, start: int, simulation: Any = None
  ) -> feed.Feed:
    """Endless shuffled and augmented batches from step `start` on.

    Args:
      source: training examples.
      batch_size: number of images in a global batch.
      start: first step.
      simulation: what decides their order, see `config.strategy.Strategy.simulation`.
    """
    parts = feed.parts(self.sharding)
    counts = strategy_lib.find(self.config).row_counts(self.config, batch_size, parts)
    placement = feed.Placement.create(self.sharding, batch_size, counts)
    options: dict[str, Any] = {'start': start}
    if simulation:
      options |= {'tickets': simulation.step_and_rows, 'is_known': True}
    return self._feed(source, batch_size, placement, simulation=simulation, **options)

  def tickets(
    self,
    source: sources.Source,
    batch_size: int,
    ticket_rows: int,
    step_and_rows: Callable[[int], tuple[int, np.ndarray]],
  ) -> feed.Feed:
    """Batches of training in an order that tickets decide.

    Args:
      source: training examples.
      batch_size: number of images in a global batch.
      ticket_rows: number of them that a ticket names.
      step_and_rows: function from a batch's place in this stream to (its step,
        its `ticket_rows` rows of the global batch); may block, and is called
        ahead of the reader, from several threads, and again for one place.
    """
    placement = feed.Placement.create(self.sharding, ticket_rows)
    return self._feed(source, batch_size, placement, tickets=step_and_rows)

  def evaluation(self, source: sources.Source) -> feed.Feed:
    """Every example once, in order."""
    size = evaluation_batch(self.config, len(source), self.sharding.num_devices)
    placement = feed.Placement.create(self.sharding, size)
    return self._feed(source, size, placement, training=False)

  def _feed(self, source, batch_size, placement, training=True, simulation=None, **options):
    config, is_synthetic = self.config, source.kind == 'synthetic'
    rows = placement.local_rows()
    if training and not is_synthetic:
      options['order'] = balance.sampler(config, source)
    sampler = batch_sampler.BatchSampler(config, len(source), batch_size, rows, training, **options)
    if is_synthetic:
      batches = random_batches.batches(sampler, len(source.vocabulary), placement, self.vote)
    else:
      registry = self.registries.setdefault(source, corruption.Registry(source))
      host_batches = pipeline.labelled(source, sampler, registry)
      batches = feed.on_device(host_batches, rows, placement, self.vote)
    if simulation:
      replicated = jax.NamedSharding(self.sharding.mesh, jax.P())
      batches = simulation.ordered(batches, replicated, options['start'])
    return feed.Feed(batches, config.data.prefetch)


def evaluation_batch(config: ml_collections.ConfigDict, examples: int, devices: int) -> int:
  """Images of a batch of evaluation.

  Args:
    config: the run's config.
    examples: number of examples in the split.
    devices: number of devices of all processes.

  Returns:
    A multiple of the devices, or of the logical shards; no more than the split
    needs.
  """
  parts = strategy_lib.find(config).eval_parts(config, devices)
  size = min(config.eval.batch_size, examples)
  return -(-size // parts) * parts
