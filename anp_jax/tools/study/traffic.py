"""The bytes that a run's devices send to each other in a step.

The asynchronous strategy records the bytes that it sends. Those of the others are
counted here, from their compiled program.
"""

import json
import subprocess
import sys

from anp_jax.config import strategy as strategy_lib
from anp_jax.tools.study import grid, study_runner

# In a ring of W devices, (W - 1) / W of the array leaves each device: twice in a
# sum, once in any other collective but a permutation.
_TWICE = ('all-reduce',)


def megabytes(study: study_runner.Study, cell: grid.Cell) -> float | None:
  """Returns the MB (1e6 bytes) that all devices send in a training step.

  Returns None if the step does not compile for as many CPU devices. The cell's seed does not
  matter.
  """
  if cell.workers == 1:
    return 0.0
  target = f'cpu:{cell.workers}'
  command = [sys.executable, '-m', 'anp_jax.tools.portability', f'--config={study.spec}']
  command += [f'--target={target}', *study.overridden(cell)]
  done = subprocess.run(command, capture_output=True, text=True, check=False)
  last = (done.stdout.splitlines() or ['{}'])[-1]
  report = json.loads(last).get('targets', {}).get(target, {})
  rows = report.get('train', {}).get('compiled')
  if rows is None:
    return None
  config = study.config(cell)
  strategy = strategy_lib.find(config)
  share = strategy.exchange_share(config, report['train']['images'], report['examples'])
  return sent(rows, cell.workers, strategy.groups(config, cell.workers), share)


def sent(rows: list[dict], devices: int, groups: int = 1, exchanges: float = 0.0) -> float:
  """Returns the MB (1e6 bytes) of a program's collectives in a mean step.

  Args:
    rows: sums from `compiled_collectives.totals`.
    devices: devices of the program.
    groups: groups of devices; conditional collectives travel between groups, all others within
      each.
    exchanges: share of the steps that take the branch.
  """
  group_devices = devices // groups
  # Sums of (devices of a ring - 1) over all rings.
  within, between = (groups * (group_devices - 1), group_devices * (groups - 1) * exchanges)
  size = 0.0
  for r in rows:
    rings = between if r['conditional'] else within
    if r['permuted']:
      size += r['permuted'] * (exchanges if r['conditional'] else 1)
    else:
      size += rings * r['bytes'] * (2 if r['kind'] in _TWICE else 1)
  return size / 1e6
