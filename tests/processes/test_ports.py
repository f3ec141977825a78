"""The ports of a running job are those that docs/security.md names."""

import collections
import re
import subprocess
import time

import pytest

from tests import launching

pytestmark = pytest.mark.multiprocess

# How many ports each row of the table means for two processes on CPUs, rank by
# rank.
_OPENED_BY = {'rank 0': (1, 0), 'every rank': (1, 1)}
_LONG = {'duration': '100000 steps', 'eval.every': '100000 steps'}


def _table():
  """Rows of the table under "Ports": (port, strategies, opened by, ...)."""
  text = (launching.ROOT / 'docs/security.md').read_text()
  section = text.split('## Ports')[1].split('\n## ')[0]
  lines = [line for line in section.splitlines() if line.startswith('|')]
  return [[cell.strip() for cell in line.split('|')[1:-1]] for line in lines[2:]]


def _listening(processes):
  """Addresses at which each process listens, as `ss` shows them."""
  output = subprocess.check_output(['ss', '-ltnp'], text=True)
  addresses = collections.defaultdict(list)
  for line in output.splitlines()[1:]:
    for pid in set(re.findall(r'pid=(\d+)', line)):
      addresses[int(pid)].append(line.split()[3].rsplit(':', 1)[0])
  return [addresses[p.pid] for p in processes]


def test_a_job_opens_the_ports_of_the_table_and_no_others(tmp_path):
  rows = [
    row
    for row in _table()
    if '`sync`' in row[1] and 'GPU' not in row[1] or row[1].startswith('all')
  ]
  assert [row[0] for row in rows] == ['coordinator', "JAX's coordination", 'gloo']
  counts = [sum(_OPENED_BY[row[2]][rank] for row in rows) for rank in (0, 1)]
  with launching.Ranks(tmp_path, 2, launching.arguments(tmp_path / 'run', **_LONG)) as ranks:
    end = time.monotonic() + 90
    # To compile the first step takes long on a busy machine.
    while not all('[Gloo] Rank' in ranks.text(i) for i in (0, 1)):
      assert time.monotonic() < end, ranks.text()
      time.sleep(0.1)
    listening = _listening(ranks.processes)
  assert [len(addresses) for addresses in listening] == counts, listening
  # The coordinator's name is a loopback one, so it and JAX are bound to that.
  bound = [a for a in listening[0] if '127.0.0.1' in a]
  assert len(bound) >= 2, listening


def test_one_process_opens_no_port(tmp_path):
  arguments = launching.arguments(tmp_path / 'run', **_LONG)
  with launching.Ranks(tmp_path, 1, arguments) as ranks:
    end = time.monotonic() + 90
    while not re.search(r'\b5/', ranks.text()):
      assert time.monotonic() < end, ranks.text()
      time.sleep(0.1)
    assert _listening(ranks.processes) == [[]]
