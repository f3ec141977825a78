"""The finding, checking and naming of oneDNN's shared library."""

import ctypes.util
import functools
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import types

import numpy as np
import pytest

from anp_jax import models
from anp_jax.reporting import summary
from anp_jax.system.onednn import c_api, library, self_test
from tests import builders, launching, onednn_here

# What a process says of the library that it finds.
_SAY = (
  'import os\n'
  'from anp_jax.system.onednn import library\n'
  'opened = library.find()\n'
  'print(opened.describe() if opened else "none")\n'
  'print(library.missing_reason())\n'
  'print(os.environ.get("OMP_WAIT_POLICY"))\n'
)


@pytest.fixture
def fresh(monkeypatch, tmp_path):
  """A process that has not looked yet, and no cache of self-tests."""
  finding = functools.cache(library._found.__wrapped__)
  monkeypatch.setattr(library, '_found', finding)
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  monkeypatch.delenv(library.VARIABLE, raising=False)
  return tmp_path


def _forget():
  library._found.cache_clear()


def _in_process(tmp_path, code=_SAY, **variables):
  """The lines that a Python process prints with these variables."""
  variables['XDG_CACHE_HOME'] = str(tmp_path / 'cache')
  done = launching.python('-c', code, status=0, **variables)
  return done.stdout.splitlines()


def _is_refused(reason):
  """Says that none is opened by a new look, with one line that has these words."""
  _forget()
  assert library.find() is None
  text = library.missing_reason()
  assert reason in text and '\n' not in text, text
  with pytest.raises(c_api.OneDnnError):
    library.opened()


def _on(monkeypatch, system='Linux', machine='x86_64'):
  monkeypatch.setattr(platform, 'system', lambda: system)
  monkeypatch.setattr(platform, 'machine', lambda: machine)


def _package(monkeypatch, path):
  """A package whose library is at a path; None: it is not installed."""

  def files(name):
    assert name == library.PACKAGE
    if path is None:
      raise importlib.metadata.PackageNotFoundError(name)
    return [
      types.SimpleNamespace(name=n, locate=lambda n=n: path.parent / n)
      for n in ('README', path.name)
    ]

  monkeypatch.setattr(importlib.metadata, 'files', files)


def test_the_order_is_variable_package_system(monkeypatch, tmp_path):
  packaged = tmp_path / 'libdnnl.so.3'
  packaged.touch()
  _on(monkeypatch)
  _package(monkeypatch, packaged)
  assert library.locate({library.VARIABLE: ' /a/b.so '}) == '/a/b.so'
  assert library.locate({}) == str(packaged)
  assert library.locate({library.VARIABLE: ''}) == str(packaged)
  # Its record is there and its file is not.
  packaged.unlink()
  assert library.locate({}) == 'libdnnl.so.3'
  _package(monkeypatch, None)
  assert library.locate({}) == 'libdnnl.so.3'
  assert library.locate({library.VARIABLE: 'off'}) == ''


@pytest.mark.parametrize('system, machine', [('Darwin', 'x86_64'), ('Linux', 'aarch64')])
def test_other_systems_fall_back_silently(fresh, monkeypatch, tmp_path, system, machine):
  _on(monkeypatch, system, machine)
  packaged = tmp_path / 'libdnnl.so.3'
  packaged.touch()
  _package(monkeypatch, packaged)
  assert library.find() is None and library.missing_reason() == ''


def test_none_where_one_is_expected_is_said(fresh, monkeypatch):
  _on(monkeypatch)
  _package(monkeypatch, None)

  def fail(name):
    raise OSError(f'{name}: cannot open shared object file')

  monkeypatch.setattr(c_api.ctypes, 'CDLL', fail)
  _is_refused('pip install onednn-cpu-gomp==2023.2.0')


def test_off_is_silent(fresh, monkeypatch):
  monkeypatch.setenv(library.VARIABLE, 'off')
  assert library.find() is None and library.missing_reason() == ''
  with pytest.raises(c_api.OneDnnError, match='switched off'):
    library.opened()


def test_what_is_no_library_is_refused(fresh, monkeypatch):
  text = fresh / 'text.so'
  text.write_text('not a library\n')
  other = ctypes.util.find_library('m')
  for path, reason in (
    (fresh / 'absent.so', 'absent.so'),
    (text, 'text.so'),
    (other, f'{other} is not oneDNN 3'),
  ):
    monkeypatch.setenv(library.VARIABLE, str(path))
    _is_refused(reason)


@pytest.mark.parametrize(
  'version, reason',
  [
    ((4, 0, 1), 'is oneDNN 4.0.1, expected 3.x'),
    ((2, 6, 3), 'is oneDNN 2.6.3, expected 3.x'),
    ((3, 0, 9), 'is oneDNN 3.0.9, expected 3.1 or newer'),
  ],
)
@onednn_here.needed
def test_another_version_is_refused(fresh, monkeypatch, version, reason):
  monkeypatch.setattr(c_api.Api, '_read_version', lambda _: version)
  _is_refused(reason)


