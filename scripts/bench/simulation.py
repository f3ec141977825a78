"""What a gradient of a simulated worker costs over a step of `sync`.

  python scripts/bench/simulation.py --batches=16,64

Runs of main.py take turns: `parameter_server` with simulated workers
(`strategy.simulate`), and `sync` with as many steps of one worker's batch. The
start, the evaluation, the save and the first tenth of a run do not count.
"""

import argparse
import os
import subprocess
import sys
import tempfile

# With -m the repository's root is on the path, as a file this folder is.
if __package__:
  from scripts.bench import _common, _contest
else:
  import _common
  import _contest

from anp_jax.reporting import telemetry

_ROOT = os.path.join(os.path.dirname(__file__), '..', '..')
_GOAL = -1.1  # not to be exceeded
_LINES = 10  # of a run's log


def main():
  """Prints the table."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--config', default='configs/lenet.py')
  parser.add_argument('--batches', type=_common.counts, default=(16, 64))
  parser.add_argument('--workers', type=int, default=16)
  parser.add_argument('--steps', type=int, default=600, help='of a run')
  parser.add_argument('--rounds', type=int, default=5)
  flags = parser.parse_args()
  for name, least in (('steps', 2 * _LINES), ('rounds', 1), ('workers', 1)):
    if getattr(flags, name) < least:
      parser.error(f'--{name}={getattr(flags, name)}: expected {least} or more')
  rows, ratios = [('images a gradient', *_contest.HEADING)], {}
  for batch in flags.batches:
    seconds = {'sync': [], 'simulated': []}
    for turn in _contest.rounds(list(seconds), flags.rounds):
      for name in turn:
        seconds[name].append(_seconds(flags, batch, name))
    cost = _contest.over(seconds['sync'], seconds['simulated'])
    rows.append(_contest.row(str(batch), cost, _GOAL))
    name, (low, high) = f'{batch}_simulated_over_sync', cost.quartiles
    ratios |= {name: cost.median, f'{name}_low': low, f'{name}_high': high}
  _common.show('seconds of a gradient over those of a step', rows, ratios)


def _seconds(flags, batch, name):
  """Seconds of a step, or of a gradient."""
  keys = {
    'batch_size': batch,
    'duration': f'{flags.steps} steps',
    'log.every': f'{flags.steps // _LINES} steps',
    'log.tensorboard': False,
    'eval.every': f'{flags.steps} steps',
    'eval.examples': False,
    'checkpoint.every': f'{flags.steps} steps',
    'checkpoint.keep_best': 0,
    'optimizer.learning_rate': 1e-4,  # small enough for any staleness
    'strategy.name': 'sync',
  }
  if name == 'simulated':
    keys |= {
      'strategy.name': 'parameter_server',
      'strategy.simulate.workers': flags.workers,
      'strategy.simulate.spread': 0.1,
    }
  with tempfile.TemporaryDirectory() as workdir:
    done = subprocess.run(
      [
        sys.executable,
        'main.py',
        f'--config={flags.config}',
        f'--workdir={workdir}',
        *(f'--config.{k}={v}' for k, v in keys.items()),
      ],
      cwd=_ROOT,
      stdout=subprocess.DEVNULL,
      stderr=subprocess.PIPE,
      text=True,
      check=False,
    )
    if done.returncode:
      sys.exit(done.stderr.strip().splitlines()[-1])
    lines = [r for r in telemetry.read(workdir) if r['kind'] == 'train'][1:]
  return _common.median([batch / r['images_per_second'] for r in lines])


if __name__ == '__main__':
  main()
