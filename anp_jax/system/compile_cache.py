"""The persistent cache of compiled programs, which makes a second start quick."""

from collections.abc import Iterator
import contextlib
import ctypes
import hashlib
import os
import platform
import sys
import tempfile
import types
from typing import Any

from absl import logging
import jax
from jax.experimental.compilation_cache import compilation_cache
import ml_collections

from anp_jax import config as config_lib
from anp_jax.config import urls
from anp_jax.system import cores


def enable(config: ml_collections.ConfigDict) -> str:
  """Turns JAX's persistent compilation cache on, with a bound on its size.

  Args:
    config: config; compile_cache.dir '' leaves the cache off.

  Returns:
    Folder in use; '' without a cache, also where no folder can be written to, as on
    a node whose home is read-only.
  """
  folder = config.compile_cache.dir
  if folder == 'auto':
    # A folder of our own inside the shared one: entries that a program without
    # a bound wrote have no time stamps, and JAX then stores nothing more.
    shared = os.environ.get('JAX_COMPILATION_CACHE_DIR')
    root = (
      os.path.join(shared, 'anp_jax') if shared else os.path.join(config_lib.cache_dir(), 'xla')
    )
    folder = os.path.join(root, _machine())
  folder = os.path.expanduser(folder)
  problem = _problem(folder) if folder else ''
  if problem:
    logging.warning(
      'compiled programs are not kept: %s: %s; config.compile_cache.dir names another folder',
      folder,
      problem,
    )
  if problem or not folder:
    jax.config.update('jax_enable_compilation_cache', False)
    return ''
  settings = {
    'jax_compilation_cache_dir': folder,
    'jax_compilation_cache_max_size': int(config.compile_cache.max_gigabytes * 2**30),
    # Below this a compile is quicker than the file it would be read from.
    'jax_persistent_cache_min_compile_time_secs': 0.1,
    'jax_persistent_cache_min_entry_size_bytes': -1,
  }
  for name, value in settings.items():
    jax.config.update(name, value)
  _write_on_every_process()
  return folder


def _write_on_every_process():
  """Keeps what this process compiles, whatever its rank.

  JAX lets process 0 write the cache, for all. But on CPUs the key of a program
  depends on the rank: the other processes found nothing and compiled at each start.
  """
  # There is no public name for it; a JAX without this one compiles again.
  compiler: Any = sys.modules.get('jax._src.compiler')
  state = getattr(getattr(compiler, 'distributed', None), 'global_state', None)
  if getattr(state, 'process_id', 0) and jax.default_backend() == 'cpu':
    first = types.SimpleNamespace(process_id=0, client=None)
    compiler.distributed = types.SimpleNamespace(global_state=first)


def _problem(folder):
  """Why a folder, which is created if missing, cannot be written to; or ''."""
  if urls.scheme(folder):
    return 'expected a folder of this machine'
  try:
    os.makedirs(folder, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):  # a read-only file system, say
      return ''
  except OSError as e:
    return e.strerror or str(e)


@contextlib.contextmanager
def disabled() -> Iterator[None]:
  """Yields a context in which every program is compiled and none is cached."""
  before = jax.config.jax_enable_compilation_cache
  jax.config.update('jax_enable_compilation_cache', False)
  compilation_cache.reset_cache()  # JAX looks once whether there is one
  try:
    yield
  finally:
    jax.config.update('jax_enable_compilation_cache', before)
    compilation_cache.reset_cache()


def quick_compile_options() -> dict[str, int]:
  """Returns XLA's options for programs that draw random numbers, which compile slowly.

  On a CPU the passes of LLVM above level 1 take most of the time: of 21 s of
  processor time for the weights of four convolutions 2 s remain without them, of
  5 s for 32 random images of 224 px 1.3 s. Bits are the same, and these images
  are drawn no slower (2 cores of an AMD EPYC with AVX2).
  """
  return {'xla_backend_optimization_level': 1} if jax.default_backend() == 'cpu' else {}


def release_memory() -> None:
  """Returns the memory that a compilation has freed to the system.

  glibc keeps it for the threads that compiled: 1 GB after a ResNet-50.
  """
  trim = getattr(ctypes.CDLL(None), 'malloc_trim', None)
  if trim:
    trim(0)


def _machine() -> str:
  """Names this kind of processor.

  On a home directory that unlike nodes share, a program compiled for one
  processor may stop another with an illegal instruction.
  """
  # ARM's name for them is another.
  flags = cores.cpu_line('flags') or cores.cpu_line('Features') or platform.processor()
  digest = hashlib.sha256(flags.encode()).hexdigest()[:8]
  return f'{platform.machine()}-{digest}'