def _isa(monkeypatch, name):
  monkeypatch.setattr(c_api.Api, 'isa', lambda _: name)


@pytest.mark.parametrize(
  'name, dtypes',
  [
    ('AVX512_CORE_VNNI', ('float32',)),
    ('AVX512_CORE_BF16', ('float32', 'bfloat16')),
    ('AVX512_CORE_AMX', ('float32', 'bfloat16')),
    ('AVX10_1_512', ('float32', 'bfloat16')),
  ],
)
@onednn_here.needed
def test_the_instruction_set_decides_the_dtypes(fresh, monkeypatch, name, dtypes):
  _isa(monkeypatch, name)
  monkeypatch.setattr(library, '_run_self_test', lambda _: ('', True))
  assert library.find().dtypes == dtypes
  assert name in library.find().describe()


@onednn_here.needed
def test_a_cpu_without_avx512_falls_back_with_a_line(tmp_path):
  """In a process: oneDNN reads the variable once."""
  what, reason, _ = _in_process(tmp_path, ONEDNN_MAX_CPU_ISA='AVX2')
  assert what == 'none'
  assert reason == 'oneDNN uses AVX2 here, and is faster than XLA from AVX-512 on'


@onednn_here.needed
def test_the_self_test_runs_once_for_all_processes(tmp_path):
  # Of a real one: what it left is what the second process reads.
  first = _in_process(tmp_path)
  assert first[0].startswith('oneDNN 3.')
  assert first[2] == 'passive'  # so threads wait, unless the user says otherwise
  (record,) = (tmp_path / 'cache/anp_jax/onednn').iterdir()
  assert json.loads(record.read_text()) == {'fault': ''}
  without = (
    'import subprocess, sys\n'
    'def run(command, **_):\n'
    '  sys.exit(f"started {command}")\n'
    'subprocess.run = run\n'
  )
  variables = {library.VARIABLE: library.find().path}
  assert _in_process(tmp_path, without + _SAY, **variables) == first
  assert _in_process(tmp_path, OMP_WAIT_POLICY='active')[2] == 'active'


@pytest.fixture
def runs(fresh, monkeypatch):
  """The library, with a program of Python in place of its self-test."""
  log = []
  real_run = subprocess.run

  def run(command, **options):
    if 'anp_jax.system.onednn.self_test' not in command:
      return real_run(command, **options)
    log.append(command)
    return real_run([sys.executable, '-c', log[0]], **options)

  monkeypatch.setattr(library.subprocess, 'run', run)
  return log


@pytest.mark.parametrize(
  'program, fault',
  [
    ('print("forward 3x3: error 0.5"); exit(3)', 'forward 3x3: error 0.5'),
    ('import os, signal; os.kill(os.getpid(), signal.SIGSEGV)', 'ended by signal 11'),
    ('exit(3)', 'exit code 3'),
  ],
)
@onednn_here.needed
def test_a_fault_is_named_and_remembered(runs, monkeypatch, program, fault):
  runs.append(program)
  for _ in range(2):
    _is_refused(f'failed its self-test: {fault}')
  assert len(runs) == 2  # the program, and one start of it
  # Of another version or CPU the record says nothing.
  _isa(monkeypatch, 'AVX512_CORE_OF_ANOTHER')
  _is_refused(fault)
  assert len(runs) == 3
  # The line says which file to remove to have it tested again.
  record = library.missing_reason().rpartition('(')[2].rstrip(')')
  os.remove(record)
  runs[0] = 'pass'
  _forget()
  assert library.find() is not None


@pytest.mark.parametrize(
  'program',
  [
    'import os, signal; os.kill(os.getpid(), signal.SIGKILL)',
    'raise MemoryError',
    'import time; time.sleep(60)',
  ],
)
@onednn_here.needed
def test_what_is_not_the_librarys_fault_is_not_remembered(runs, monkeypatch, program):
  """A job that is stopped, memory that runs out, a busy machine."""
  monkeypatch.setattr(library, '_SELF_TEST_SECONDS', 0.5)
  runs.append(program)
  _is_refused('failed its self-test')
  monkeypatch.setattr(library, '_SELF_TEST_SECONDS', 30)
  runs[0] = 'pass'
  _forget()
  assert library.find() is not None


@onednn_here.needed
def test_a_cache_that_cannot_be_written_is_none(runs, monkeypatch, tmp_path):
  runs.append('pass')
  file = tmp_path / 'file'
  file.touch()
  monkeypatch.setenv('XDG_CACHE_HOME', str(file))
  assert library.find() is not None


@onednn_here.needed
def test_the_self_test_imports_the_code_that_starts_it(runs, monkeypatch):
  """Where the package is neither installed nor in the folder of the call."""
  for before in ('', '/elsewhere'):
    monkeypatch.setenv('PYTHONPATH', before)
    runs[:] = ['import sys; print(sys.path[1:3]); exit(3)']
    folders = [str(launching.ROOT), before] if before else [str(launching.ROOT)]
    _is_refused(f'self-test: {str(folders)[:-1]}')
    os.remove(library.missing_reason().rpartition('(')[2].rstrip(')'))


