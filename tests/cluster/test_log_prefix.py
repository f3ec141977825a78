"""Every line of a process carries its mark, up to its last words."""

import signal

import pytest

from tests import launching


def _run(program, before=''):
  program = f"""
import os, signal, subprocess, sys
from anp_jax.cluster import log_prefix
{before}
log_prefix.install('[1 node1] ')
{program}
"""
  return launching.python('-c', program, timeout=30)


def test_lines_of_python_and_of_native_code():
  done = _run("""
for number, stream in ((1, sys.stdout), (2, sys.stderr)):
  print('of Python', file=stream)
  os.write(number, b'of native code\\n\\nafter nothing\\n')
  os.system(f'echo of a child >&{number}')
  print(number, end='', file=stream)
""")
  assert done.returncode == 0
  for number, text in ((1, done.stdout), (2, done.stderr)):
    assert text.split('\n') == [
      '[1 node1] of Python',
      '[1 node1] of native code',
      '[1 node1] ',
      '[1 node1] after nothing',
      '[1 node1] of a child',
      f'[1 node1] {number}',
    ]


@pytest.mark.parametrize('end, status', [('os._exit(75)', 75), ('os.abort()', -signal.SIGABRT)])
def test_last_words_and_the_exit_status(end, status):
  done = _run(f"""
print('first')
os.write(2, b'error: last')
{end}
""")
  assert done.returncode == status
  assert done.stdout == '[1 node1] first\n'
  assert done.stderr.startswith('[1 node1] error: last')
  assert all(t.startswith('[1 node1] ') for t in done.stderr.splitlines())


def test_many_lines_stay_whole_and_in_order():
  done = _run(
    'for i in range(5000): print(i, "x" * 100)\n'
    "os.write(1, b'in any encoding: \\xff caf\\xc3\\xa9\\n')"
  )
  want = [f'[1 node1] {i} {"x" * 100}' for i in range(5000)]
  assert done.stdout.splitlines() == [*want, '[1 node1] in any encoding: \ufffd café']


def test_a_signal_to_all_does_not_lose_last_words():
  """Slurm and a terminal signal every process of a step."""
  before = """
children, popen = [], subprocess.Popen
def noted(*arguments, **values):
  children.append(popen(*arguments, **values))
  return children[-1]
subprocess.Popen = noted
"""
  done = _run(
    """
print('first')
import time
time.sleep(0.5)  # they are there
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
  for child in children:
    os.kill(child.pid, number)
print('last words')
""",
    before,
  )
  assert done.stdout == '[1 node1] first\n[1 node1] last words\n'


def test_lines_come_as_they_are_written():
  program = """
import time
from anp_jax.cluster import log_prefix
log_prefix.install('[0 a] ')
print('now')
time.sleep(60)
"""
  with launching.start('-c', program) as child:
    child.hears('[0 a] now')
    assert child.poll() is None
