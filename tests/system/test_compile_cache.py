"""Tests of compile_cache: hits in a second process, a bound on the size."""

import ctypes
import errno
import os
import pathlib
import sys
from unittest import mock

import jax
from jax._src import compiler, distributed
from jax.experimental.compilation_cache import compilation_cache
import jax.numpy as jnp
import numpy as np
import pytest

from anp_jax.system import compile_cache
from tests import launching

# What a process does that compiles: it prints whether the program was there.
_PROGRAM = """
from tests import builders
from tests.system import test_compile_cache as test
test.compile_cache.enable(builders.config())
print(test.is_read(1))
"""
_events = []
jax.monitoring.register_event_listener(
  lambda event, **_: _events.append(event) if event.endswith('cache_hits') else None
)


def is_read(number):
  """Compiles one of several programs; returns whether it was kept."""
  # They took 75 ms on one machine, less than is worth keeping.
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)

  @jax.jit
  def compute(x):
    for i in range(8):
      x = jnp.sin(x @ x + i) + jnp.sort(x, axis=0) * number
    return x

  before = len(_events)
  # NumPy's: jnp.ones would be a second program.
  compute(np.ones((64, 64), np.float32))
  return len(_events) > before


@pytest.fixture(scope='module', autouse=True)
def quick_compiles():
  """Programs take their time to compile."""


@pytest.fixture
def restored():
  """JAX's settings of the cache, as they were before a test."""
  names = [n for n in jax.config.values if 'compilation_cache' in n or 'persistent_cache' in n]
  before = {name: jax.config.values[name] for name in names}
  compilation_cache.reset_cache()  # JAX looks once for a folder
  yield
  for name, value in before.items():
    jax.config.update(name, value)
  compilation_cache.reset_cache()


@pytest.mark.slow
def test_second_process_hits(tmp_path):
  outputs = [
    launching.python('-c', _PROGRAM, JAX_COMPILATION_CACHE_DIR=str(tmp_path)) for _ in range(2)
  ]
  assert [done.returncode for done in outputs] == [0, 0]
  assert [done.stdout for done in outputs] == ['False\n', 'True\n']
  assert 'compilation cache' not in ''.join(done.stderr for done in outputs)
  assert list(tmp_path.glob('anp_jax/*/*-cache'))


@pytest.mark.usefixtures('restored')
def test_a_process_that_is_not_the_first_keeps_what_it_compiles(tmp_path, config, monkeypatch):
  monkeypatch.setattr(compiler, 'distributed', distributed)
  monkeypatch.setattr(distributed.global_state, 'process_id', 1)
  config.compile_cache.dir = str(tmp_path)
  compile_cache.enable(config)
  is_read(8)
  assert list(tmp_path.glob('*-cache'))


@pytest.mark.usefixtures('restored')
def test_folder_shared_with_another_program(tmp_path, config, monkeypatch):
  """Whose entries have no time stamps, since it sets no bound."""
  monkeypatch.setenv('JAX_COMPILATION_CACHE_DIR', str(tmp_path))
  jax.config.update('jax_compilation_cache_dir', str(tmp_path))
  is_read(7)
  assert list(tmp_path.glob('*-cache'))
  compilation_cache.reset_cache()
  compile_cache.enable(config)
  assert not is_read(1)
  assert is_read(1)
  assert not is_read(2)  # another program is not a hit


@pytest.mark.usefixtures('restored')
def test_size_stays_below_the_bound(tmp_path, config):
  config.compile_cache.dir = str(tmp_path)
  limit = 30_000
  config.compile_cache.max_gigabytes = limit / 2**30
  compile_cache.enable(config)
  sizes = []
  for number in range(3):
    is_read(number)
    sizes.append(sum(p.stat().st_size for p in tmp_path.rglob('*') if p.is_file()))
  # Three do not fit; time stamps and the lock are not counted.
  assert 3 * sizes[0] > 1.1 * limit >= max(sizes)


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
  # What a GPU has found out by trying its kernels is kept there, too.
  options = compiler.get_compile_options(1, 1)
  debug_options = options.executable_build_options.debug_options  # within `options`
  folder = pathlib.Path(debug_options.xla_gpu_per_fusion_autotune_cache_dir)
  assert folder.parent == tmp_path / 'mine'
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
def test_an_address_of_a_store_is_no_folder(tmp_path, config, monkeypatch, caplog):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv('JAX_COMPILATION_CACHE_DIR', 'gs://bucket/programs')
  config.compile_cache.dir = 'auto'
  assert compile_cache.enable(config) == ''
  assert 'expected a folder of this machine' in caplog.text
  assert os.listdir(tmp_path) == []


@pytest.mark.usefixtures('restored')
def test_a_folder_that_exists_but_is_read_only(tmp_path, config, monkeypatch):
  config.compile_cache.dir = str(tmp_path)
  refuse = mock.Mock(side_effect=OSError(errno.EROFS, 'Read-only file system'))
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
