"""--mode=benchmark: the speed of a config's training on this machine.

One page: images/s of the training step and of the step with its real input,
the share of the time that waits for input, MFU, memory and the time to compile.
"""

from collections.abc import Callable
import contextlib
import math
import os
import time

import jax

from anp_jax import config as config_lib
from anp_jax.config import strategy as strategy_lib, urls
from anp_jax.parallel import mesh as mesh_lib
from anp_jax.reporting import report_kit, summary
from anp_jax.runtimes.calibration import workloads
from anp_jax.system import compile_cache, device_peaks, files, markdown, memory, stopwatch
from anp_jax.tools import input_cost
from anp_jax.tools.trials import trial as trial_lib

_ROUNDS = 9
_ROUND_SECONDS = 1.0
_WARM_UP = 3  # steps

_HOW = f"""\
Steps are timed in {_ROUNDS} rounds of about {_ROUND_SECONDS:g} s after a
warm-up; a time is the median of the rounds, with the quartiles. The batch on
the device is noise, the same in each step; the real input is the config's.
Arithmetic counts the multiplications and additions of matrix products and
convolutions.
"""


def run(invocation: strategy_lib.Invocation) -> dict:
  """Times a config's training, and writes benchmark.json and benchmark.md.

  Returns {}, since nothing is evaluated.

  Raises:
    ConfigError: if the config does not fit the devices.
  """
  compile_cache.enable(invocation.config)
  invocation.processes.check_shared(invocation.workdir)
  trial = trial_lib.Trial(invocation)
  values = _measure(trial, invocation.processes)
  if invocation.processes.index == 0:
    os.makedirs(invocation.workdir, exist_ok=True)
    path = os.path.join(invocation.workdir, 'benchmark')
    files.write_json(f'{path}.json', values)
    config_text = config_lib.to_text(invocation.config).rstrip()
    hardware = [(name, str(text)) for name, text in values['hardware'].items()]
    blocks = (
      report_kit.facts(rows(values)),
      _HOW.rstrip(),
      report_kit.Table([('hardware', ''), *hardware], 'l'),
      f'## Config\n\n```\n{config_text}\n```',
    )
    report_kit.write(f'{path}.md', 'Benchmark', blocks)
    print(markdown.plain(rows(values)))
    print(urls.remote_url(f'benchmark: {path}.md'))
  return {}


def _measure(trial, processes) -> dict:
  """All numbers of the page, in JSON values; all processes call it."""
  images, mesh, config = trial.config.batch_size, trial.mesh, trial.config
  state = trial.new_state()
  batch = workloads.images(trial.program.spec, trial.program.spec.array_rows)
  processes.heartbeat('compiling')
  operations = trial.program.flops(state, batch)
  train_step, compile_seconds = _compile(trial, state, batch)
  processes.gather('compiled')  # Gloo waits half a minute for the slowest
  memory.reset_peak()
  stepper = _Stepper(train_step, state, processes)
  step, _ = stepper.speed(lambda: batch)
  with contextlib.closing(trial.open_feed()) as feed:
    fed, waited = stepper.speed(lambda: next(feed), lambda: feed.wait_seconds, config.data.prefetch)
  peak_bytes = max(processes.gather(_peak_bytes(mesh)))
  cost = input_cost.measure(config, trial.source) if trial.source.has_images else None
  device = mesh.devices.flat[0]
  peak = device_peaks.peak_flops(device.device_kind, config.model.dtype)
  _, median, _ = step
  flops_per_second = operations / median
  return {
    'network': config.model.name,
    'dtype': config.model.dtype,
    'strategy': config.strategy.name,
    'batch_size': images,
    'devices': mesh.size,
    'device': device.device_kind,
    'platform': mesh_lib.platform(mesh),
    'step': _rates(images, *step),
    'with_input': _rates(images, *fed),
    'input': trial.source.name,
    'input_wait': waited,
    'input_cost': cost and cost._asdict(),
    'flops_a_step': operations,
    'flops_per_second': flops_per_second,
    'mfu': flops_per_second / (peak * mesh.size) if peak else None,
    'compile_seconds': max(processes.gather(compile_seconds)),
    'memory_peak': peak_bytes,
    'hardware': summary.hardware(mesh),
  }


