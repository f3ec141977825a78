"""Checkpoints: keeping, falling back, refusing, checking bytes."""

import asyncio
import contextlib
import hashlib
import json
import math
import os
import pathlib
import shutil
import threading
import time
import types
from unittest import mock

from hypothesis import strategies
from hypothesis.extra import numpy as hypothesis_numpy
import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint._src.path import atomicity
import pytest

from anp_jax import config as config_lib
from anp_jax.checkpoint import checksums, manager, trained
from anp_jax.parallel import mesh as mesh_lib
from tests import builders, coordinating

DATA = {'examples': 64, 'classes': 12, 'names': 'abc'}


def _state(step, mesh=None, axis=None):
  """A state whose values are known in closed form from its step."""
  mesh = mesh or _mesh(1)
  numbers = np.arange(64 * 32, dtype=np.float32).reshape(64, 32) + step
  values = {
    'kernel': numbers,
    'half': numbers.astype(jax.numpy.bfloat16),
    'step': np.int32(step),
    'flag': np.array([True, False]),
  }
  specs = dict.fromkeys(('kernel', 'half'), mesh_lib.P(axis))
  return {
    name: jax.device_put(value, jax.NamedSharding(mesh, specs.get(name, mesh_lib.P())))
    for name, value in values.items()
  }


def _mesh(count):
  return mesh_lib.create(config_lib.base(), jax.devices()[:count])


def _open(workdir, config, data=DATA, abstract_state=None):
  return manager.Checkpoints(
    str(workdir), config, data, abstract_state or builders.abstract(_state(0))
  )


def _write(workdir, config, steps):
  checkpoints = _open(workdir, config)
  for step in steps:
    checkpoints.save(step, _state(step))
  checkpoints.wait()
  checkpoints.close()


def _folders(workdir, kind):
  return sorted(int(p.name) for p in (workdir / kind).iterdir() if p.name.isdigit())


def _equal(state, step):
  for name, value in _state(step).items():
    np.testing.assert_array_equal(np.asarray(state[name]), np.asarray(value), err_msg=name)


def _assert_restores(checkpoints, step, which='newest'):
  state, restored = checkpoints.restore(which)
  assert restored == step
  _equal(state, step)


def _largest_file(folder):
  files = [p for p in pathlib.Path(folder).rglob('*') if p.is_file()]
  return max(files, key=lambda p: p.stat().st_size)


@pytest.fixture
def config():
  return config_lib.base()


@pytest.fixture(scope='module')
def written(tmp_path_factory):
  """A workdir with checkpoints of steps 1 and 2."""
  workdir = tmp_path_factory.mktemp('written')
  _write(workdir / 'run', config_lib.base(), [1, 2])
  assert os.listdir(workdir) == ['run']  # nothing is touched outside the workdir
  return workdir / 'run'


@pytest.fixture
def workdir(written, tmp_path):
  """A copy of that workdir."""
  return pathlib.Path(shutil.copytree(written, tmp_path / 'run'))


def test_restores_what_was_saved(workdir, config):
  # An unfinished save is no checkpoint.
  shutil.copytree(workdir / 'checkpoints/1', workdir / 'checkpoints/3.orbax-checkpoint-tmp')
  checkpoints = _open(workdir, config)
  _assert_restores(checkpoints, 2)
  assert _open(workdir / 'new', config).restore() is None
  _assert_restores(checkpoints, 1, '1')
  builders.assert_refused('step 9.*it has 1, 2', checkpoints.restore, '9')
  builders.assert_refused('no best checkpoint', checkpoints.restore, 'best')


def test_saved_state_survives_donation(tmp_path, config):
  checkpoints = _open(tmp_path, config)
  state = _state(5)
  checkpoints.save(5, state)
  spoil = jax.jit(lambda s: jax.tree.map(lambda x: x * 0, s), donate_argnums=0)
  jax.block_until_ready(spoil(state))
  checkpoints.wait()
  _equal(checkpoints.restore()[0], 5)


