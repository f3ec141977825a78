"""What a run's devices send to each other in a step.

The asynchronous strategy counts what it sends and records it. What the others
send is in their compiled program, from which it is counted here; an exchange
that they do not make at each step counts as if they did.
"""

import json
import subprocess
import sys

from scripts.study import grid
from scripts.study import runner

# In the ring of W devices that sums, all but a W-th part of the array leaves
# each device twice; in any other collective, once.
_TWICE = ('all-reduce',)


def megabytes(study: runner.Study, cell: grid.Cell) -> float | None:
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
    [sys.executable, '-m', 'scripts.portability', f'--config={study.spec}',
     f'--target=cpu:{cell.workers}', *study.overridden(cell)],
    capture_output=True, text=True, check=False,
  )  # fmt: skip
  last = (done.stdout.splitlines() or ['{}'])[-1]
  found = json.loads(last).get('targets', {}).get(f'cpu:{cell.workers}', {})
  rows = found.get('train', {}).get('compiled')
  return None if rows is None else sent(rows, cell.workers)


def sent(rows: list[dict], devices: int) -> float:
  """MB of the collectives of a program, from `collectives.totals`."""
  size = sum(r['bytes'] * (1 + (r['kind'] in _TWICE)) for r in rows)
  return size * (devices - 1) / 1e6
