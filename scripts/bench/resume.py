"""Whether a run that is resumed ends with the bytes of one that was not.

  python -m scripts.bench.resume [--config=FILE:VARIANT] [--steps=8] [--config.KEY=VALUE ...]

trains that many steps at once, and half of them and then the others in another
process, on noise with a constant learning rate, and compares every array of the
last checkpoints.
"""

import argparse
import os
import sys
import tempfile

from anp_jax.config import command_line
from scripts.bench import _common

_KEYS = {
  'batch_size': '64',
  'data.source': 'synthetic',
  'data.synthetic_examples': '256',
  'eval.examples': 'False',
  'log.tensorboard': 'False',
  'schedule.name': 'constant',
  'schedule.warmup': '0 steps',
}


def main():
  """Trains the runs and compares them; status 1 if an array differs."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
  parser.add_argument('--config', default='configs/resnet_anp.py:modern', help='FILE[:VARIANT]')
  parser.add_argument('--steps', type=int, default=8)
  flags, keys = parser.parse_known_args()
  typed = [f'--config={flags.config}', *command_line.typed(_KEYS), *keys]
  with tempfile.TemporaryDirectory() as folder:
    # The first run fills the compilation cache, if it is empty, for all of them.
    runs = ('once', flags.steps), ('resumed', flags.steps // 2), ('resumed', flags.steps)
    for name, steps in runs:
      _common.train(*typed, f'--workdir={folder}/{name}', f'--config.duration={steps} steps')
    # What is left is read on the host.
    os.environ['JAX_PLATFORMS'] = 'cpu'
    from anp_jax.tools.trials import replay

    runs = (f'{folder}/{name}' for name in ('once', 'resumed'))
    (_, once), (_, resumed) = map(replay.newest_arrays, runs)
  differing = [p for p, x in once.items() if x.tobytes() != resumed[p].tobytes()]
  print(*differing, sep='\n', file=sys.stderr)
  rows = [('arrays', 'that differ'), (len(once), len(differing))]
  ratios = {'resume_arrays': len(once), 'resume_arrays_that_differ': len(differing)}
  _common.show(f'{flags.steps} steps at once and resumed', rows, ratios)
  sys.exit(bool(differing))


if __name__ == '__main__':
  main()