def test_keeps_newest_and_best_and_no_more(tmp_path, config):
  config.checkpoint.keep = 2
  config.checkpoint.keep_best = 2
  checkpoints = _open(tmp_path, config)
  for step, score in enumerate((0.3, 0.7, 0.5, 0.1, 0.6), 1):
    checkpoints.save(step, _state(step))
    checkpoints.save_best(step, _state(step), {'anp_top1': score})
  checkpoints.wait()
  checkpoints.close()
  assert _folders(tmp_path, 'checkpoints') == [4, 5]
  assert _folders(tmp_path, 'best') == [2, 5]
  # Nothing else is left behind either.
  assert len(list((tmp_path / 'checkpoints').iterdir())) <= 3
  config.checkpoint.best_metric = 'class_top1'  # another name of it
  _assert_restores(_open(tmp_path, config), 2, 'best')


@pytest.mark.parametrize(
  'metric, values, steps',
  [
    ('loss', (2.0, 1.0, 1.5), [2]),
    ('anp_top1', (0.5, 0.3, 0.5), [1]),
    ('loss', (math.nan, 2.0, 1.0, math.nan), [3]),
  ],
)
def test_the_best_by_a_metric_and_no_equal_one(tmp_path, config, metric, values, steps):
  config.checkpoint.best_metric, config.checkpoint.keep_best = metric, 1
  for step, value in enumerate(values, 1):  # each in a process of its own
    checkpoints = _open(tmp_path, config)
    checkpoints.save_best(step, _state(step), {metric: value})
    checkpoints.close()
  assert _folders(tmp_path, 'best') == steps


def test_another_metric_chooses_the_best_from_now_on(tmp_path, config):
  config.checkpoint.keep_best = 1
  for step, metric in enumerate(('loss', 'anp_top1', 'anp_top1'), 1):
    config.checkpoint.best_metric = metric
    checkpoints = _open(tmp_path, config)
    checkpoints.save_best(step, _state(step), {'loss': 0.5 + step, 'anp_top1': 0.25 * step})
    checkpoints.close()
    assert _folders(tmp_path, 'best') == [step]
    assert _open(tmp_path, config).restore('best')[1] == step


def test_best_metric_that_evaluation_lacks(config):
  config.checkpoint.best_metric = 'noun_top1'
  builders.assert_refused(
    'noun_top1.*class_top1', manager.check_best_metric, config, ('loss', 'anp_top1')
  )
  config.checkpoint.best_metric = 'anp_top5'
  builders.assert_refused(
    'gives anp_top1, noun_top1', manager.check_best_metric, config, ('anp_top1', 'noun_top1')
  )
  config.checkpoint.best_metric = 'class_top1'
  manager.check_best_metric(config, ('loss', 'anp_top1'))


@pytest.mark.parametrize('writer, reader', [(1, 4), (2, 1), (8, 4)])
def test_restores_on_another_number_of_devices(tmp_path, config, writer, reader):
  saved = _state(7, _mesh(writer), 'data')
  checkpoints = _open(tmp_path, config, abstract_state=builders.abstract(saved))
  checkpoints.save(7, saved)
  checkpoints.wait()
  abstract_state = builders.abstract(_state(0, _mesh(reader), 'data'))
  state, _ = _open(tmp_path, config, abstract_state=abstract_state).restore()
  _equal(state, 7)
  assert len(state['kernel'].sharding.device_set) == reader


