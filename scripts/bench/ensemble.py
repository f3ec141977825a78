"""Trainings an hour of an ensemble, over the same trainings one after another.

  python -m scripts.bench.ensemble [--config=FILE[:VARIANT]] [--members=8] [--steps=300]
    [--rounds=3] [--config.KEY=VALUE ...]

trains on noise of the recipe's size. `trainings an hour` counts whole commands, starts
included; a single one is timed once a round. `images/s` is what their metrics.jsonl
say of the steps alone, the median, summed over members. A step of simulated workers,
eight of them, is timed against one of `sync` in one process, in turns of ten.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np

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
  from anp_jax.config import command_line

  side = command_line.load(config, dict(k.removeprefix('--config.').split('=', 1) for k in keys))
  side = side.data.image_size
  random, arrays = np.random.default_rng(0), {}
  for split in ('train', 'validation', 'test'):
    arrays[f'{split}_images'] = random.integers(0, 256, (_EXAMPLES, side, side, 3), np.uint8)
    arrays[f'{split}_labels'] = np.arange(_EXAMPLES) % _CLASSES
  np.savez(path, **arrays)


def _simulated_steps(config, keys, rounds):
  """Pairs of milliseconds of a step of `sync` and of simulated workers, by look-ahead."""
  from anp_jax import experiment
  from anp_jax.config import command_line, strategy as strategy_lib
  from anp_jax.data.input import stream
  from anp_jax.parallel import mesh as mesh_lib

  def contestant(folder, **strategy):
    typed = dict(k.removeprefix('--config.').split('=', 1) for k in keys)
    # At a larger rate stale gradients diverge.
    typed |= {'optimizer.learning_rate': '0.001'}
    typed |= {f'strategy.{key}': value for key, value in strategy.items()}
    opened = experiment.open(command_line.load(config, typed))
    simulation = strategy_lib.find(opened.config).simulation(opened.spec, folder, 0)
    batches = stream.Stream(opened.config, mesh_lib.batch_sharding(opened.mesh))
    feed = batches.train(opened.source, opened.spec.batch_size, 0, simulation)
    state, batch = opened.new_state()[0], next(feed)
    step = opened.program.train_step.lower(state, batch).compile()

    def turn():
      nonlocal state
      begin = time.monotonic()
      for _ in range(_TURN):
        state, values = step(state, next(feed))
        values.block_until_ready()
      return 1e3 * (time.monotonic() - begin) / _TURN

    return turn, feed

  with tempfile.TemporaryDirectory() as folder:
    workers = {'name': 'parameter_server', 'simulate.workers': '8'}
    sync, *feeds = contestant(folder, name='sync')
    turns = {}
    for look_ahead in ('none', 'dana'):
      os.mkdir(os.path.join(folder, look_ahead))
      turns[look_ahead], feed = contestant(
        os.path.join(folder, look_ahead), **workers, look_ahead=look_ahead
      )
      feeds.append(feed)
    times = {name: [] for name in turns}
    for i in range(-1, rounds):
      for name, turn in turns.items():
        pair = sync(), turn()
        if i >= 0:
          times[name].append(pair)
    for feed in feeds:
      feed.close()
  return {f'async, look_ahead={name}: ms a step': pairs for name, pairs in times.items()}


def _rate(workdir):
  """The median images/s of a run."""
  with open(f'{workdir}/metrics.jsonl') as f:
    lines = [json.loads(line) for line in f]
  rates = [r['images_per_second'] for r in lines if r['kind'] == 'train']
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
    typed = [f'--config.{key}={value}' for key, value in _KEYS.items()]
    typed += [
      f'--config.duration={flags.steps} steps',
      f'--config.log.every={flags.steps // 3} steps',
    ]

    def run(name, *more):
      command = [sys.executable, 'main.py', f'--config={flags.config}', *typed, *keys, *more]
      command += [f'--config.data.path={folder}/noise.npz', f'--workdir={folder}/{name}']
      begin = time.monotonic()
      subprocess.run(command, cwd=_common.ROOT, stdout=sys.stderr, check=True)
      return time.monotonic() - begin

    for i in range(-1, flags.rounds):  # the first round fills the compilation cache
      single = run(f'single{i}')
      together = run(f'together{i}', f'--config.ensemble.seeds=0:{flags.members}')
      if i >= 0:
        hours.append((3600 / single, 3600 * flags.members / together))
        members = [_rate(f'{folder}/together{i}/seed{m}') for m in range(flags.members)]
        rates.append((_rate(f'{folder}/single{i}'), sum(members)))
    typed = [*typed, *keys, f'--config.data.path={folder}/noise.npz']
    simulated = _simulated_steps(flags.config, typed, 10 * flags.rounds)
  rows = [('', 'single', 'together, or simulated', 'ratio (quartiles)')]
  ratios = {}
  for name, pairs in {'trainings an hour': hours, 'images/s': rates, **simulated}.items():
    over = sorted(b / a for a, b in pairs)
    medians = [statistics.median(column) for column in zip(*pairs)]
    low, high = np.quantile(over, (0.25, 0.75))
    text = f'{statistics.median(over):.2f} ({low:.2f} to {high:.2f})'
    rows.append((name, *(f'{m:,.0f}' for m in medians), text))
    key = name.partition(':')[0].replace('/', '_').replace(' ', '_')
    ratios[f'ensemble_{key}'] = statistics.median(over)
  _common.show(f'{flags.members} trainings of {flags.steps} steps, {flags.config}', rows, ratios)


if __name__ == '__main__':
  main()
