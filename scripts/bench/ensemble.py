"""Trainings an hour of an ensemble, over the same trainings one after another.

  python -m scripts.bench.ensemble [--config=FILE[:VARIANT]] [--members=8] [--steps=300]
    [--rounds=3] [--config.KEY=VALUE ...]

trains on noise of the recipe's size. `trainings an hour` counts whole commands, starts
included; a single one is timed once a round. `images/s` is what their metrics.jsonl
say of the steps alone, the median, summed over members. A step of simulated workers,
eight of them, is timed against one of `sync` in one process, in turns of ten.
"""

import argparse
import contextlib
import os
import statistics
import tempfile

import numpy as np

from anp_jax.config import command_line
from anp_jax.reporting import telemetry
from anp_jax.system import stopwatch
from scripts.bench import _common

_EXAMPLES, _CLASSES = 4096, 10
_TURN = 10  # steps
_KEYS = {
  'data.source': 'arrays',
  'data.augment': 'none',
  'eval.every': '1000000 steps',
  'eval.examples': 'False',
  'log.tensorboard': 'False',
  'schedule.warmup': '0 steps',
}


def _write_noise(path, config, keys):
  """Writes images of the size that the config names."""
  side = command_line.load(config, command_line.split_overrides(keys)[0]).data.image_size
  random, arrays = np.random.default_rng(0), {}
  for split in ('train', 'validation', 'test'):
    arrays[f'{split}_images'] = random.integers(0, 256, (_EXAMPLES, side, side, 3), np.uint8)
    arrays[f'{split}_labels'] = np.arange(_EXAMPLES) % _CLASSES
  np.savez(path, **arrays)


def _simulated_steps(config, keys, rounds):
  """Pairs of milliseconds of a step of `sync` and of simulated workers, by look-ahead."""
  from anp_jax import experiment
  from anp_jax.config import strategy as strategy_lib
  from anp_jax.data.input import stream
  from anp_jax.parallel import mesh as mesh_lib
  from anp_jax.runtimes.calibration import workloads

  def contestant(folder, **strategy):
    overrides, _ = command_line.split_overrides(keys)
    # At a larger rate stale gradients diverge.
    overrides |= {'optimizer.learning_rate': '0.001'}
    overrides |= {f'strategy.{key}': value for key, value in strategy.items()}
    opened = experiment.open(command_line.load(config, overrides))
    simulation = strategy_lib.find(opened.config).simulation(opened.spec, folder, 0)
    batches = stream.Stream(opened.config, mesh_lib.batch_sharding(opened.mesh))
    feed = batches.train(opened.source, opened.spec.batch_size, 0, simulation)
    feeds.enter_context(contextlib.closing(feed))
    run = workloads.step(opened.program, opened.spec, opened.spec.array_rows, feed)
    return lambda: 1e3 * stopwatch.timed(lambda: run(_TURN)) / _TURN

  with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as feeds:
    workers = {'name': 'parameter_server', 'simulate.workers': '8'}
    sync = contestant(folder, name='sync')
    turns = {}
    for look_ahead in ('none', 'dana'):
      place = os.path.join(folder, look_ahead)
      os.mkdir(place)
      turns[look_ahead] = contestant(place, **workers, look_ahead=look_ahead)
    times = {name: [] for name in turns}
    for _ in range(1 + rounds):
      for name, turn in turns.items():
        times[name].append((sync(), turn()))
  return {f'async, look_ahead={name}: ms a step': pairs for name, pairs in times.items()}


def _rate(workdir):
  """The median images/s of a run."""
  rates = [line['images_per_second'] for line in telemetry.of_kind(workdir, 'train')]
  return statistics.median(rates[1:] or rates)


def main():
  """Times both, in turn."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
  parser.add_argument('--config', default='configs/lenet.py', help='FILE[:VARIANT]')
  parser.add_argument('--members', type=int, default=8)
  parser.add_argument('--steps', type=int, default=300)
  parser.add_argument('--rounds', type=int, default=3)
  flags, keys = parser.parse_known_args()
  hours, rates = [], []
  with tempfile.TemporaryDirectory() as folder:
    _write_noise(f'{folder}/noise.npz', flags.config, keys)
    lengths = {'duration': f'{flags.steps} steps', 'log.every': f'{flags.steps // 3} steps'}
    noise = f'--config.data.path={folder}/noise.npz'
    typed = [*command_line.typed(_KEYS | lengths), *keys, noise]

    def run(name, *more):
      arguments = f'--config={flags.config}', *typed, *more, f'--workdir={folder}/{name}'
      return stopwatch.timed(lambda: _common.train(*arguments))

    for i in range(1 + flags.rounds):
      single = run(f'single{i}')
      together = run(f'together{i}', f'--config.ensemble.seeds=0:{flags.members}')
      hours.append((3600 / single, 3600 * flags.members / together))
      members = [_rate(f'{folder}/together{i}/seed{m}') for m in range(flags.members)]
      rates.append((_rate(f'{folder}/single{i}'), sum(members)))
    simulated = _simulated_steps(flags.config, typed, 10 * flags.rounds)
  rows = [('', 'single', 'together, or simulated', 'ratio (quartiles)')]
  ratios = {}
  for name, pairs in {'trainings an hour': hours, 'images/s': rates, **simulated}.items():
    pairs = pairs[1:]  # the first round fills the compilation cache
    low, median, high = stopwatch.quartiles([b / a for a, b in pairs])
    medians = [statistics.median(column) for column in zip(*pairs)]
    text = f'{median:.2f} ({low:.2f} to {high:.2f})'
    rows.append((name, *(f'{m:,.0f}' for m in medians), text))
    key = name.partition(':')[0].replace('/', '_').replace(' ', '_')
    ratios[f'ensemble_{key}'] = median
  _common.show(f'{flags.members} trainings of {flags.steps} steps, {flags.config}', rows, ratios)


if __name__ == '__main__':
  main()