def _flip(folder):
  file = _largest_file(folder / 'state')
  data = bytearray(file.read_bytes())
  # Stored compressed: near the end of the largest array's own bytes.
  data[len(data) // 2] ^= 0x10
  file.write_bytes(bytes(data))


def _truncate(folder):
  file = _largest_file(folder / 'state')
  file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _remove(folder):
  _largest_file(folder / 'state').unlink()


def _empty(folder):
  shutil.rmtree(folder)
  folder.mkdir()


def _no_meta(folder):
  shutil.rmtree(folder / 'meta')


def _change_value(folder):
  """Bytes that decode well but are not those that were saved."""
  with ocp.StandardCheckpointer() as raw:
    tree = raw.restore(folder / 'state')
    tree['state']['kernel'] = np.asarray(tree['state']['kernel']).copy()
    tree['state']['kernel'][40, 3] += 1
    shutil.rmtree(folder / 'state')
    raw.save(folder / 'state', tree)


@pytest.mark.parametrize('damage', [_flip, _truncate, _remove, _empty, _no_meta, _change_value])
def test_damaged_newest_is_set_aside_and_saved_again(workdir, config, damage, caplog):
  damage(workdir / 'checkpoints' / '2')
  checkpoints = _open(workdir, config)
  _assert_restores(checkpoints, 1)
  assert _folders(workdir, 'checkpoints') == [1]
  (aside,) = (workdir / 'damaged').iterdir()
  assert aside.name.startswith('2-')
  assert 'checkpoint 2 is damaged' in caplog.text
  checkpoints.save(2, _state(2))
  checkpoints.close()
  assert _open(workdir, config).restore()[1] == 2


def test_all_damaged_is_an_error_not_a_new_run(workdir, config):
  for step in (1, 2):
    _empty(workdir / 'checkpoints' / str(step))
  for _ in range(2):  # nor is it a new run when the command is given again
    builders.assert_refused('none of the checkpoints 2, 1 is whole', _open(workdir, config).restore)


def test_a_full_memory_moves_no_checkpoint(workdir, config, monkeypatch):
  error = jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: Out of memory')
  with monkeypatch.context() as full:
    full.setattr(ocp.StandardCheckpointHandler, 'restore', mock.Mock(side_effect=error))
    builders.assert_refused('none of the checkpoints', _open(workdir, config).restore)
  assert _open(workdir, config).restore()[1] == 2


def _all_files(workdir):
  return {str(p): None if p.is_dir() else p.read_bytes() for p in workdir.rglob('*')}


def test_what_only_reads_changes_nothing(workdir, config, caplog):
  """The run that owns the folder may be in the midst of a save."""
  _empty(workdir / 'checkpoints' / '2')
  (workdir / 'best').rmdir()  # the run was not evaluated yet
  save = workdir / 'checkpoints' / '3.orbax-checkpoint-tmp'
  builders.write_tree(save, {'half': 'x'})
  before = _all_files(workdir)
  checkpoints = _open(workdir, config, data=None)
  _assert_restores(checkpoints, 1)
  checkpoints.close()
  assert 'checkpoint 2 is damaged' in caplog.text
  assert _all_files(workdir) == before
  _empty(workdir / 'checkpoints' / '1')
  builders.assert_refused('none of the checkpoints', _open(workdir, config, data=None).restore)
  assert _open(workdir / 'new', config, data=None).restore() is None
  assert not (workdir / 'new').exists()


def test_a_newer_one_is_read_where_the_run_has_deleted_the_newest(tmp_path, config):
  config.checkpoint.keep = 1
  _write(tmp_path, config, [1])
  checkpoints = _open(tmp_path, config, data=None)
  _write(tmp_path, config, [2])
  assert _folders(tmp_path, 'checkpoints') == [2]
  _assert_restores(checkpoints, 2)


def test_other_config_is_refused_with_the_key(workdir, config):
  config.optimizer.momentum = 0.7
  builders.assert_refused('optimizer.momentum is 0.7.*0.9', _open(workdir, config).restore)
  assert _folders(workdir, 'checkpoints') == [1, 2]


def test_resumable_keys_may_change(workdir, config):
  config.duration = '99 steps'
  config.checkpoint.keep = 5
  config.mesh.data = 1
  assert _open(workdir, config).restore()[1] == 2


@pytest.mark.parametrize('key', ['examples', 'names'])
def test_other_data_are_refused(workdir, config, key):
  other = dict(DATA, **{key: 'other'})
  builders.assert_refused(f'data differ in {key!r}', _open(workdir, config, other).restore)
  assert _open(workdir, config, DATA | {'kept since then': 1}).restore()[1] == 2


def test_changed_model_is_refused_not_called_damage(workdir, config):
  abstract_state = builders.abstract(_state(0))
  abstract_state['kernel'] = jax.ShapeDtypeStruct(
    (64, 16), np.float32, sharding=abstract_state['kernel'].sharding
  )
  builders.assert_refused(
    'kernel has shape', _open(workdir, config, abstract_state=abstract_state).restore
  )
  assert _folders(workdir, 'checkpoints') == [1, 2]


def _reference_checksum(array):
  """The sum of (2i + 1) word_i modulo 2^32, with Python's own integers."""
  raw = np.asarray(array)
  kind = {1: np.uint8, 2: np.uint16}.get(raw.dtype.itemsize, np.uint32)
  words = np.frombuffer(raw.tobytes(), kind).tolist()
  return sum(w * (2 * i + 1) for i, w in enumerate(words)) % 2**32


@builders.fuzzed(
  100,
  hypothesis_numpy.arrays(
    strategies.sampled_from(['?', 'i1', 'f2', 'u4', 'f8']),
    hypothesis_numpy.array_shapes(max_dims=2),
  ),
)
def test_checksum_of_any_array(array):
  assert checksums.of_array(array) == _reference_checksum(array)


@pytest.mark.parametrize('count', [1, 4])
def test_checksum_is_the_sum_whatever_the_devices(count):
  state = _state(3, _mesh(count), 'data')
  sums = jax.device_get(checksums.of_tree(state))
  expected = [_reference_checksum(x) for x in jax.tree.leaves(state)]
  assert sums.tolist() == expected
  assert [checksums.of_array(np.asarray(x)) for x in jax.tree.leaves(state)] == expected


def test_a_full_disk(tmp_path, config, monkeypatch):
  """A run stops with a line that says so, and what was saved is whole."""
  checkpoints = _open(tmp_path, config)
  checkpoints.save(1, _state(1))
  checkpoints.wait()
  need = sum(np.asarray(x).nbytes for x in _state(0).values())
  with monkeypatch.context() as full:
    full.setattr(
      manager.shutil, 'disk_usage', lambda _: shutil._ntuple_diskusage(need, 1, need - 1)
    )
    with pytest.raises(manager.CheckpointError, match=r'written.*whole: 1\)'):
      checkpoints.save(2, _state(2))
  assert checkpoints.steps() == [1]
  checkpoints.save(3, _state(3))
  checkpoints.wait()
  assert checkpoints.restore()[1] == 3


def test_a_save_is_timed_until_it_is_on_disk(tmp_path, config, monkeypatch):
  """Not until the loop goes on, which it does at once."""
  checkpoints = _open(tmp_path, config)
  assert checkpoints.expected_save_seconds() == 0
  for name in ('AtomicRenameTemporaryPath', 'CommitFileTemporaryPath'):
    monkeypatch.setattr(
      getattr(atomicity, name), 'finalize', _slow(getattr(atomicity, name).finalize, 0.2)
    )
  start = time.monotonic()
  checkpoints.save(1, _state(1))
  while not (tmp_path / 'checkpoints/1').exists():
    checkpoints.expected_save_seconds()
    time.sleep(0.01)
  spent = time.monotonic() - start
  checkpoints.wait()
  longest = checkpoints.expected_save_seconds()
  assert longest == pytest.approx(spent, rel=0.5)
  checkpoints.save(2, _state(2))
  # What is left of the one under way comes first.
  assert longest < checkpoints.expected_save_seconds() <= 2 * longest
  checkpoints.close()


def test_one_that_waits_for_the_others_saves_tells_it(tmp_path, config, monkeypatch):
  """Where all said that they save, nobody knew whose disk did not answer."""
  checkpoints = _open(tmp_path / 'run', config)
  phases, has_ended = [], threading.Event()
  checkpoints.on_phase = phases.append
  save = types.SimpleNamespace(
    is_saving_in_progress=lambda: not has_ended.is_set(), wait_until_finished=has_ended.wait
  )
  meet = checkpoints._managers['checkpoints']._options.async_options.barrier_sync_fn
  with monkeypatch.context() as context:
    context.setitem(checkpoints._managers, 'checkpoints', save)
    context.setattr(jax, 'process_count', lambda: 2)
    waiting = threading.Thread(target=checkpoints._await_previous_save, args=('checkpoints',))
    waiting.start()
    meet(key='checkpoints:signals.1', timeout_ms=1000)
    time.sleep(0.3)
    assert not phases  # what this process writes is not on disk
    meet(key='checkpoints:async_write_complete.1', timeout_ms=1000)
    coordinating.wait(lambda: phases == ['committing'])
    has_ended.set()
    waiting.join(10)
  assert phases == ['committing', 'saving']
  checkpoints.close()


def _slow(real, seconds):
  async def slow(*args, **kwargs):
    await asyncio.sleep(seconds)
    return await real(*args, **kwargs)

  return slow


def test_a_best_checkpoint_that_was_not_written_stops_the_run(tmp_path, config, monkeypatch):
  """A disk that fills up during the save of a better score."""
  config.checkpoint.keep_best = 1
  checkpoints = _open(tmp_path, config)
  checkpoints.save_best(1, _state(1), {'anp_top1': 0.7})
  checkpoints.wait()
  with monkeypatch.context() as full:
    for name in ('AtomicRenameTemporaryPath', 'CommitFileTemporaryPath'):
      full.setattr(getattr(atomicity, name), 'finalize', _no_space)
    with pytest.raises(manager.CheckpointError, match='best: a checkpoint could not be written'):
      checkpoints.save_best(2, _state(2), {'anp_top1': 0.8})
      checkpoints.wait()
  assert _folders(tmp_path, 'best') == [1]


async def _no_space(*_, **__):
  raise OSError(28, 'No space left on device')


# A checkpoint's own metadata: what a changed bit of them leads to.

_META = 'checkpoints/2/meta/metadata'


def _restored_step(workdir, config):
  """The step that is restored, once the run goes on as it was."""
  with contextlib.closing(_open(workdir, config)) as checkpoints:
    state, step = checkpoints.restore()
    assert int(state['step']) == step and checkpoints.changes() == {}
  return step


@pytest.mark.parametrize('case', range(6))
def test_a_changed_bit_of_the_metadata_is_damage(workdir, config, caplog, case):
  path = workdir / _META
  data = bytearray(path.read_bytes())
  before = json.loads(data)
  data[case * (len(data) - 1) // 5] ^= 1 << case
  path.write_bytes(bytes(data))
  try:
    is_harmless = json.loads(data) == before  # a space, say
  except ValueError:
    is_harmless = False
  assert _restored_step(workdir, config) == (2 if is_harmless else 1)
  assert (workdir / 'damaged').exists() != is_harmless
  assert ('checkpoint 2 is damaged' in caplog.text) != is_harmless


@pytest.mark.parametrize(
  'old, new',
  [
    ('"examples": 64', '"examples": 65'),
    ('"optimizer.learning_rate": ', '"optimizer.learning_rate": 1'),
    ('"checksum"', '"checksun"'),
    ('"packages"', '"packaget"'),
  ],
)
def test_changed_values_are_damage_and_no_change(workdir, config, caplog, old, new):
  path = workdir / _META
  text = json.dumps(json.loads(path.read_text()))
  assert old in text
  path.write_text(text.replace(old, new))
  builders.assert_refused('its metadata', trained.load, str(workdir))
  assert _restored_step(workdir, config) == 1
  assert 'its metadata' in caplog.text


def test_the_checksum_is_the_sha256_of_the_sorted_values(written):
  meta = json.loads((written / _META).read_text())
  checksum = meta.pop('checksum')
  text = json.dumps(meta, sort_keys=True)
  assert checksum == hashlib.sha256(text.encode()).hexdigest()
  assert meta['packages']['jax'] == jax.__version__ and meta['data'] == DATA
  assert meta['config']['model.name'] == 'resnet50'
