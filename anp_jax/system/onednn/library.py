"""Finds, checks and opens oneDNN's shared library, once per process.

It is that of the package onednn-cpu-gomp (the extra `onednn`; `make setup` installs
it), in the one version whose results the tests compare. $ANP_ONEDNN=off leaves it out.
"""

import functools
import importlib.metadata
import os
import platform

from anp_jax.system import cores
from anp_jax.system.onednn import c_api

VARIABLE = 'ANP_ONEDNN'
PACKAGE = 'onednn-cpu-gomp'
_INSTALL = f'pip install {PACKAGE}==2023.2.0'
_FILE = 'libdnnl.so.3'
_VERSION = '3.2.0'  # of the library in that package
_WIDE = 'AVX512', 'AVX10'


class Library:
  """An open library.

  Attributes:
    api: C interface of the library.
    version: version, such as '3.2.0'.
    isa: instruction set in use, such as 'AVX512_CORE_BF16'.
  """

  def __init__(self, path: str):
    """Opens and checks a library.

    Raises:
      OSError: if it cannot be opened.
      OneDnnError: if it cannot be used here.
    """
    self.api = c_api.Api(path)
    self.version = '.'.join(map(str, self.api.version))
    self.isa = self.api.isa()
    if self.version != _VERSION:
      raise c_api.OneDnnError(f'{path} is oneDNN {self.version}, expected {_VERSION}: {_INSTALL}')
    openmp = self.api.functions
    self.api.use_threads(1)
    self._most_threads = openmp.omp_get_thread_limit()
    if openmp.omp_get_max_active_levels() < 1:
      self._most_threads = 1
    self._threads = 1
    self.threads = cores.count()
    if not any(name in self.isa for name in ('AVX2', *_WIDE)):
      raise c_api.OneDnnError(f'oneDNN uses {self.isa} here, and was tried from AVX2 on')

  @property
  def is_wide(self) -> bool:
    """Whether the library computes with vectors of 512 bits."""
    return any(name in self.isa for name in _WIDE)

  @property
  def dtypes(self) -> tuple[str, ...]:
    """The dtypes in which the library is faster than XLA on this CPU."""
    # Below, oneDNN computes bfloat16 as float32 with a rounding after it.
    has_bfloat16 = any(n in self.isa for n in ('BF16', 'FP16', 'AMX', 'AVX10'))
    return ('float32', 'bfloat16') if has_bfloat16 else ('float32',)

  @property
  def threads(self) -> int:
    """The number of threads per operation, on which the bits depend."""
    return self._threads

  @threads.setter
  def threads(self, count: int) -> None:
    # oneDNN leaves out what the threads were to do that OpenMP does not give.
    self._threads = max(1, min(count, self._most_threads))

  def describe(self) -> str:
    """Returns version, instruction set and threads for the log."""
    threads = f'{self.threads} thread' + 's' * (self.threads > 1)
    return f'oneDNN {self.version}, {self.isa}, {threads}'


def find() -> Library | None:
  """Returns the open library, always the same; None if none can be used."""
  return _found()[0]


def missing_reason() -> str:
  """Returns why `find` returns None; '' where none is expected or one is open."""
  return _found()[1]


def opened() -> Library:
  """Returns the library of `find`.

  Raises:
    OneDnnError: if there is none, as when a cached program calls it.
  """
  result, reason = _found()
  if result is None:
    raise c_api.OneDnnError(reason or 'oneDNN is switched off')
  return result


@functools.cache
def _found():
  named = os.environ.get(VARIABLE, '').strip()
  # Other systems were not tried.
  if named == 'off' or (platform.system(), platform.machine()) != ('Linux', 'x86_64'):
    return None, ''
  if named:
    return None, f'{VARIABLE}={named}: expected off; only the library of {PACKAGE} is used'
  path = _packaged()
  if not path:
    return None, f'no oneDNN here; for faster steps: {_INSTALL}'
  if binding := _binding():
    return None, f'{binding} is set, by which OpenMP would bind the threads of XLA too; no oneDNN'
  # A waiting thread of OpenMP spins by default, on a core that XLA needs.
  # libgomp reads this when it is loaded.
  os.environ.setdefault('OMP_WAIT_POLICY', 'passive')
  try:
    return Library(path), ''
  except (OSError, c_api.OneDnnError) as e:
    return None, str(e).partition('\n')[0]


def _binding():
  """The name of a variable by which OpenMP binds threads to cores; or ''."""
  binding = os.environ.get('OMP_PROC_BIND')
  if binding is None:
    names = 'OMP_PLACES', 'GOMP_CPU_AFFINITY'
    return next((name for name in names if os.environ.get(name)), '')
  return 'OMP_PROC_BIND' if binding.strip().lower() not in ('', 'false') else ''


def _packaged():
  """The path of the package's library; '' if it is not installed."""
  try:
    listed = importlib.metadata.files(PACKAGE) or ()
  except importlib.metadata.PackageNotFoundError:
    return ''
  paths = [os.path.realpath(f.locate()) for f in listed if f.name == _FILE]
  return next(filter(os.path.exists, paths), '')
