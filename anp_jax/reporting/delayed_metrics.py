"""The metrics of training steps, read while the next step computes."""

from collections.abc import Sequence
import dataclasses
from typing import Protocol

import jax
import ml_collections

from anp_jax import cluster
from anp_jax.cluster import preemption
from anp_jax.reporting import telemetry as telemetry_lib
from anp_jax.training import eval_loop


class NotFiniteError(cluster.RunFailedError, ArithmeticError):
  """Loss, gradient, update or statistics of a step are NaN or infinite."""


@dataclasses.dataclass(frozen=True)
class StepMetrics:
  """The metrics of one step.

  Attributes:
    step: updates made so far, this one included.
    values: name to number: loss, accuracies, grad_norm, learning_rate, damaged.
    vote: decision of the processes, a constant of `preemption`.
  """

  step: int
  values: dict[str, float]
  vote: int


class DelayedMetrics:
  """Reads a step's metrics while the next step computes.

  The host never waits for the step that it has just started: `push` returns the
  one before. Every process reads the same reduced numbers, so all raise or
  none.
  """

  def __init__(self, names: Sequence[str]):
    """Starts without a step.

    Args:
      names: names of a step's values, in order; from `train_step.metric_names`.
    """
    self._names = names
    self._pending: tuple[int, jax.Array] | None = None

  def push(self, step: int, values: jax.Array) -> StepMetrics | None:
    """Keeps the metrics of a step, and reads those of the step before.

    Args:
      step: updates made so far.
      values: (len(names),) float, on the device.

    Returns:
      The metrics of the step before; None if there is no other.

    Raises:
      NotFiniteError: if a number of the step before is not finite.
    """
    previous = self.flush()
    self._pending = step, values
    return previous

  def flush(self) -> StepMetrics | None:
    """Reads the last step, waiting for it; None if it has been read.

    Raises:
      NotFiniteError: if a number of it is not finite.
    """
    if self._pending is None:
      return None
    step, values = self._pending
    self._pending = None
    metrics = dict(zip(self._names, jax.device_get(values).tolist(), strict=True))
    vote = int(metrics.pop('vote'))
    if not metrics.pop('finite'):
      raise NotFiniteError(
        f'step {step} is not finite: loss {metrics["loss"]}, gradient norm '
        f'{metrics["grad_norm"]}; nothing of it was saved'
      )
    return StepMetrics(step, metrics, vote)


class DamageCounter:
  """Counts the damaged examples of a stream, and refuses too many.

  Attributes:
    damaged: examples that could not be read.
    examples: examples that were requested.
  """

  def __init__(self, config: ml_collections.ConfigDict, source_name: str, batch_size: int):
    """Starts at zero.

    Args:
      config: the run's config.
      source_name: name of the data set, for the error.
      batch_size: examples per step.
    """
    self._config = config
    self._source_name = source_name
    self._batch_size = batch_size
    self.damaged = self.examples = 0

  def add_step(self, damaged: float) -> None:
    """Counts the examples of a step.

    Args:
      damaged: number of examples that could not be read.

    Raises:
      eval_loop.CorruptExampleError: if more are damaged than config.data.max_damaged
        allows.
    """
    self.damaged += int(damaged)
    self.examples += self._batch_size
    eval_loop.check_excess(self._config, self.damaged, self.examples, self._source_name)


class Input(Protocol):
  """Training batches, such as `data.input.feed.Feed`.

  Attributes:
    wait_seconds: total seconds that steps have waited for them.
  """

  wait_seconds: float


class TrainingLog:
  """Passes delayed metrics to telemetry, every few steps.

  Attributes:
    step: last step whose numbers were read.
  """

  def __init__(
    self,
    names: Sequence[str],
    telemetry: telemetry_lib.Telemetry,
    damage: DamageCounter,
    every: int,
    total: int,
    feed: Input,
  ):
    """Starts at the next step.

    Args:
      names: names of a step's values, in order; from `train_step.metric_names`.
      telemetry: telemetry of the run.
      damage: counter of the examples that could not be read since the start.
      every: steps between two records.
      total: step at which the run ends, which is recorded too.
      feed: training batches.
    """
    self._metrics = DelayedMetrics(names)
    self._telemetry, self.step = telemetry, telemetry.start_step
    self._damage = damage
    self._every, self._total = every, total
    self._feed = feed
    self._waited = feed.wait_seconds  # for the first batch: no rate counts it

  def push(self, step: int, values: jax.Array) -> int:
    """Keeps the metrics of a step, and records those of the step before.

    Args:
      step: updates made so far.
      values: (len(names),) float, on the device.

    Returns:
      The vote of the step before; `preemption.CONTINUE` if there is none.

    Raises:
      NotFiniteError: if a number of the step before is not finite.
      eval_loop.CorruptExampleError: if too many examples could not be read.
    """
    return self._record(self._metrics.push(step, values))

  def flush(self) -> int:
    """Records the last step, waiting for it; returns and raises as `push`."""
    return self._record(self._metrics.flush())

  def _record(self, metrics):
    if metrics is None:
      return preemption.CONTINUE
    self._damage.add_step(metrics.values['damaged'])
    self.step = step = metrics.step
    if step % self._every == 0 or step == self._total:
      waited = self._feed.wait_seconds - self._waited
      self._waited = self._feed.wait_seconds
      values = metrics.values | {'damaged': self._damage.damaged}
      self._telemetry.train(step, values, waited)
    return metrics.vote