@onednn_here.needed
def test_the_self_test_sees_a_wrong_result(monkeypatch, capsys):
  path = library.find().path
  assert self_test.main([path]) == 0
  run = c_api.Primitive.run

  def wrong(primitive, stream, *addresses):
    run(primitive, stream, *addresses)
    if 'bnorm' in primitive.implementation:
      y = ctypes.cast(addresses[3], ctypes.POINTER(ctypes.c_float))
      y[0] += 1000

  monkeypatch.setattr(c_api.Primitive, 'run', wrong)
  assert self_test.main([path]) == library.FAULTY
  assert capsys.readouterr().out.startswith('norm, float32: error')
  monkeypatch.setattr(c_api.Primitive, 'run', lambda *_: None)
  assert self_test.main([path]) == library.FAULTY
  assert capsys.readouterr().out.startswith('forward 3x3/1, float32: error')


def _log_line(config, platform_name='cpu'):
  """The lines of a run's log that say what a CPU computes with."""
  devices = np.array([types.SimpleNamespace(platform=platform_name)])
  return summary._computing(config, types.SimpleNamespace(devices=devices))


@onednn_here.needed
def test_a_runs_log_names_the_library(config, fresh, monkeypatch):
  monkeypatch.setattr(library, '_run_self_test', lambda _: ('', True))
  opened = library.find()
  opened.threads = 1
  line = f'library  oneDNN {opened.version}, {opened.isa}, 1 thread'
  assert _log_line(config) == [line] and _log_line(config, 'gpu') == []
  config.model.cpu_library = 'xla'
  assert _log_line(config) == []


def test_a_runs_log_says_why_there_is_none(config, fresh, monkeypatch):
  monkeypatch.setenv(library.VARIABLE, '/nowhere/lib.so')
  (line,) = _log_line(config)
  assert line.startswith('library  XLA alone: /nowhere/lib.so: cannot open')
  monkeypatch.setenv(library.VARIABLE, 'off')
  _forget()
  assert _log_line(config) == []


def test_a_config_that_asks_for_it_is_refused_without(fresh, monkeypatch):
  for value, reason in (('off', 'ANP_ONEDNN'), ('/nowhere/a.so', 'a.so')):
    monkeypatch.setenv(library.VARIABLE, value)
    _forget()
    asks = builders.config({'model.cpu_library': 'onednn'})
    builders.assert_refused(f'no oneDNN.*{reason}', models.target, asks, 'cpu')
    assert models.target(asks, 'gpu') == 'gpu'
    assert models.target(builders.config(), 'cpu') == 'cpu'


@onednn_here.needed
def test_the_platform_of_layers_is_the_configs_choice():
  for choice, want in (('auto', 'cpu_onednn'), ('onednn', 'cpu_onednn'), ('xla', 'cpu')):
    config = builders.config({'model.cpu_library': choice})
    assert models.target(config, 'cpu') == want
    assert models.target(config, 'tpu') == 'tpu'


@onednn_here.needed
def test_devices_share_the_cores_and_invariant_takes_one_thread(monkeypatch):
  monkeypatch.setattr(library.find(), 'threads', 7)
  monkeypatch.setattr(models.cores, 'count', lambda: 6)
  for name, devices, threads in (
    ('sync', 1, 6),
    ('sync', 2, 3),
    ('sync', 8, 1),
    ('invariant', 1, 1),
  ):
    config = builders.config({'strategy.name': name})
    models.target(config, 'cpu', devices)
    assert library.find().threads == threads, (name, devices)


@onednn_here.needed
@pytest.mark.parametrize(
  'variable, value, threads',
  [('OMP_THREAD_LIMIT', '1', 1), ('OMP_MAX_ACTIVE_LEVELS', '0', 1), ('OMP_DYNAMIC', 'true', 2)],
)
def test_results_are_right_whatever_openmp_is_told(variable, value, threads):
  """oneDNN leaves out the parts of threads that OpenMP does not give it."""
  code = (
    'from anp_jax.system.onednn import library, self_test\n'
    'opened = library.find(); opened.threads = 2\n'
    'print(opened.threads, self_test.main([opened.path]))'
  )
  done = launching.python('-c', code, status=0, **{variable: value})
  assert done.stdout.split() == [str(threads), '0']


@pytest.mark.parametrize('variable', ['OMP_PROC_BIND', 'OMP_PLACES'])
def test_threads_that_openmp_would_bind_are_refused(fresh, monkeypatch, variable):
  """It binds the threads of XLA that call it, and these start others."""
  del fresh
  monkeypatch.setattr(library, 'locate', lambda: 'libdnnl.so.3')
  monkeypatch.setenv(variable, 'cores')
  before = os.sched_getaffinity(0)
  assert library.find() is None
  assert variable in library.missing_reason()
  assert os.sched_getaffinity(0) == before
