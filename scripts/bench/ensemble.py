"""Trainings an hour of an ensemble, over the same trainings one after another.

  python -m scripts.bench.ensemble [--config=FILE[:VARIANT]] [--members=8] [--steps=300]
    [--rounds=3] [--config.KEY=VALUE ...]

trains on noise of the recipe's size. `trainings an hour` counts whole commands, starts
included; a single one is timed once a round. `images/s` is what their metrics.jsonl
say of the steps alone, the median, summed over members.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np

from scripts.bench import _common

_EXAMPLES, _CLASSES = 4096, 10
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
  rows = [('', 'one after another', 'ensemble', 'ratio (lowest to highest)')]
  ratios = {}
  for name, pairs in ('trainings an hour', hours), ('images/s', rates):
    over = sorted(b / a for a, b in pairs)
    medians = [statistics.median(column) for column in zip(*pairs)]
    text = f'{statistics.median(over):.2f} ({over[0]:.2f} to {over[-1]:.2f})'
    rows.append((name, *(f'{m:,.0f}' for m in medians), text))
    ratios[f'ensemble_{name.split()[0].replace("/", "_")}'] = statistics.median(over)
  _common.show(f'{flags.members} trainings of {flags.steps} steps, {flags.config}', rows, ratios)


if __name__ == '__main__':
  main()
