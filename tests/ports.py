"""The ports at which processes listen, and those that docs/security.md names."""

import collections
import re
import subprocess

from tests import launching

# How many ports each row of the table means for two processes on CPUs, rank by
# rank.
_OPENED_BY = {'rank 0': (1, 0), 'every rank': (1, 1), 'every rank but 0': (0, 1)}


def listening(processes) -> list[list[str]]:
  """The addresses at which each process listens, as `ss` shows them."""
  output = subprocess.check_output(['ss', '-ltnp'], text=True)
  addresses = collections.defaultdict(list)
  for line in output.splitlines()[1:]:
    for pid in set(re.findall(r'pid=(\d+)', line)):
      addresses[int(pid)].append(line.split()[3].rsplit(':', 1)[0])
  return [addresses[p.pid] for p in processes]


def assert_those_of_sync(processes, elastic=False) -> None:
  """Two processes of `sync` on CPUs listen at the table's ports and no others."""
  rows = [
    row
    for row in _table()
    if '`sync`' in row[1]
    and 'GPU' not in row[1]
    or row[1].startswith('all')
    or (elastic and row[1] == 'elastic runs')
  ]
  assert len(rows) == (5 if elastic else 3)
  counts = [sum(_OPENED_BY[row[2]][rank] for row in rows) for rank in (0, 1)]
  addresses = listening(processes)
  assert [len(a) for a in addresses] == counts, addresses
  # The coordinator's name is a loopback one, so it and JAX are bound to that.
  assert sum('127.0.0.1' in address for address in addresses[0]) >= 2, addresses


def _table():
  """Rows of the table under "Ports": (port, strategies, opened by, ...)."""
  text = (launching.ROOT / 'docs/security.md').read_text()
  section = text.split('## Ports')[1].split('\n## ')[0]
  lines = [line for line in section.splitlines() if line.startswith('|')]
  return [[cell.strip() for cell in line.split('|')[1:-1]] for line in lines[2:]]
