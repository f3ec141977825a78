"""Ctrl-C at any moment: one line, status 130."""

import os
import re
import signal
import subprocess
import time

import pytest

from tests import builders, launching

_RECIPE = 'configs/resnet_anp.py:tiny'
_TINY = f'--config={_RECIPE}'
_INTERRUPTS = int(os.environ.get('ANP_INTERRUPTS', 1))  # of each command
_SPAN = 10.0  # seconds after a command was typed
_LINE = '\ninterrupted\n'


_HEAD = 'from anp_jax.system import interrupts\ninterrupts.install()\n'


def _interrupted(program, *lines):
  """How a program ends, and what it prints, that is interrupted after each line.

  Args:
    program: lines after `install`.
    *lines: that it prints and flushes.
  """
  with launching.start('-c', _HEAD + program) as process:
    for line in lines:
      process.hears(line)
      process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
  return process.returncode, out, err


# Within a callback of the garbage collector an exception would be dropped.
_SWALLOWS = """
import time
class Callback:
  def __del__(self):
    print('ready', flush=True)
    time.sleep(30)
Callback()
"""
_COMPUTES = """
import hashlib
interrupts.listen()
print('ready', flush=True)
hashlib.pbkdf2_hmac('sha256', b'a', b'b', 100_000_000)
"""
_TELLS = """
import signal
import sys
import time
interrupts.listen()
interrupts.set_line('the line')
interrupts.before_leaving(lambda: 1 / 0)
interrupts.before_leaving(lambda: print('told', file=sys.stderr))
print('printed')
signal.raise_signal(signal.SIGINT)
time.sleep(30)
"""
# Telling the other processes may take its time.
_TELLS_FOR_LONG = """
import time
interrupts.listen()
def tell():
  print('telling', flush=True)
  time.sleep(600)
interrupts.before_leaving(tell)
print('ready', flush=True)
time.sleep(600)
"""
# As a shell's background process does.
_IGNORES = """
import signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.raise_signal(signal.SIGINT)
interrupts.install()
interrupts.listen()
signal.raise_signal(signal.SIGINT)
print('here')
"""
# Python's own end has no handler any more.
_ENDS = """
import atexit
import sys
class Slow:
  def __del__(self):
    print('taken to pieces')
sys.slow = Slow()
atexit.register(print, 'exit handler')
interrupts.exit(3)
"""


@pytest.mark.parametrize(
  'program, lines, end',
  [
    (_SWALLOWS, ['ready'], (130, '', _LINE)),
    ('interrupts.listen()\n' + _SWALLOWS, ['ready'], (130, '', _LINE)),
    (_COMPUTES, ['ready'], (130, '', _LINE)),
    (_TELLS, [], (130, 'printed\n', 'told\n\nthe line\n')),
    (_TELLS_FOR_LONG, ['ready', 'telling'], (130, '', _LINE)),
    (_IGNORES, [], (0, 'here\n', '')),
    (_ENDS, [], (3, 'exit handler\n', '')),
  ],
  ids='swallows listens computes tells tells_for_long ignores ends'.split(),
)
def test_an_interrupted_program_ends_at_once(program, lines, end):
  """After each of the lines that it prints it is interrupted."""
  assert _interrupted(program, *lines) == end


def test_a_reader_that_does_not_read_holds_nothing_up():
  program = "interrupts.listen()\nprint('ready', flush=True)\nprint('x' * 1_000_000)\n"
  with launching.start('-c', _HEAD + program) as process:
    process.hears('ready')
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130  # its output is not read
    assert process.stderr.read() == _LINE


def test_no_signal_is_lost_while_the_process_starts_anew(tmp_path):
  """It comes in the last moment before, and after the last look for one."""
  program = tmp_path / 'program.py'
  program.write_text("""
from anp_jax.system import interrupts
interrupts.install()
import os
import signal
import time
from anp_jax.system import xla_flags
xla_flags._read = lambda path: 'always [madvise] never'

def restart(*arguments):
  os.kill(os.getpid(), signal.SIGINT)
  os.execve(*arguments)

xla_flags.use_huge_pages(os.environ, restart)
interrupts.listen()
time.sleep(20)
""")
  clean = {'GLIBC_TUNABLES': '', 'JAX_PLATFORMS': 'cpu'}
  with launching.start(program, **clean) as process:
    out, err = process.communicate(timeout=20)
  assert (process.returncode, out, err) == (130, '', _LINE)


