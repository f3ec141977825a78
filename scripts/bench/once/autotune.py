"""What autotuning adds to compiling a step on a GPU, and which kernels it tries.

  python -m scripts.bench.once.autotune [--case=efficientnet_b0_gpu] [--folder=runs/autotune]

Three processes compile the step: `cold` with nothing kept, `kept` with what the first one's
autotuning found, as from a compile cache of programs that differ, and `untuned` with XLA's
defaults. FOLDER/log.txt is XLA's log of the first: each kernel that it tried, and its time.
"""

import argparse
import os
import shutil
import tempfile

from anp_jax.system import xla_flags
from scripts.bench import _cases, _common, _contest

_KEPT = 'xla_gpu_per_fusion_autotune_cache_dir'  # in the folder of JAX's compile cache


def main():
  """Prints the seconds to the first step; a line of JSON after each process."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--case', default='efficientnet_b0_gpu', choices=_cases.CASES)
  parser.add_argument('--folder', default='runs/autotune')
  flags = parser.parse_args()
  folder = os.path.abspath(flags.folder)
  os.makedirs(folder, exist_ok=True)
  settings = {
    'cold': f'--xla_gpu_dump_autotune_logs_to={folder}/log.txt',
    'kept': '',
    'untuned': '--xla_gpu_autotune_level=0',
  }
  rows, seconds = [('autotuning', 'first step (s)', 'over a later one')], {}
  with tempfile.TemporaryDirectory() as caches:
    for state, setting in settings.items():
      results, cache = os.path.join(caches, 'cold', _KEPT), os.path.join(caches, state)
      if state == 'kept' and os.path.isdir(results):  # none on a CPU
        shutil.copytree(results, os.path.join(cache, _KEPT))
      environment = {'XLA_FLAGS': f'{os.environ.get("XLA_FLAGS", "")} {setting}'.strip()}
      environment = _contest.environment(True, environment)
      arguments = ('ours', flags.case, cache, xla_flags.platform())
      worker = _contest.Worker('step', arguments, environment)
      worker.close()
      first, step = worker.ready['first'], worker.ready['step']
      rows.append((state, f'{first:.1f}', f'{first / step:.0f}'))
      seconds[f'{flags.case}_{state}_seconds'] = first
      _common.show(flags.case, rows, seconds)


if __name__ == '__main__':
  main()
