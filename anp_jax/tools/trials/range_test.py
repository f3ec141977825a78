"""--mode=range_test: a range test of learning rates, after Smith (2015).

The learning rate rises exponentially over the steps of a run that is then thrown
away (arXiv 1506.01186). The loss of step s is that of a run with
config.schedule.name='range': a function of the seed and the step on any number
of devices.
"""

import contextlib
import os

import jax
import numpy as np

from anp_jax.config import strategy as strategy_lib, urls
from anp_jax.system import compile_cache, drawing, files
from anp_jax.tools.trials import trial as trial_lib
from anp_jax.training import eval_loop, train_step as step_lib

_PARTS = 20  # of the steps; losses are averaged over about one
_LIMIT = 4.0  # times the smallest mean loss is divergence


def run(invocation: strategy_lib.Invocation) -> dict:
  """Makes the steps of a range test, and writes range_test.json and range_test.png.

  Returns {}, since nothing is evaluated. The config has the schedule 'range'.

  Raises:
    ConfigError: if the config does not fit the devices.
    eval_loop.CorruptExampleError: if too many examples cannot be read.
  """
  compile_cache.enable(invocation.config)
  invocation.processes.check_shared(invocation.workdir)
  rates, losses, diverged = _train(trial_lib.Trial(invocation), invocation.processes)
  smoothed, suggested = analyse(rates, losses)
  if invocation.processes.index == 0:
    os.makedirs(invocation.workdir, exist_ok=True)
    path = os.path.join(invocation.workdir, 'range_test')
    values = {'rates': rates, 'losses': losses, 'smoothed': smoothed.tolist()}
    marks = {'suggested': suggested, 'diverged': diverged}
    files.write_json(f'{path}.json', marks | values)
    _draw(f'{path}.png', values, marks)
    texts = ('none' if rate is None else f'{rate:.2g}' for rate in marks.values())
    print(urls.remote_url(f'range test: {path}.png'))
    print('suggested learning rate {}, diverged at {}'.format(*texts))
  return {}


def analyse(rates: list[float], losses: list[float]) -> tuple[np.ndarray, float | None]:
  """Smooths the losses, and finds the rate at which they fall fastest.

  Args:
    rates: (n,) learning rates, rising by equal ratios.
    losses: (n,) finite losses.

  Returns:
    (n,) means of the losses around each step, with normal weights; and the rate where the mean
    falls fastest over the logarithm of the rate, None if it never falls.
  """
  steps = np.arange(len(losses))
  width = max(len(losses) / _PARTS, 1)  # standard deviation, in steps
  weights = np.exp(-(((steps - steps[:, None]) / width) ** 2) / 2)
  smoothed = weights @ np.array(losses) / weights.sum(1)
  if len(losses) < 3:
    return smoothed, None
  # What falls after the lowest loss is the noise of divergence.
  slopes = np.gradient(smoothed, np.log(rates))[: int(np.argmin(smoothed)) + 1]
  return smoothed, float(rates[np.argmin(slopes)]) if slopes.min() < 0 else None


def _train(trial, processes):
  """Returns rates and losses of the steps, and the rate that diverged or None."""
  total, state = trial.program.spec.total_steps, trial.new_state()
  names = step_lib.metric_names(trial.program.spec.objective)
  rates, losses, damaged = [], [], 0
  with contextlib.closing(trial.open_feed()) as feed:
    processes.heartbeat('compiling')
    batch = next(feed)
    train_step = trial.program.train_step.lower(state, batch).compile()
    processes.gather('compiled')  # Gloo waits half a minute for the slowest
    for step in range(1, total + 1):
      processes.heartbeat('step', step)
      state, values = train_step(state, batch)
      metrics = dict(zip(names, jax.device_get(values).tolist(), strict=True))
      if not metrics['finite']:
        return rates, losses, metrics['learning_rate']
      rates.append(metrics['learning_rate'])
      losses.append(metrics['loss'])
      if processes.index == 0 and step % max(total // 10, 1) == 0:
        print(f'{step}/{total}  learning rate {rates[-1]:.2g}  loss {losses[-1]:.4g}', flush=True)
      damaged += int(metrics['damaged'])
      eval_loop.check_excess(
        trial.config, damaged, step * trial.config.batch_size, trial.source.name
      )
      if _diverges(losses, max(total // _PARTS, 1)):
        return rates, losses, rates[-1]
      batch = next(feed)
  return rates, losses, None


def _diverges(losses, width):
  """Returns whether the mean of the last losses is several times its smallest."""
  means = np.convolve(losses, np.full(width, 1 / width), 'valid')
  # A loss near 0 may well be several times another.
  return len(losses) > width and means[-1] > max(_LIMIT * means.min(), means[0])


def _draw(path, values, marks):
  """Draws the losses over the learning rate."""
  with drawing.figure(path, 8, 5) as figure:
    axis = figure.subplots()
    axis.set(xscale='log', xlabel='learning rate', ylabel='loss')
    axis.set_ylim(0, 2 * max(values['losses'][:1], default=1))  # divergence flattens the rest
    axis.plot(values['rates'], values['losses'], color=drawing.GREY, linewidth=1, label='loss')
    axis.plot(values['rates'], values['smoothed'], color=drawing.BLUE, label='mean')
    for (name, rate), color in zip(marks.items(), (drawing.GREEN, drawing.ORANGE)):
      if rate is not None:
        axis.axvline(rate, color=color, linestyle='--', label=f'{name} {rate:.2g}')
    axis.legend()
