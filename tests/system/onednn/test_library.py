"""The finding, checking and naming of oneDNN's shared library."""

import functools
import importlib.metadata
import os
import platform
import types

import jax
import numpy as np
import pytest

from anp_jax import models
from anp_jax.reporting import summary
from anp_jax.system import onednn
from anp_jax.system.onednn import c_api, library
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

_with_package = pytest.mark.skipif(
  not library._packaged(), reason=f'{library.PACKAGE} is not installed'
)


@pytest.fixture
def fresh(monkeypatch, tmp_path):
  """A process that has not looked yet."""
  finding = functools.cache(library._found.__wrapped__)
  monkeypatch.setattr(library, '_found', finding)
  monkeypatch.delenv(library.VARIABLE, raising=False)
  return tmp_path


def _forget():
  library._found.cache_clear()


def _in_process(**variables):
  """The lines in which a Python process with these variables says what it finds."""
  return launching.python(
    '-c', _SAY, status=0, **{library.VARIABLE: '', **variables}
  ).stdout.splitlines()


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


@pytest.mark.parametrize('system, machine', [('Darwin', 'x86_64'), ('Linux', 'aarch64')])
def test_other_systems_fall_back_silently(fresh, monkeypatch, tmp_path, system, machine):
  _on(monkeypatch, system, machine)
  packaged = tmp_path / 'libdnnl.so.3'
  packaged.touch()
  _package(monkeypatch, packaged)
  assert library.find() is None and library.missing_reason() == ''


def test_none_where_one_is_expected_is_said(fresh, monkeypatch):
  _on(monkeypatch)
  for path in (None, fresh / 'libdnnl.so.3'):  # no package; its record without its file
    _package(monkeypatch, path)
    _is_refused('no oneDNN here; for faster steps: pip install onednn-cpu-gomp==2023.2.0')


def test_no_other_library_is_opened(fresh, monkeypatch):
  _on(monkeypatch)
  monkeypatch.setenv(library.VARIABLE, '/a/libdnnl.so.3')
  _is_refused('ANP_ONEDNN=/a/libdnnl.so.3: expected off; only the library of onednn-cpu-gomp')
  monkeypatch.delenv(library.VARIABLE)
  _package(monkeypatch, fresh / 'libdnnl.so.3')
  (fresh / 'libdnnl.so.3').write_text('not a library\n')
  _is_refused('libdnnl.so.3: ')


@_with_package
@pytest.mark.parametrize('version', [(3, 2, 1), (3, 12, 0), (2, 6, 3)])
def test_another_version_is_refused(fresh, monkeypatch, version):
  monkeypatch.setattr(c_api.Api, '_read_version', lambda _: version)
  text = '.'.join(map(str, version))
  _is_refused(f'is oneDNN {text}, expected 3.2.0: pip install onednn-cpu-gomp==2023.2.0')


def test_off_is_silent(fresh, monkeypatch):
  monkeypatch.setenv(library.VARIABLE, 'off')
  assert library.find() is None and library.missing_reason() == ''
  with pytest.raises(c_api.OneDnnError, match='switched off'):
    library.opened()


def _isa(monkeypatch, name):
  monkeypatch.setattr(c_api.Api, 'isa', lambda _: name)


@pytest.mark.parametrize(
  'name, dtypes',
  [
    ('AVX2', ('float32',)),
    ('AVX512_CORE_VNNI', ('float32',)),
    ('AVX512_CORE_BF16', ('float32', 'bfloat16')),
    ('AVX512_CORE_AMX', ('float32', 'bfloat16')),
    ('AVX10_1_512', ('float32', 'bfloat16')),
  ],
)
@_with_package
def test_the_instruction_set_decides_the_dtypes(fresh, monkeypatch, name, dtypes):
  _isa(monkeypatch, name)
  assert library.find().dtypes == dtypes
  assert name in library.find().describe()


@_with_package
def test_waiting_threads_leave_their_core_unless_the_user_says_otherwise():
  assert _in_process()[2] == 'passive'
  assert _in_process(OMP_WAIT_POLICY='active')[2] == 'active'


@_with_package
def test_a_cpu_without_avx2_falls_back_with_a_line():
  """In a process: oneDNN reads the variable once."""
  what, reason, _ = _in_process(ONEDNN_MAX_CPU_ISA='AVX')
  assert what == 'none'
  assert reason == 'oneDNN uses AVX here, and was tried from AVX2 on'


@pytest.mark.parametrize('name, is_wide', [('AVX2', False), ('AVX512_CORE', True)])
@_with_package
def test_norms_and_products_wait_for_avx512(fresh, monkeypatch, name, is_wide):
  _isa(monkeypatch, name)
  library.find().threads = 1
  x = jax.ShapeDtypeStruct((2, 8, 8, 16), 'float32')
  for size in (3, 1):
    kernel = jax.ShapeDtypeStruct((size, size, 16, 16), 'float32')
    spec = onednn.convolution_of('forward', x, kernel, 1, ((0, 0), (0, 0)), 1)
    assert onednn.takes(spec) == (is_wide or size == 3)
  assert onednn.takes(onednn.BatchNormSpec('forward', 'float32', (1, 8, 16), 1e-5, True)) == is_wide


def _log_line(config, platform_name='cpu'):
  """The lines of a run's log that say what a CPU computes with."""
  devices = np.array([types.SimpleNamespace(platform=platform_name)])
  return summary._computing(config, types.SimpleNamespace(devices=devices))


@onednn_here.needed
def test_a_runs_log_names_the_library(config, fresh, monkeypatch):
  opened = library.find()
  opened.threads = 1
  line = f'library  oneDNN {opened.version}, {opened.isa}, 1 thread'
  assert _log_line(config) == [line] and _log_line(config, 'gpu') == []
  config.model.cpu_library = 'xla'
  assert _log_line(config) == []


def test_a_runs_log_says_why_there_is_none(config, fresh, monkeypatch):
  _on(monkeypatch)
  _package(monkeypatch, None)
  (line,) = _log_line(config)
  assert line.startswith('library  XLA alone: no oneDNN here')
  monkeypatch.setenv(library.VARIABLE, 'off')
  _forget()
  assert _log_line(config) == []


def test_a_config_that_asks_for_it_is_refused_without(fresh, monkeypatch):
  for value, reason in (('off', 'ANP_ONEDNN=off'), ('/nowhere/a.so', 'a.so: expected off')):
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
    'from anp_jax.system.onednn import library\n'
    'from tests.system.onednn import test_operations as test\n'
    'opened = library.find(); opened.threads = 2\n'
    'for direction in test._DIRECTIONS:\n'
    '  test.test_pieces_make_the_whole(opened.api, direction, 3, 64, 64, opened.threads)\n'
    'print(opened.threads)'
  )
  done = launching.python('-c', code, status=0, **{variable: value})
  assert done.stdout.split() == [str(threads)]


@pytest.mark.parametrize('variable', ['OMP_PROC_BIND', 'OMP_PLACES'])
def test_threads_that_openmp_would_bind_are_refused(fresh, monkeypatch, variable):
  """It binds the threads of XLA that call it, and these start others."""
  _on(monkeypatch)
  _package(monkeypatch, fresh / 'libdnnl.so.3')
  (fresh / 'libdnnl.so.3').touch()
  monkeypatch.setenv(variable, 'cores')
  before = os.sched_getaffinity(0)
  assert library.find() is None
  assert variable in library.missing_reason()
  assert os.sched_getaffinity(0) == before
