"""Tests of --change: a run goes on with a new rate, and its past stays."""

import errno
import json
import os
import shutil
from unittest import mock

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from anp_jax import cluster, config as config_lib, run as run_lib, train
from anp_jax.checkpoint import run_dir
from anp_jax.config import saved_run
from anp_jax.reporting import metric_lines, telemetry
from tests import builders, launching, serving, splitting

pytestmark = pytest.mark.usefixtures('on_one_device')

_CLASSES = 5
_KEYS = 'optimizer.learning_rate,schedule'


_OF_STRATEGY = {
  'sync': {},
  'invariant': {'strategy.threads': 8},  # as many as pytest has devices
  'local_sgd': {},
  'channel_split': {},
  # Its threads have no float64.
  'parameter_server': splitting.FLOAT32,
}


def _config(config, strategy='sync'):
  """A run of gradients in closed form: labels that are smoothed to nothing."""
  changes = {
    'strategy.name': strategy,
    **launching.FLOAT64,
    **launching.CONSTANT,
    'label_smoothing': 1.0,
    'optimizer.learning_rate': 0.5,
    'duration': '6 steps',
    'checkpoint.every': '3 steps',
    'checkpoint.keep': 9,
  }
  return builders.on_biases(config, **changes | _OF_STRATEGY[strategy])


def _changed(before):
  """The same run with twice the steps, and another rate that decays."""
  changes = {'duration': '12 steps', 'optimizer.learning_rate': 0.2}
  changes |= {'schedule.name': 'polynomial', 'schedule.end': 0.25}
  return builders.editable(config_lib.replaced(before, changes))


def _rates():
  """The rates of the 12 steps, the last 6 of them in closed form."""
  return [0.5] * 6 + [0.2 * (0.25 + 0.75 * (1 - s / 12)) for s in range(6, 12)]


def _descended(rates):
  """NumPy's weights after steps of these rates, (classes,) float64."""
  weights = np.arange(_CLASSES, dtype=np.float64)
  for rate in rates:
    shares = np.exp(weights - weights.max())
    weights -= rate * (shares / shares.sum() - 1 / _CLASSES)
  return weights


def _saved(workdir, step):
  """The weights of a checkpoint, read by Orbax alone."""
  path = os.path.join(os.path.abspath(workdir), 'checkpoints', str(step))
  with ocp.StandardCheckpointer() as raw:
    tree = raw.restore(os.path.join(path, 'state'))['state']
  (weights,) = jax.tree.leaves(tree['params'])
  return np.asarray(weights).reshape(-1, _CLASSES)  # groups have their own


def _resume(config, workdir, change=''):
  with cluster.Processes(config) as processes:
    if not change:
      return train.run(config, str(workdir), processes=processes)
    with run_dir.change(str(workdir), config, change, processes):
      return train.run(config, str(workdir), processes=processes)


_VARIANTS = 'invariant', 'channel_split'  # their loop is that of `sync`


@pytest.mark.slow
@pytest.mark.parametrize(
  'strategy', [pytest.param(n, marks=[pytest.mark.soak] * (n in _VARIANTS)) for n in _OF_STRATEGY]
)
def test_weights_are_those_of_both_schedules(tmp_path, config, x64, monkeypatch, strategy):
  if strategy == 'parameter_server':
    serving.on_devices(monkeypatch, 1)
  before = _config(config, strategy)
  _resume(before, tmp_path)
  first = _saved(tmp_path, 6)
  # Rounding of some operations a step.
  rounding = 1e-5 if before.model.dtype == 'float32' else 1e-12
  np.testing.assert_allclose(first, [_descended(_rates()[:6])] * len(first), rtol=rounding)
  after = _changed(before)
  builders.assert_refused('--change=optimizer.learn', _resume, after, tmp_path)
  _resume(after, tmp_path, _KEYS)
  assert _saved(tmp_path, 6).tobytes() == first.tobytes()
  np.testing.assert_allclose(
    _saved(tmp_path, 12), [_descended(_rates())] * len(first), rtol=rounding
  )
  duration, *keys = telemetry.of_kind(str(tmp_path), metric_lines.CHANGE)
  assert duration == {
    'kind': 'change',
    'step': 6,
    'key': 'duration',
    'old': '6 steps',
    'new': '12 steps',
    'old_rate': 0.5,
    'new_rate': pytest.approx(_rates()[6]),
  }
  assert keys == [
    {'kind': 'change', 'step': 6, 'key': key, 'old': old, 'new': new}
    for key, old, new in (
      ('optimizer.learning_rate', 0.5, 0.2),
      ('schedule.name', 'constant', 'polynomial'),
      ('schedule.power', None, 1.0),
      ('schedule.end', None, 0.25),
    )
  ]
  if strategy == 'parameter_server':
    serving.same_bits(launching.weights(tmp_path), serving.replayed(after, tmp_path, 12))


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
  """Returns the config and the folder of a run of six steps."""
  folder = tmp_path_factory.mktemp('trained')
  config = _config(builders.tiny_recipe())
  with jax.enable_x64(True), pytest.MonkeyPatch.context() as patch:
    builders.use_devices(patch, 1)
    _resume(config, folder)
  return config, folder


