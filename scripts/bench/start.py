"""Time from the typed command to the first finished step.

  python -m scripts.bench.start [--recipes=:demo,:modern] [--repeats=3] [--config.KEY=VALUE ...]

Each start is a process of its own, timed from outside. `cold` has an empty
compilation cache and no data set; `no set`, where a set was built, has a warm
cache; `warm` has both, and is the fastest of the repeats.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time

from scripts.bench import _common


def _start(recipe, folder, keys):
  """Seconds to the first step's line, and the run's own account of them."""
  recipe = f'configs/resnet_anp.py{recipe}'
  command = [sys.executable, '-u', 'main.py', f'--config={recipe}', f'--workdir={folder}/run']
  command += ['--config.duration=1 epochs', '--config.schedule.warmup=0 steps', *keys]
  folders = {'ANP_DATA': f'{folder}/data', 'JAX_COMPILATION_CACHE_DIR': f'{folder}/cache'}
  start = time.monotonic()
  process = subprocess.Popen(
    command, cwd=_common.ROOT, env=os.environ | folders, text=True, stdout=subprocess.PIPE
  )
  account = next((x for x in process.stdout if x.startswith('first step after')), '')
  seconds = time.monotonic() - start
  process.kill()
  process.wait()
  shutil.rmtree(f'{folder}/run', ignore_errors=True)
  if not account:
    sys.exit(f'error: {" ".join(command)} ended before its first step')
  return seconds, account.split(': ', 1)[1].strip()


def main():
  """Times the starts of the recipes."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
  parser.add_argument('--recipes', default=':demo,', help='variants of configs/resnet_anp.py')
  parser.add_argument('--repeats', type=int, default=3, help='warm starts')
  flags, keys = parser.parse_known_args()
  rows = [('start', 'seconds', 'where it goes (s)')]
  ratios = {}
  for recipe in flags.recipes.split(','):
    name, seconds = recipe.strip(':') or 'resnet50', {}
    with tempfile.TemporaryDirectory() as folder:
      seconds['cold'] = _start(recipe, folder, keys)
      if os.path.isdir(f'{folder}/data'):
        shutil.rmtree(f'{folder}/data')
        seconds['no set'] = _start(recipe, folder, keys)
      seconds['warm'] = min(_start(recipe, folder, keys) for _ in range(flags.repeats))
    for state, (total, account) in seconds.items():
      rows.append((f'{name}, {state}', f'{total:.1f}', account))
      ratios[f'{name}_{state.replace(" ", "_")}_seconds'] = total
  _common.show('typed command to first finished step', rows, ratios)


if __name__ == '__main__':
  main()