def _rates(images, low, median, high) -> dict[str, float]:
  """Images/s with a batch of `images`, from quartiles of a step's seconds."""
  return {
    'images_per_second': images / median,
    'low_quartile': images / high,
    'high_quartile': images / low,
    'seconds_a_step': median,
  }


def _compile(trial, state, batch):
  """The compiled step, and the seconds that compiling took without a cache."""
  lowered = trial.program.train_step.lower(state, batch)
  start = time.perf_counter()
  with compile_cache.disabled():
    compiled = lowered.compile()
  seconds = time.perf_counter() - start
  compile_cache.release_memory()
  return compiled, seconds


def _peak_bytes(mesh) -> int:
  """The most that a device of this process held, or on a CPU the process."""
  if mesh_lib.platform(mesh) == 'cpu':
    return memory.of_process('VmHWM')
  devices = jax.local_devices()
  return max(memory.of_device(d, 'peak_bytes_in_use') for d in devices)


class _Stepper:
  """Makes steps of a state; all processes make the same number of them."""

  def __init__(self, train_step, state, processes):
    self._train_step, self._state = train_step, state
    self._processes = processes
    self._steps = 0

  def speed(
    self, next_batch: Callable, waited: Callable[[], float] = float, ahead: int = 0
  ) -> tuple[tuple[float, float, float], float]:
    """Times steps.

    Args:
      next_batch: returns a batch on the device.
      waited: returns the seconds that `next_batch` has waited so far.
      ahead: batches that may be there before they are needed.

    Returns:
      Quartiles of a step's seconds over the rounds; share of the time spent waiting for input.
    """
    self._run(next_batch, _WARM_UP)
    self._run(next_batch, ahead + 1)
    seconds = stopwatch.timed(lambda: self._run(next_batch, 2)) / 2
    count = math.ceil(_ROUND_SECONDS / max(seconds, 1e-6))
    count = self._processes.gather(count)[0]
    before, times = waited(), []
    for _ in range(_ROUNDS):
      self._processes.gather('ready')
      times.append(stopwatch.timed(lambda: self._run(next_batch, count)) / count)
    share = (waited() - before) / (sum(times) * count)
    # The slowest process is what all wait for.
    rounds = zip(*self._processes.gather(times), strict=True)
    quartiles = stopwatch.quartiles([max(r) for r in rounds])
    return quartiles, max(self._processes.gather(share))

  def _run(self, next_batch, count):
    for _ in range(count):
      self._steps += 1
      self._processes.heartbeat('step', self._steps)
      self._state, values = self._train_step(self._state, next_batch())
    jax.block_until_ready(values)


def rows(values: dict) -> list[tuple[str, str]]:
  """Returns the numbers of benchmark.json for people, as (name, text) rows."""
  mfu = f'MFU {values["mfu"]:.1%}' if values['mfu'] else 'MFU unknown: no peak of this device'
  owner = 'process' if values['platform'] == 'cpu' else 'device'
  return [
    ('network', f'{values["network"]}, {values["dtype"]}'),
    (
      'devices',
      f'{values["devices"]} x {values["device"]}, strategy '
      f'{values["strategy"]}, {values["batch_size"]} images a step',
    ),
    ('step', _speed(values['step'])),
    ('with input', f'{_speed(values["with_input"])}, {values["input"]}'),
    ('input wait', f'{values["input_wait"]:.1%}'),
    *_input_row(values),
    ('arithmetic', f'{values["flops_per_second"] / 1e12:.3g} TFLOP/s, {mfu}'),
    ('memory', f'{_size(values["memory_peak"])} at most, of a {owner} while stepping'),
    ('compiling', f'{values["compile_seconds"]:.1f} s'),
  ]


def _input_row(values):
  if not values['input_cost']:
    return []
  cost = input_cost.InputCost(**values['input_cost'])
  busy = values['step']['images_per_second'] * sum(cost)
  return [('input', f'{cost.text()}; {busy:.1f} cores keep up with the step')]


def _speed(rates):
  return (
    f'{rates["images_per_second"]:,.1f} images/s (quartiles '
    f'{rates["low_quartile"]:,.1f} to {rates["high_quartile"]:,.1f}), '
    f'{1e3 * rates["seconds_a_step"]:.4g} ms'
  )


def _size(count):
  return f'{count / 1e9:.3g} GB' if count >= 1e9 else f'{count / 1e6:.3g} MB'
