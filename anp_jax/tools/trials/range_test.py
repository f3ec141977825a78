"""--mode=range_test: which learning rates train, after Smith (2015).

The rate rises exponentially over the steps of a run that is then thrown away
(arXiv 1506.01186). The loss of step s is that of a run with
config.schedule.name='range': a function of the seed and the step, whatever the
number of devices.
"""

import collections
from collections.abc import Iterator
import contextlib
import dataclasses
import json
import os
import statistics

import numpy as np

from anp_jax.config import strategy as strategy_lib, urls
from anp_jax.reporting import delayed_metrics
from anp_jax.system import compile_cache, drawing, files
from anp_jax.tools.trials import trial as trial_lib
from anp_jax.training import train_step as step_lib

FOLDER = 'range_test'  # in a workdir
_PARTS = 20  # of the steps; losses are averaged over about one
_LIMIT = 4.0  # times the smallest mean loss is divergence
_LINES = 10  # that tell of the test while it runs


@dataclasses.dataclass(frozen=True)
class Result:
  """What a range test has found.

  Attributes:
    rates: (n,) of the steps that were made, rising.
    losses: (n,) before each step's update.
    smoothed: (n,) means of the losses around each.
    suggested: rate where the smoothed loss falls fastest over the logarithm of
      the rate; None where it never falls.
    diverged: rate from which on the loss is several times its smallest, or is
      not finite; None where the test came to its end.
  """

  rates: np.ndarray
  losses: np.ndarray
  smoothed: np.ndarray
  suggested: float | None
  diverged: float | None

  def line(self) -> str:
    """Returns the result as one line."""
    text = 'no learning rate is suggested: the loss never fell'
    if self.suggested is not None:
      text = f'suggested learning rate {self.suggested:.2g}, where the loss falls fastest'
    if self.diverged is None:
      return f'{text}; it did not diverge up to {self.rates[-1]:.2g}'
    tenth = self.diverged / 10
    return f'{text}; it diverged at {self.diverged:.2g}, a tenth is {tenth:.2g}'


def run(job: strategy_lib.Job) -> dict:
  """Makes the steps of a range test, and writes what they show.

  Args:
    job: of the command; its config has the schedule 'range'.

  Returns:
    {}: nothing is evaluated.

  Raises:
    ConfigError: if the config does not fit the devices.
    eval_loop.CorruptExampleError: if too many examples cannot be read.
  """
  compile_cache.enable(job.config)
  job.processes.check_shared(job.workdir)
  trial = trial_lib.Trial(job)
  result = analyse(*_train(trial, job.processes))
  if job.processes.index == 0:
    folder = os.path.join(job.workdir, FOLDER)
    _write(folder, result, job.config.optimizer.name)
    print(urls.remote_url(f'range test: {folder}/range_test.png'))
    print(result.line())
  return {}


def analyse(rates, losses, diverged: float | None) -> Result:
  """Smooths the losses, and finds the rate at which they fall fastest.

  Args:
    rates: (n,) learning rates, rising by equal ratios.
    losses: (n,) finite.
    diverged: see `Result`.
  """
  rates, losses = np.array(rates, float), np.array(losses, float)
  smoothed = _smoothed(losses)
  suggested = None
  if len(losses) > 2:
    slopes = np.gradient(smoothed, np.log(rates))
    # What falls after the lowest loss is the noise of divergence.
    steepest = int(np.argmin(slopes[: int(np.argmin(smoothed)) + 1]))
    suggested = float(rates[steepest]) if slopes[steepest] < 0 else None
  return Result(rates, losses, smoothed, suggested, diverged)


def _smoothed(losses):
  """Means around each of the losses, with weights of a normal distribution."""
  steps = np.arange(len(losses))
  width = max(len(losses) / _PARTS, 1)  # standard deviation, in steps
  weights = np.exp(-(((steps - steps[:, None]) / width) ** 2) / 2)
  return weights @ losses / weights.sum(1)


class _Divergence:
  """Tells when the mean of the last losses is several times its smallest."""

  def __init__(self, total: int):
    self._window = collections.deque(maxlen=max(total // _PARTS, 1))
    self._means = []

  def add(self, loss: float) -> bool:
    """Returns whether training diverges with the next step's loss."""
    self._window.append(loss)
    mean = statistics.fmean(self._window)
    self._means.append(mean)
    # A loss near 0 may well be several times another.
    return mean > _LIMIT * min(self._means) and mean > self._means[0]


def _train(trial, processes):
  """Rates and losses of the steps, and the rate that diverged or None."""
  total = trial.program.spec.total_steps
  divergence, rates, losses = _Divergence(total), [], []
  damage = delayed_metrics.DamageCounter(trial.config, trial.source.name, trial.config.batch_size)
  try:
    with contextlib.closing(_steps(trial, total, processes)) as steps:
      for metrics in steps:
        damage.add_step(metrics.values['damaged'])
        rates.append(metrics.values['learning_rate'])
        losses.append(metrics.values['loss'])
        if processes.index == 0 and metrics.step % max(total // _LINES, 1) == 0:
          print(
            f'{metrics.step}/{total}  learning rate {rates[-1]:.2g}  loss {losses[-1]:.4g}',
            flush=True,
          )
        if divergence.add(losses[-1]):
          return rates, losses, rates[-1]
  except delayed_metrics.NotFiniteError:
    return rates, losses, float(trial.program.training.schedule(len(rates)))
  return rates, losses, None


def _steps(trial, total, processes) -> Iterator[delayed_metrics.StepMetrics]:
  """Makes the steps; yields the metrics of each, one step late."""
  spec, state = trial.program.spec, trial.new_state()
  metrics = delayed_metrics.DelayedMetrics(step_lib.metric_names(spec.objective))
  with contextlib.closing(trial.open_feed()) as feed:
    processes.heartbeat('compiling')
    batch = next(feed)
    train_step = trial.program.train_step.lower(state, batch).compile()
    processes.gather('compiled')  # Gloo waits half a minute for the slowest
    for step in range(1, total + 1):
      processes.heartbeat('step', step)
      state, values = train_step(state, batch)
      batch = next(feed)
      previous = metrics.push(step, values)
      if previous:
        yield previous
    yield metrics.flush()


def _write(folder, result, optimizer):
  """Writes range_test.json and range_test.png."""
  os.makedirs(folder, exist_ok=True)
  values = {
    'optimizer': optimizer,
    'suggested': result.suggested,
    'diverged': result.diverged,
    'rates': result.rates.tolist(),
    'losses': result.losses.tolist(),
    'smoothed': result.smoothed.tolist(),
  }
  files.write_atomic(os.path.join(folder, 'range_test.json'), json.dumps(values, indent=1))
  with drawing.figure(os.path.join(folder, 'range_test.png'), 8, 5) as figure:
    axis = figure.subplots()
    axis.set_title(f'Loss over the learning rate, {optimizer}')
    axis.set_xscale('log')
    axis.xaxis.set_major_formatter(lambda rate, _: f'{rate:g}')
    if len(result.losses):  # what diverges would leave all else flat
      axis.set_ylim(0, 2 * result.losses[0])
    axis.set_xlabel('learning rate')
    axis.plot(result.rates, result.losses, color=drawing.GREY, linewidth=1, label='loss')
    axis.plot(result.rates, result.smoothed, color=drawing.BLUE, label='mean')
    for rate, color, name in (
      (result.suggested, drawing.GREEN, 'suggested'),
      (result.diverged, drawing.ORANGE, 'diverged'),
    ):
      if rate is not None:
        axis.axvline(rate, color=color, linestyle='--', label=f'{name} {rate:.2g}')
    axis.legend()
