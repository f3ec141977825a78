"""Tests of compile_cache: hits in a second process, a bound on the size."""

import ctypes
import errno
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from anp_jax.system import compile_cache

_ROOT = pathlib.Path(__file__).resolve().parents[2]

# One program that takes a while to compile; its number makes it another one.
# Its argument is NumPy's: jnp.ones would be a second program, which is kept
# where a busy machine takes long enough over it.
_PROGRAM = """
import sys
import jax
import jax.numpy as jnp
import numpy as np
from anp_jax.config import command_line
from anp_jax.system import compile_cache

hits = []
jax.monitoring.register_event_listener(
  lambda event, **_: hits.append(event) if event.endswith('cache_hits') else 0)
texts = dict(a.split('=', 1) for a in sys.argv[2:])
config = command_line.load('configs/resnet_anp.py:tiny', texts)
folder = compile_cache.enable(config)

def f(x):
  for i in range(60):
    x = jnp.sin(x @ x + i) + jnp.sort(x, axis=0) * float(sys.argv[1])
  return x

jax.block_until_ready(jax.jit(f)(np.ones((8, 8), np.float32)))
print(len(hits), folder)
"""


def _run(number, folder, *texts):
  environment = {k: v for k, v in os.environ.items() if 'COMPILATION' not in k}
  done = subprocess.run(
    [sys.executable, '-c', _PROGRAM, str(number), *texts],
    cwd=_ROOT,
    env={**environment, 'PYTHONPATH': str(_ROOT), 'JAX_COMPILATION_CACHE_DIR': str(folder)},
    capture_output=True,
    text=True,
    check=True,
  )
  assert 'compilation cache' not in done.stderr, done.stderr
  hits, _, used = done.stdout.strip().partition(' ')
  return int(hits), used


@pytest.mark.slow
def test_second_process_hits(tmp_path):
  hits, used = _run(1, tmp_path)
  assert hits == 0 and used.startswith(str(tmp_path))
  assert _run(1, tmp_path)[0] == 1
  assert _run(2, tmp_path)[0] == 0  # another program is not a hit


@pytest.mark.slow
def test_folder_shared_with_another_program(tmp_path):
  """Whose entries have no time stamps, since it sets no bound."""
  program = _PROGRAM.replace('compile_cache.enable(config)', '""')
  subprocess.run(
    [sys.executable, '-c', program, '7'],
    cwd=_ROOT,
    env={
      **os.environ,
      'PYTHONPATH': str(_ROOT),
      'JAX_COMPILATION_CACHE_DIR': str(tmp_path),
      'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
    },
    check=True,
    capture_output=True,
  )
  assert list(tmp_path.glob('*-cache'))
  _run(1, tmp_path)
  assert _run(1, tmp_path)[0] > 0


@pytest.mark.slow
def test_size_stays_below_the_bound(tmp_path):
  limit = 200_000
  for number in range(6):
    _run(number, tmp_path, f'compile_cache.max_gigabytes={limit / 2**30}')
    size = sum(p.stat().st_size for p in tmp_path.rglob('*') if p.is_file())
    assert size <= limit * 1.1  # time stamps and the lock are not counted
  assert size > 0


@pytest.mark.skipif(sys.platform != 'linux', reason='/proc, and glibc')
def test_freed_memory_goes_back_to_the_system():
  libc = ctypes.CDLL(None)
  if not hasattr(libc, 'malloc_trim'):
    pytest.skip('this C library has no malloc_trim')
  libc.malloc.restype = ctypes.c_void_p

  def resident():
    with open('/proc/self/statm') as f:
      return int(f.read().split()[1]) * os.sysconf('SC_PAGE_SIZE')

  # 200 MB in pieces too small for a mapping each; the last holds the top.
  size = 100_000
  blocks = [libc.malloc(size) for _ in range(2000)]
  for block in blocks:
    ctypes.memset(block, 1, size)
  for block in blocks[:-1]:
    libc.free(ctypes.c_void_p(block))
  before = resident()
  compile_cache.release_memory()
  assert before - resident() > 100e6
  libc.free(ctypes.c_void_p(blocks[-1]))


@pytest.fixture
def restored():
  """JAX's settings of the cache, as they were before a test."""
  names = 'enable_compilation_cache', 'compilation_cache_dir', 'compilation_cache_max_size'
  before = {f'jax_{name}': getattr(jax.config, f'jax_{name}') for name in names}
  yield
  for name, value in before.items():
    jax.config.update(name, value)


@pytest.mark.usefixtures('restored')
def test_the_folder_is_the_configs_or_one_of_the_caches(tmp_path, config, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  monkeypatch.delenv('JAX_COMPILATION_CACHE_DIR', raising=False)
  folder = compile_cache.enable(config)
  assert pathlib.Path(folder).parent == tmp_path / 'anp_jax' / 'xla'
  assert jax.config.jax_compilation_cache_dir == folder
  monkeypatch.setenv('JAX_COMPILATION_CACHE_DIR', str(tmp_path / 'shared'))
  assert pathlib.Path(compile_cache.enable(config)).parent == tmp_path / 'shared' / 'anp_jax'
  config.compile_cache.dir = str(tmp_path / 'mine')
  assert compile_cache.enable(config) == str(tmp_path / 'mine')
  config.compile_cache.dir = ''
  assert compile_cache.enable(config) == ''
  assert not jax.config.jax_enable_compilation_cache


@pytest.mark.usefixtures('restored')
@pytest.mark.parametrize('place', ['{file}/cache', '/proc/no/cache'])
def test_where_nothing_can_be_kept_a_run_goes_on(place, tmp_path, config, caplog):
  """What a read-only home is; root may write wherever there is a folder."""
  (tmp_path / 'file').write_text('')
  config.compile_cache.dir = place.format(file=tmp_path / 'file')
  with caplog.at_level('WARNING'):
    assert compile_cache.enable(config) == ''
  assert not jax.config.jax_enable_compilation_cache
  (record,) = caplog.records
  text = record.getMessage()
  assert config.compile_cache.dir in text and '\n' not in text
  assert 'config.compile_cache.dir names another folder' in text


@pytest.mark.usefixtures('restored')
def test_a_folder_that_exists_but_is_read_only(tmp_path, config, monkeypatch):
  config.compile_cache.dir = str(tmp_path)

  def refuse(dir):
    raise OSError(errno.EROFS, 'Read-only file system', dir)

  monkeypatch.setattr(compile_cache.tempfile, 'TemporaryFile', refuse)
  assert compile_cache.enable(config) == ''


def test_programs_that_compile_quickly_draw_the_same_bits():
  def draw(key):
    return jax.random.truncated_normal(key, -2, 2, (64, 9)), jax.random.bits(key, (64, 9))

  plain, quick = (
    jax.jit(draw, compiler_options=options)(jax.random.key(3))
    for options in ({}, compile_cache.quick_compile_options())
  )
  jax.tree.map(np.testing.assert_array_equal, plain, quick)
