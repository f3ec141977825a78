"""Metrics of the updates, from what the workers report with each gradient."""

import collections
import time

from anp_jax.reporting import delayed_metrics, telemetry as telemetry_lib
from anp_jax.runtimes.parameter_server import log as log_lib, setup as setup_lib
from anp_jax.training import train_step as step_lib


class UpdateMetrics:
  """Scores of every config.log.every-th update, and means of the rest since the line before."""

  def __init__(self, setup: setup_lib.Setup, workers: int):
    """Starts from no update.

    Args:
      setup: setup of the run.
      workers: number of processes that train.
    """
    self._setup = setup
    self._update_time: float | None = None  # of the update that is being logged
    self._workers = workers
    self._damage = delayed_metrics.DamageCounter(
      setup.config, setup.source.name, setup.config.batch_size
    )
    self._waited = self._bytes = 0.0
    self._staleness: list[int] = []  # of the gradients since the last line

  def clock(self) -> float:
    """Returns the time of the update that is being logged; else the present."""
    return self._update_time or time.monotonic()

  def log(self, applied: collections.deque, telemetry: telemetry_lib.Telemetry) -> None:
    """Logs, and removes, updates that were applied.

    Rates are those of the updates, also of what was queued during an evaluation.

    Args:
      applied: (seconds, version, contributions) of each update; `version` is
        that before it.
      telemetry: telemetry of the run, with this clock.

    Raises:
      eval_loop.CorruptExampleError: if too many examples cannot be read.
    """
    spec = self._setup.spec
    every = spec.steps(spec.config.log.every)
    while applied:
      self._update_time, version, contributions = applied.popleft()
      if version == telemetry.start_step:  # until the first update, workers compile
        telemetry.start_timing(version + 1)
      self._add(version, contributions)
      if (version + 1) % every == 0 or version + 1 == spec.total_steps:
        values = self._means(version, contributions)
        telemetry.train(version + 1, values, self._waited / self._workers)
        self._staleness.clear()
        self._waited = self._bytes = 0.0
      self._update_time = None

  def _add(self, version, contributions):
    for contribution in contributions:
      self._waited += contribution['values']['waited']
      self._bytes += contribution['values']['bytes']
      self._staleness.append(version - contribution['reads'][0])
    self._damage.add_step(sum(c['values']['damaged'] for c in contributions))

  def _means(self, version, contributions):
    weight = max(sum(c['weight'] for c in contributions), 1)
    names = step_lib.metric_names(self._setup.spec.objective)
    sums = names[: names.index('grad_norm')]
    norms = [c['values']['grad_norm'] for c in contributions]
    return {
      **{name: sum(c['values'][name] for c in contributions) / weight for name in sums},
      'grad_norm': sum(norms) / len(norms),
      'learning_rate': float(self._setup.schedule(version)),
      'damaged': self._damage.damaged,
      **log_lib.staleness_metrics(self._staleness),
      'megabytes_per_update': self._bytes / 1e6 / len(self._staleness) * len(contributions),
    }
