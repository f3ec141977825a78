"""What a run's devices send to each other in a step.

The asynchronous strategy counts what it sends and records it. What the others
send is in their compiled program, from which it is counted here.
"""

import json
import subprocess
import sys

from anp_jax.config import strategy as strategy_lib
from anp_jax.tools.study import grid, study_runner

# In the ring of W devices that sums, all but a W-th part of the array leaves
# each device twice; in any other collective, once.
_TWICE = ('all-reduce',)


def megabytes(study: study_runner.Study, cell: grid.Cell) -> float | None:
  """That all devices together send in a training step, in MB (1e6 bytes).

  Args:
    study: the study.
    cell: of it; its seed does not matter.

  Returns:
    None where the step does not compile for as many CPU devices.
  """
  if cell.workers == 1:
    return 0.0
  done = subprocess.run(
    [
      sys.executable,
      '-m',
      'anp_jax.tools.portability',
      f'--config={study.spec}',
      f'--target=cpu:{cell.workers}',
      *study.overridden(cell),
    ],
    capture_output=True,
    text=True,
    check=False,
  )
  last = (done.stdout.splitlines() or ['{}'])[-1]
  report = json.loads(last).get('targets', {}).get(f'cpu:{cell.workers}', {})
  rows = report.get('train', {}).get('compiled')
  if rows is None:
    return None
  config = study.config(cell)
  strategy = strategy_lib.find(config)
  share = strategy.exchange_share(config, report['train']['images'], report['examples'])
  return sent(rows, cell.workers, strategy.groups(config, cell.workers), share)


def sent(rows: list[dict], devices: int, groups: int = 1, exchanges: float = 0.0) -> float:
  """MB (1e6 bytes) of a program's collectives, a step's mean.

  Args:
    rows: from `compiled_collectives.totals`.
    devices: of the program.
    groups: that they form; what is in a branch travels between groups, all
      else within each.
    exchanges: share of the steps that take the branch.
  """
  group_devices = devices // groups
  # Sums of (devices of a ring - 1) over all rings.
  within, between = (groups * (group_devices - 1), group_devices * (groups - 1) * exchanges)
  size = 0.0
  for r in rows:
    rings = between if r['conditional'] else within
    size += rings * r['bytes'] * (2 if r['kind'] in _TWICE else 1)
  return size / 1e6
