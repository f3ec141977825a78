"""Ctrl-C at any moment: one line, status 130."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import numpy as np
from PIL import Image
import pytest

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_TINY = '--config=configs/resnet_anp.py:tiny'
_INTERRUPTS = int(os.environ.get('ANP_INTERRUPTS', 2))  # of each command
_SPAN = 10.0  # seconds after a command was typed
_LINE = '\ninterrupted\n'


def _start(*arguments, **environment):
  return subprocess.Popen(
    [sys.executable, *map(str, arguments)],
    cwd=_ROOT,
    env={**os.environ, 'PYTHONPATH': str(_ROOT), **environment},
    stdin=subprocess.DEVNULL,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    start_new_session=True,  # as a terminal gives it a group of its own
  )


_HEAD = 'from anp_jax.system import interrupts\ninterrupts.install()\n'


def _interrupted(program, *lines):
  """How a program ends, and what it prints, that is interrupted after each line.

  Args:
    program: lines after `install`.
    *lines: that it prints and flushes.
  """
  with _start('-c', _HEAD + program) as process:
    try:
      for line in lines:
        assert process.stdout.readline() == f'{line}\n'
        process.send_signal(signal.SIGINT)
      out, err = process.communicate(timeout=20)
    finally:
      process.kill()
  return process.returncode, out, err


@pytest.mark.parametrize('listen', ['', 'interrupts.listen()\n'])
def test_what_swallows_an_exception_does_not_swallow_it(listen):
  status = _interrupted(
    listen
    + """
import time
class Callback:
  def __del__(self):
    print('ready', flush=True)
    time.sleep(30)
Callback()
""",
    'ready',
  )
  assert status == (130, '', _LINE)


def test_it_is_heard_while_native_code_computes():
  program = """
import hashlib
interrupts.listen()
print('ready', flush=True)
hashlib.pbkdf2_hmac('sha256', b'a', b'b', 100_000_000)
"""
  status = _interrupted(program, 'ready')
  assert status == (130, '', _LINE)


def test_what_was_printed_is_there_and_others_are_told_first():
  status = _interrupted("""
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
""")
  assert status == (130, 'printed\n', 'told\n\nthe line\n')


def test_a_second_one_does_not_wait_for_the_first():
  """Telling the other processes may take its time."""
  program = """
import time
interrupts.listen()
def tell():
  print('telling', flush=True)
  time.sleep(600)
interrupts.before_leaving(tell)
print('ready', flush=True)
time.sleep(600)
"""
  assert _interrupted(program, 'ready', 'telling') == (130, '', _LINE)


def test_a_reader_that_does_not_read_holds_nothing_up():
  program = "interrupts.listen()\nprint('ready', flush=True)\nprint('x' * 1_000_000)\n"
  with _start('-c', _HEAD + program) as process:
    try:
      assert process.stdout.readline() == 'ready\n'
      process.send_signal(signal.SIGINT)
      assert process.wait(20) == 130  # its output is not read
      assert process.stderr.read() == _LINE
    finally:
      process.kill()


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
  with _start(program, **clean) as process:
    out, err = process.communicate(timeout=20)
  assert (process.returncode, out, err) == (130, '', _LINE)


def test_a_shells_background_process_goes_on_ignoring_it():
  program = """
import signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.raise_signal(signal.SIGINT)
interrupts.install()
interrupts.listen()
signal.raise_signal(signal.SIGINT)
print('here')
"""
  assert _interrupted(program) == (0, 'here\n', '')


def test_a_command_that_is_done_ends_behind_its_exit_handlers():
  """Not in Python's own end, which has no handler any more."""
  program = """
import atexit
import sys
class Slow:
  def __del__(self):
    print('taken to pieces')
sys.slow = Slow()
atexit.register(print, 'exit handler')
interrupts.exit(3)
"""
  assert _interrupted(program) == (3, 'exit handler\n', '')


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
  path = f'{tmp_path}{os.pathsep}{_ROOT}'
  with _start(*command, PYTHONPATH=path) as process:
    out, err = process.communicate(timeout=20)
  assert process.returncode == 130, err
  assert out == '' and err.count('\n') == 2
  assert err.startswith('\ninterrupted')


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  """A finished run, and a tree of images."""
  folder = tmp_path_factory.mktemp('interrupted')
  draw = np.random.default_rng(0)
  for split, count in ('train', 40), ('validation', 16):
    for i in range(count):
      path = folder / 'images' / split / ('red_car', 'blue_sky')[i % 2]
      path.mkdir(parents=True, exist_ok=True)
      pixels = draw.integers(0, 256, (80, 90, 3), np.uint8)
      Image.fromarray(pixels).save(path / f'{i}.jpg')
  with _start(*_train(folder)) as process:
    _, err = process.communicate(timeout=300)
  assert process.returncode == 0, err
  return folder


def _train(folder):
  return (
    'main.py',
    _TINY,
    f'--workdir={folder}/run',
    '--config.data.source=folder',
    f'--config.data.path={folder}/images',
    '--config.log.tensorboard=False',
  )


def _command(name, folder, tmp):
  checkpoint, images = f'--checkpoint={folder}/run', folder / 'images'
  return {
    # It is not over before it is interrupted.
    'train': (*_train(tmp), f'--config.data.path={images}', '--config.duration=100000 steps'),
    'evaluate': ('main.py', '--mode=evaluate', f'--workdir={folder}/run'),
    'predict': ('-m', 'anp_jax.predict', checkpoint, *[images] * 100),
    'export': ('-m', 'anp_jax.export', checkpoint, f'--output={tmp}/out'),
    'show': (
      '-m',
      'anp_jax.data.show',
      *_train(folder)[1:2],
      *_train(folder)[3:],
      f'--output={tmp}/show',
    ),
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
    with _start(*_command(name, run, tmp_path / str(i))) as process:
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
      with _start(*_command(name, run, tmp_path / f'{i}-whole')) as process:
        undisturbed, err = process.communicate(timeout=120)
      assert process.returncode == 0, err
      assert _last_line(out) == _last_line(undisturbed), what
      break
    assert process.returncode == 130, what
    assert 'Traceback' not in text and 'Error' not in text, what
    # In the training loop it is saved first.
    lines = text.count('\ninterrupted'), text.count('\nSIGINT: saving')
    assert sum(lines) == 1, what
