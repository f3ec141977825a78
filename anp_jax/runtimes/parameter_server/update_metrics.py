"""Metrics of the updates, from what the workers report with each gradient."""

import collections

from anp_jax.reporting import delayed_metrics
from anp_jax.training import train_step as step_lib

# The histogram's last bin: staler updates are counted together.
_STALEST = 15


def names(objective) -> tuple[str, ...]:
  """Names of the values that a worker reports with each gradient."""
  return (*_sums(objective), 'grad_norm', 'damaged', 'waited', 'bytes')


class UpdateMetrics:
  """Averages over updates, logged every config.log.every."""

  def __init__(self, setup, workers: int, telemetry):
    """Starts from no update.

    Args:
      setup: `setup.Setup`.
      workers: processes that train.
      telemetry: of the run.
    """
    self._setup = setup
    self._every = setup.every('log')
    # Simulated ones wait for one stream of batches.
    simulates = setup.config.strategy.simulate.workers > 0
    self._workers = 1 if simulates else workers
    self._telemetry = telemetry
    self._sums = _sums(setup.objective)
    self._damage = delayed_metrics.DamageCounter(
      setup.config, setup.source.name, setup.config.batch_size
    )
    self._waited = self._bytes = 0.0
    self._staleness = collections.Counter()

  def add(self, version: int, contributions: list[dict]) -> None:
    """Adds the update from `version` to the next one.

    Raises:
      eval_loop.CorruptExampleError: if too many examples cannot be read.
    """
    step, damaged = version + 1, 0
    for contribution in contributions:
      values = contribution['values']
      damaged += int(values['damaged'])
      self._waited += values['waited']
      self._bytes += values['bytes']
      staleness = version - contribution['reads'][0]
      self._staleness[min(staleness, _STALEST)] += 1
    self._damage.add_step(damaged)
    if step % self._every == 0 or step == self._setup.total:
      self._record(step, contributions)

  def _record(self, step, contributions):
    weight = max(sum(c['weight'] for c in contributions), 1)
    values = {name: sum(c['values'][name] for c in contributions) / weight for name in self._sums}
    norms = [c['values']['grad_norm'] for c in contributions]
    staleness, count = self._staleness, self._staleness.total()
    self._telemetry.train(
      step,
      {
        **values,
        'grad_norm': sum(norms) / len(norms),
        'learning_rate': float(self._setup.schedule(step - 1)),
        'damaged': self._damage.damaged,
        'staleness': sum(s * n for s, n in staleness.items()) / count,
        **{f'staleness_{s}': staleness[s] for s in sorted(staleness)},
        'megabytes_per_update': self._bytes / 1e6 / count * len(contributions),
        **simulated_seconds(contributions[0].get('seconds')),
      },
      self._waited / self._workers,
    )
    staleness.clear()
    self._waited = self._bytes = 0.0


def simulated_seconds(seconds: float | None) -> dict[str, float]:
  """Returns the metric of a time; none where nothing is simulated."""
  return {} if seconds is None else {'simulated_seconds': seconds}


def _sums(objective):
  """Names of what a gradient's program adds up over its examples."""
  metric_names = step_lib.metric_names(objective)
  return metric_names[: metric_names.index('grad_norm')]
