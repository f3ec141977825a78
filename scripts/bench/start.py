"""Time from the typed command to the first finished step.

  python -m scripts.bench.start

Each row is a process of its own, timed from outside. `cold` has an empty
compilation cache and no data set; `no set` a warm cache; `warm` both. The peer
is the cold start of the same run.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time

from scripts.bench import _common


def _start(recipe, folder):
  """Seconds to the first step's line, and the run's own account of them."""
  command = [
    sys.executable,
    '-u',
    'main.py',
    f'--config=configs/resnet_anp.py{recipe}',
    f'--workdir={folder}/run',
    '--config.duration=1 epochs',
    '--config.schedule.warmup=0 steps',
  ]
  environment = {
    **os.environ,
    'ANP_DATA': f'{folder}/data',
    'JAX_COMPILATION_CACHE_DIR': f'{folder}/cache',
  }
  start = time.monotonic()
  process = subprocess.Popen(
    command,
    cwd=_common.ROOT,
    env=environment,
    text=True,
    stdout=subprocess.PIPE,
    stderr=subprocess.DEVNULL,
  )
  account = next(x for x in process.stdout if x.startswith('first step after'))
  seconds = time.monotonic() - start
  process.kill()
  process.wait()
  shutil.rmtree(f'{folder}/run', ignore_errors=True)
  return seconds, account.split(': ', 1)[1].strip()


def main():
  """Times the starts of the demo and of the plain recipe."""
  rows = [('start', 'seconds', 'where it goes (s)')]
  ratios = {}
  for name, recipe in (('demo', ':demo'), ('resnet50', '')):
    with tempfile.TemporaryDirectory() as folder:
      cold, cold_account = _start(recipe, folder)
      shutil.rmtree(f'{folder}/data')
      no_set, no_set_account = _start(recipe, folder)
      warm, warm_account = min(_start(recipe, folder) for _ in range(3))
    rows += [
      (f'{name}, cold', f'{cold:.1f}', cold_account),
      (f'{name}, no set', f'{no_set:.1f}', no_set_account),
      (f'{name}, warm', f'{warm:.1f}', warm_account),
    ]
    ratios[f'{name}_warm_over_cold'] = warm / cold
    ratios[f'{name}_warm_over_20_s'] = warm / 20
    ratios[f'{name}_no_set_over_40_s'] = no_set / 40
  _common.show('typed command to first finished step', rows, ratios)


if __name__ == '__main__':
  main()