@pytest.fixture
def before(trained, tmp_path):
  """The config of that run, whose folder is copied to the test's."""
  config, folder = trained
  shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
  return builders.editable(config)


class _Rank:
  """A process other than the first, and what it gathers."""

  index, count = 1, 2

  def __init__(self):
    self.gathered = []

  def gather(self, value):
    self.gathered.append(value)
    return [value] * 2


def test_each_process_takes_back_what_is_refused(tmp_path, before, monkeypatch):
  """The one that refuses it may end the others before they can."""
  saved = saved_run.read(str(tmp_path))
  written = []
  monkeypatch.setattr(run_dir, '_write_config', lambda _, values: written.append(values))
  with pytest.raises(config_lib.ConfigError, match='no data here'):
    with run_dir.change(str(tmp_path), _changed(before), _KEYS, _Rank()):
      raise config_lib.ConfigError('no data here')
  assert written == [saved]


def test_a_process_that_comes_back_waits_for_no_other(tmp_path, before):
  """The others gathered when they read the config that it finds written."""
  first, late = _Rank(), _Rank()
  with run_dir.change(str(tmp_path), _changed(before), _KEYS, first):
    pass
  assert first.gathered == ['read', 'written']
  after = config_lib.changed(saved_run.read(str(tmp_path)), _changed(before), _KEYS)
  (tmp_path / saved_run.FILE).write_text(json.dumps(after))
  with run_dir.change(str(tmp_path), _changed(before), _KEYS, late):
    pass
  assert late.gathered == []


@pytest.mark.slow
def test_a_change_is_told_once_and_holds(tmp_path, before, x64, capsys):
  """Also where the run dies before it has saved, and where all is as before."""
  other = _changed(before)
  for change in (_KEYS, '', _KEYS):  # the last two resume with the new values
    capsys.readouterr()
    _run_that_dies(other, tmp_path, change)
    text = capsys.readouterr().out
    assert 'config.optimizer.learning_rate=0.2 from step 6 on, 0.5 before' in text
    assert (
      'change   config.duration=12 steps from step 6 on, 6 steps before: '
      f'learning rate {_rates()[6]:.6g}, not 0.5\n' in text
    )
    assert len(telemetry.of_kind(str(tmp_path), metric_lines.CHANGE)) == 5
  builders.assert_refused('rate is 0.5, but the run', _resume, before, tmp_path)
  # Back to what it was before a step has been made: there is no change.
  _run_that_dies(before, tmp_path, _KEYS, '12 steps')
  assert telemetry.of_kind(str(tmp_path), metric_lines.CHANGE) == []
  _resume(other, tmp_path, _KEYS)
  np.testing.assert_allclose(_saved(tmp_path, 12), [_descended(_rates())], rtol=1e-12)
  page = (tmp_path / 'report' / 'index.html').read_text()
  assert 'from step 6' in page and '=polynomial, constant before' in page
  assert f'duration=12 steps, 6 steps before: learning rate {_rates()[6]:.6g}' in page
  # The run goes on under its new config, and its past is not told again.
  other.duration = '14 steps'
  _resume(other, tmp_path)
  steps = [r['step'] for r in telemetry.of_kind(str(tmp_path), metric_lines.CHANGE)]
  assert steps == [6] * 5 + [12]  # the last is of the duration


@pytest.mark.slow
def test_a_change_that_is_refused_later_is_taken_back(tmp_path, before, x64):
  saved = (tmp_path / 'config.json').read_text()
  other = _changed(before)
  other.schedule.warmup = '40 steps'  # of 12, which is seen late
  builders.assert_refused('warmup', _resume, other, tmp_path, _KEYS)
  assert (tmp_path / 'config.json').read_text() == saved
  assert telemetry.of_kind(str(tmp_path), metric_lines.CHANGE) == []
  # The result stays that of the end.
  result = telemetry.result(str(tmp_path))
  other = builders.editable(config_lib.replaced(before, {'optimizer.learning_rate': 0.2}))
  _resume(other, tmp_path, 'optimizer.learning_rate')
  assert telemetry.result(str(tmp_path)) == result and result['step'] == 6


def test_a_change_that_cannot_be_written_is_one_line(tmp_path, before, x64, monkeypatch):
  full = OSError(errno.ENOSPC, 'No space left on device')
  monkeypatch.setattr(run_dir.files, 'write_atomic', mock.Mock(side_effect=full))
  builders.assert_refused('No space left', _resume, _changed(before), tmp_path, _KEYS)


def _run_that_dies(config, workdir, change, duration=''):
  """Resumes a run that ends with an error before its first step."""
  config.duration = duration or config.duration
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(run_lib.Run, 'compile', mock.Mock(side_effect=ZeroDivisionError))
    with pytest.raises(ZeroDivisionError):
      _resume(config, workdir, change)


def test_a_config_that_differs_elsewhere_changes_nothing(tmp_path, before, x64):
  saved = (tmp_path / 'config.json').read_text()
  other = _changed(before)
  for change, key in ((_KEYS, 'seed'), ('optimizer.learning_rate', 'schedule')):
    other.seed = 1 if key == 'seed' else 0
    words = f'config.{key}.*which --change={change} does not name'
    builders.assert_refused(words, _resume, other, tmp_path, change)
  assert (tmp_path / 'config.json').read_text() == saved
