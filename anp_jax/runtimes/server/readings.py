"""What the workers measured, update by update, as server 0 tells it."""

import collections

from anp_jax import cluster
from anp_jax.data.input import corruption
from anp_jax.training import step as step_lib

# Of the histogram: staler updates are counted together.
_STALEST = 15


def measured(objective) -> tuple[str, ...]:
  """Names of the values that a worker tells with each gradient."""
  return (*_sums(objective), 'grad_norm', 'damaged', 'waited', 'bytes')


class Readings:
  """Averages over updates, logged every config.log.every."""

  def __init__(self, setup, every: int, workers: int, telemetry):
    """Makes it.

    Args:
      setup: `setup.Setup`.
      every: updates between two records.
      workers: processes that train.
      telemetry: of the run.
    """
    self._config = setup.config
    self._source = setup.source
    self._schedule = setup.schedule
    self._total = setup.parts.total
    self._every = every
    self._workers = workers
    self._telemetry = telemetry
    self._names = _sums(setup.objective)
    self._damaged = self._updates = 0
    self._waited = self._bytes = 0.0
    self._stale = collections.Counter()

  def add(self, version: int, parts: list[dict]) -> None:
    """Takes the update from `version` to the next one.

    Raises:
      cluster.Failed: if too many examples cannot be read.
    """
    step = version + 1
    self._updates += 1
    for part in parts:
      values = part['values']
      self._damaged += int(values['damaged'])
      self._waited += values['waited']
      self._bytes += values['bytes']
      self._stale[min(version - part['reads'][0], _STALEST)] += 1
    examples = self._updates * self._config.batch_size
    text = corruption.too_many_error(
      self._config, self._damaged, examples, self._source.name
    )
    if text:
      raise cluster.Failed(text)
    if step % self._every == 0 or step == self._total:
      self._record(step, parts)

  def _record(self, step, parts):
    weight = max(sum(p['weight'] for p in parts), 1)
    values = {
      name: sum(p['values'][name] for p in parts) / weight
      for name in self._names
    }
    norms = [p['values']['grad_norm'] for p in parts]
    count = self._stale.total()
    self._telemetry.train(
      step,
      {
        **values,
        'grad_norm': sum(norms) / len(norms),
        'learning_rate': float(self._schedule(step - 1)),
        'damaged': self._damaged,
        'staleness': sum(s * n for s, n in self._stale.items()) / count,
        **{f'staleness_{s}': self._stale[s] for s in sorted(self._stale)},
        'megabytes_per_update': self._bytes / 1e6 / count * len(parts),
      },
      self._waited / self._workers,
    )
    self._stale.clear()
    self._waited = self._bytes = 0.0


def _sums(objective):
  """Names of what a gradient's program adds up over its examples."""
  names = step_lib.metric_names(objective)
  return names[: names.index('grad_norm')]
