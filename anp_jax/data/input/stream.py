"""The streams of a run: device batches from any source, at any step."""

from collections.abc import Callable

import numpy as np

from anp_jax.data.input import corruption
from anp_jax.data.input import feed
from anp_jax.data.input import pipeline
from anp_jax.data.sources import balance


class Stream:
  """Device batches of a run, for training and for evaluation."""

  def __init__(self, config, sharding, vote: Callable[[], int] = int):
    """Makes the streams' maker; nothing is read yet.

    Args:
      config: the run's config.
      sharding: of arrays whose first axis is the batch.
      vote: of this process, sent along with every batch.
    """
    self._config = config
    self._sharding = sharding
    self._vote = vote
    # By source: an evaluation names a damaged example once a run.
    self._registries = {}

  def train(self, source, batch_size: int, start: int) -> feed.Feed:
    """Endless shuffled and augmented batches from step `start` on."""
    return self._feed(source, batch_size, start, training=True)

  def tickets(self, source, batch_size: int, part: int, where) -> feed.Feed:
    """Batches of training in an order that others decide.

    Args:
      source: of the examples.
      batch_size: images of a global batch.
      part: images of it that this process computes at a time.
      where: count of a batch in this stream -> (its step, its `part` rows of
        the global batch); may block, and is asked ahead of the reader and from
        several threads, for one count more than once.
    """
    config = self._config
    rows = np.arange(part)
    if source.kind == 'synthetic':
      batches = feed.synthetic(
        config, len(source.vocabulary), self._sharding, part, 0, None,
        len(source), self._vote, where,
      )  # fmt: skip
      return feed.Feed(batches, config.data.prefetch)
    plan = pipeline.Plan(
      config, len(source), batch_size, rows, training=True, tickets=where,
      sampler=balance.sampler(config, source),
    )  # fmt: skip
    return self._on_device(source, plan, rows, part)

  def evaluation(self, source) -> feed.Feed:
    """Every example once, in order."""
    size = evaluation_batch(
      self._config, len(source), self._sharding.num_devices
    )
    return self._feed(source, size, 0, training=False)

  def _feed(self, source, batch_size, start, training):
    config, sharding = self._config, self._sharding
    rows = feed.local_rows(sharding, batch_size)
    plan = pipeline.Plan(
      config, len(source), batch_size, rows, training, start,
      sampler=balance.sampler(config, source) if training else None,
    )  # fmt: skip
    if source.kind == 'synthetic':
      batches = feed.synthetic(
        config, len(source.vocabulary), sharding, batch_size, start,
        plan.steps, len(source), self._vote,
      )  # fmt: skip
      return feed.Feed(batches, config.data.prefetch)
    return self._on_device(source, plan, rows, batch_size)

  def _on_device(self, source, plan, rows, batch_size):
    registry = self._registries.setdefault(source, corruption.Registry(source))
    batches = feed.on_device(
      pipeline.batches(source, plan, registry), self._sharding, rows,
      batch_size, self._vote,
    )  # fmt: skip
    return feed.Feed(batches, self._config.data.prefetch)


def evaluation_batch(config, examples: int, devices: int) -> int:
  """Images of a batch of evaluation.

  Args:
    config: the run's config.
    examples: of the split.
    devices: over all processes.

  Returns:
    A multiple of what is computed by itself: the devices' parts, or the
    logical shards. No longer than the split needs.
  """
  is_invariant = config.strategy.name == 'invariant'
  parts = config.strategy.logical_shards if is_invariant else devices
  size = min(config.eval.batch_size, examples)
  return -(-size // parts) * parts
