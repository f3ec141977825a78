"""Finds, checks and opens oneDNN's shared library, once per process.

The order of the search:
  1. $ANP_ONEDNN, the path of a file; `off` for none;
  2. the package onednn-cpu-gomp (the extra `onednn`; `make setup` installs it);
  3. libdnnl.so.3 of the system's loader, such as Debian's libdnnl3 or a module of
     the centre.
The first library that exists is used, or, if it fails its checks, none.
"""

from collections.abc import MutableMapping
import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
import sys

from anp_jax import config as config_lib
from anp_jax.system import cores, files
from anp_jax.system.onednn import c_api

VARIABLE = 'ANP_ONEDNN'
NOT_FOUND = 'no oneDNN here; for faster steps: pip install onednn-cpu-gomp==2023.2.0'
PACKAGE = 'onednn-cpu-gomp'
_ROOT = str(pathlib.Path(__file__).resolve().parents[3])
_SYSTEM_NAME = 'libdnnl.so.3'
_OLDEST = (3, 1)  # that was tried
_SELF_TEST_SECONDS = 120
# Signals by which a program's fault ends it: ILL, ABRT, BUS, FPE, SEGV. Others
# come from outside: a job that is stopped, memory that ran out.
_CRASHES = (4, 6, 7, 8, 11)
FAULTY = 3  # exit code of a self-test with wrong results


class Library:
  """An open library.

  Attributes:
    api: C interface of the library.
    path: path of the file, or name for the system's loader.
    version: version, such as '3.2.0'.
    isa: instruction set in use, such as 'AVX512_CORE_BF16'.
  """

  def __init__(self, path: str):
    """Opens and checks a library, without a self-test.

    Raises:
      OSError: if it cannot be opened.
      OneDnnError: if it cannot be used here.
    """
    self.api = c_api.Api(path)
    self.path = path
    self.version = '.'.join(map(str, self.api.version))
    self.isa = self.api.isa()
    openmp = self.api.functions  # its own, whichever that is
    try:
      self.api.use_threads(1)
      self._most_threads = openmp.omp_get_thread_limit()
      if openmp.omp_get_max_active_levels() < 1:
        self._most_threads = 1
    except AttributeError:
      raise c_api.OneDnnError(
        f'{path} is built without OpenMP, so its threads cannot be counted'
      ) from None
    self._threads = 1
    self.threads = cores.count()
    if self.api.version < _OLDEST:
      raise c_api.OneDnnError(
        f'{path} is oneDNN {self.version}, expected {".".join(map(str, _OLDEST))} or newer'
      )
    if not self.dtypes:
      raise c_api.OneDnnError(
        f'oneDNN uses {self.isa} here, and is faster than XLA from AVX-512 on'
      )

  @property
  def dtypes(self) -> tuple[str, ...]:
    """The dtypes in which the library is faster than XLA on this CPU."""
    if 'AVX512' not in self.isa and 'AVX10' not in self.isa:
      return ()
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
  path = locate()
  if not path:
    return None, ''
  if binding := _binding():
    return None, f'{binding} is set, by which OpenMP would bind the threads of XLA too; no oneDNN'
  # A waiting thread of OpenMP spins by default, on a core that XLA needs.
  # libgomp reads this when it is loaded.
  os.environ.setdefault('OMP_WAIT_POLICY', 'passive')
  try:
    library = Library(path)
    _self_test(library)
  except (OSError, c_api.OneDnnError) as e:
    is_absent = isinstance(e, OSError) and str(e).startswith(f'{_SYSTEM_NAME}: cannot open')
    return None, NOT_FOUND if is_absent else str(e).partition('\n')[0]
  return library, ''


def locate(environment: MutableMapping[str, str] = os.environ) -> str:
  """Returns the path or name of the library to open; '' for none."""
  named = environment.get(VARIABLE, '').strip()
  # Other systems were not tried.
  if named == 'off' or (platform.system(), platform.machine()) != ('Linux', 'x86_64'):
    return ''
  return named or _packaged() or _SYSTEM_NAME


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
  paths = [os.path.realpath(f.locate()) for f in listed if f.name == _SYSTEM_NAME]
  return next(filter(os.path.exists, paths), '')


def _self_test(library):
  """Compares a library's results with NumPy's, once for each library and CPU.

  A separate process does it: a library may end it with a signal.

  Raises:
    OneDnnError: if they differ.
  """
  folder = os.path.join(config_lib.cache_dir(), 'onednn')
  path = os.path.join(folder, f'{_identity(library)}.json')
  record, place = files.read_json_object(path), f' ({path})'
  if 'fault' not in record:
    fault, is_final = _run_self_test(library.path)
    record, place = {'fault': fault}, place if is_final else ''
    if is_final:
      # A cache that cannot be written costs a test of each process.
      with contextlib.suppress(OSError):
        os.makedirs(folder, exist_ok=True)
        files.write_json(path, record)
  if record['fault']:
    raise c_api.OneDnnError(f'{library.path} failed its self-test: {record["fault"]}{place}')


def _identity(library):
  """Names a file, its version, this CPU's instructions and the self-test."""
  try:
    stat = os.stat(library.path)
    parts = [library.path, stat.st_size, stat.st_mtime_ns]
  except OSError:  # a name that the loader knows
    parts = [library.path]
  parts += [cores.cpu_line('flags'), library.version, library.isa]
  test = pathlib.Path(__file__).with_name('self_test.py').read_bytes()
  parts += [hashlib.sha256(test).hexdigest()]
  # What these say may be the fault.
  prefixes = ('OMP_', 'GOMP_', 'ONEDNN_', 'DNNL_')
  parts += sorted(f'{k}={v}' for k, v in os.environ.items() if k.startswith(prefixes))
  return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _run_self_test(path):
  """The fault of a library ('': none), and whether it would occur again."""
  command = [sys.executable, '-m', 'anp_jax.system.onednn.self_test', path]
  # The same package as here, wherever the process was started.
  folders = [_ROOT, *filter(None, [os.environ.get('PYTHONPATH')])]
  environment = {**os.environ, 'PYTHONPATH': os.pathsep.join(folders)}
  try:
    reply = subprocess.run(
      command,
      capture_output=True,
      text=True,
      timeout=_SELF_TEST_SECONDS,
      check=False,
      env=environment,
    )
  except subprocess.TimeoutExpired:
    return f'not done after {_SELF_TEST_SECONDS} s', False
  if reply.returncode < 0:
    number = -reply.returncode
    return f'ended by signal {number}', number in _CRASHES
  lines = (reply.stdout + reply.stderr).strip().splitlines()
  if reply.returncode:
    reason = lines[-1] if lines else f'exit code {reply.returncode}'
    # Another exit code is a fault of the test itself, such as no memory.
    return reason, reply.returncode == FAULTY
  return '', True