_COMMANDS = {
  'train': ('main.py', _TINY, '--workdir={tmp}/run'),
  'predict': ('-m', 'anp_jax.predict', '--checkpoint={tmp}', '{tmp}'),
  'export': ('-m', 'anp_jax.export', '--checkpoint={tmp}', '--output={tmp}'),
  'show': ('-m', 'anp_jax.data.show', _TINY),
  'prepare': ('-m', 'anp_jax.data.prepare', '--from={tmp}', '--name=x'),
}


@pytest.mark.parametrize('name', _COMMANDS)
def test_interrupted_while_a_library_is_imported(name, tmp_path):
  """One that an exception leaves half made, as an extension written in C."""
  for library in ('jax', 'numpy'):
    (tmp_path / f'{library}.py').write_text("""
import os
import signal
import time
try:
  os.kill(os.getpid(), signal.SIGINT)
  time.sleep(20)
except BaseException:
  raise ImportError('error while initializing the extension')
""")
  command = [part.format(tmp=tmp_path) for part in _COMMANDS[name]]
  path = f'{tmp_path}{os.pathsep}{launching.ROOT}'
  with launching.start(*command, PYTHONPATH=path) as process:
    out, err = process.communicate(timeout=20)
  assert process.returncode == 130, err
  assert out == '' and err.count('\n') == 2
  assert err.startswith('\ninterrupted')


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  """A finished run, and a tree of images."""
  folder = tmp_path_factory.mktemp('interrupted')
  builders.photographs(folder / 'images', 40, 16)
  builders.train_alone(builders.load(*_keys(folder)), folder / 'run')
  return folder


def _keys(folder):
  return _RECIPE, {
    'model.name': 'lenet',
    'duration': '2 steps',
    'optimizer.learning_rate': '0.001',  # at which a longer run does not diverge
    'data.source': 'folder',
    'data.path': f'{folder}/images',
    'log.tensorboard': 'False',
    'eval.examples': 'False',
  }


def _command(name, folder, tmp):
  checkpoint, images = f'--checkpoint={folder}/run', folder / 'images'
  recipe, keys = _keys(folder)
  flags = [f'--config={recipe}', *launching.typed(keys)]
  return {
    # It is not over before it is interrupted.
    'train': ('main.py', *flags, '--config.duration=100000 steps', f'--workdir={tmp}/run'),
    'evaluate': ('main.py', '--mode=evaluate', f'--workdir={folder}/run'),
    'predict': ('-m', 'anp_jax.predict', checkpoint, *[images] * 100),
    'export': ('-m', 'anp_jax.export', checkpoint, f'--output={tmp}/out'),
    'show': ('-m', 'anp_jax.data.show', *flags, f'--output={tmp}/show'),
    'prepare': ('-m', 'anp_jax.data.prepare', f'--from={images}', '--name=x', f'--data_dir={tmp}'),
  }[name]


def _last_line(text):
  """The last line of a command, without the numbers of times and folders."""
  return re.sub(r'[\d.]+(-whole)?', '0', text.rstrip().rpartition('\n')[2])


@pytest.mark.slow
@pytest.mark.timeout(36000)
@pytest.mark.parametrize('name', ['train', 'evaluate', 'predict', 'export', 'show', 'prepare'])
def test_interrupted_at_any_moment(name, run, tmp_path):
  """ANP_INTERRUPTS of them, spread over ten seconds."""
  step = _SPAN / _INTERRUPTS
  for i in range(_INTERRUPTS):
    seconds = step * (i + 0.5)
    with launching.start(*_command(name, run, tmp_path / str(i))) as process:
      try:
        out, err = process.communicate(timeout=seconds)
      except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGINT)
      else:
        assert process.returncode == 0, err
        break  # it takes no longer than that
      start = time.monotonic()
      out, err = process.communicate(timeout=120)
    what = f'{name} after {seconds} s: {time.monotonic() - start:.1f} s\n{err}'
    text = out + err
    if seconds < 0.2 and process.returncode == -signal.SIGINT:
      continue  # Python itself had not started
    if process.returncode == 0:  # the signal came after its last line
      with launching.start(*_command(name, run, tmp_path / f'{i}-whole')) as process:
        undisturbed, err = process.communicate(timeout=120)
      assert process.returncode == 0, err
      assert _last_line(out) == _last_line(undisturbed), what
      break
    assert process.returncode == 130, what
    assert 'Traceback' not in text and 'Error' not in text, what
    # In the training loop it is saved first.
    lines = text.count('\ninterrupted'), text.count('\nSIGINT: saving')
    assert sum(lines) == 1, what
