"""Tests of trained: what is read back of a run, and what is refused."""

import contextlib
import json
import os
import pathlib
import shutil
from unittest import mock

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from anp_jax import config as config_lib
from anp_jax.checkpoint import checksums, manager, run_dir, trained
from anp_jax.checkpoint.weights import published_weights
from anp_jax.data import vocabulary
from anp_jax.parallel import mesh as mesh_lib, state as state_lib
from tests import builders


@pytest.fixture
def copy(averaged, tmp_path):
  """A copy of the run, to damage."""
  return pathlib.Path(shutil.copytree(averaged, tmp_path / 'copy'))


def _saved(folder, kind, step):
  """A checkpoint's state, read by Orbax alone."""
  path = os.path.join(os.path.abspath(folder), kind, str(step), 'state')
  with ocp.StandardCheckpointer() as raw:
    return raw.restore(path)['state']


def _equal(actual, want):
  assert jax.tree.structure(actual) == jax.tree.structure(want)
  jax.tree.map(np.testing.assert_array_equal, actual, want)


def _listing(folder):
  return sorted((str(p), p.stat().st_mtime_ns) for p in folder.rglob('*'))


def test_the_newest_is_what_evaluation_sees(averaged):
  before = _listing(averaged)
  network = trained.load(str(averaged))
  assert _listing(averaged) == before
  assert network.step == 12
  saved = _saved(averaged, 'checkpoints', 12)
  _equal(network.params, saved['average']['params'])
  # Else the average could be the weights themselves.
  leaf = jax.tree.leaves(saved['params'])[0]
  assert not np.array_equal(jax.tree.leaves(network.params)[0], leaf)
  assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(network.params))
  assert len(network.vocabulary) == network.objective.head.classes
  assert network.config.ema == 0.5
  saved = json.loads((averaged / 'config.json').read_text())
  assert json.loads(config_lib.to_json(network.config)) == saved


@pytest.mark.parametrize(
  'place, folder, step',
  [('best', 'best', None), ('checkpoints', 'checkpoints', 12), ('checkpoints/8', 'checkpoints', 8)],
)
def test_places(averaged, place, folder, step):
  network = trained.load(str(averaged / place))
  if step is None:
    (step,) = [int(p.name) for p in (averaged / 'best').glob('[0-9]*')]
  assert network.step == step
  want = _saved(averaged, folder, step)['average']['params']
  _equal(network.params, want)


def test_of_several_best_the_best(tmp_path):
  for step, loss in ((3, 0.5), (6, 0.25), (9, 0.75)):
    (tmp_path / f'best/{step}/metrics').mkdir(parents=True)
    (tmp_path / f'best/{step}/state').mkdir()
    text = json.dumps({'loss': loss})
    (tmp_path / f'best/{step}/metrics/metrics').write_text(text)
  assert trained.find(str(tmp_path / 'best')) == str(tmp_path / 'best/6')
  for damage in ('', '{"loss": 0.5', '{"loss": "x"}', '[1]', '\xff'):
    path = tmp_path / 'best/3/metrics/metrics'
    path.write_text(damage, 'latin1')
    builders.assert_refused(f'{path} is damaged', trained.find, str(tmp_path / 'best'))
  path.unlink()
  builders.assert_refused(f'{path} is damaged', trained.find, str(tmp_path / 'best'))


def test_the_mean_of_groups(tmp_path):
  """local_sgd saves each group's weights; evaluation sees their mean."""
  config = builders.config({'strategy.name': 'local_sgd', 'strategy.groups': 2})
  random = np.random.default_rng(0)
  params = {'head': {'kernel': random.normal(size=(2, 3, 4)).astype(np.float32)}}
  stats = {'batch_stats': {'norm': {'count': np.array([[5, 7], [6, 1]], np.int32)}}}
  state = state_lib.TrainState(np.array([3, 3], np.int32), params, stats, {'trace': params}, {})
  where = mesh_lib.replicated(mesh_lib.create(config_lib.base(), jax.devices()[:1]))
  state = jax.device_put(state, where)
  abstract = builders.abstract(state)
  run_dir.claim_workdir(str(tmp_path), config, vocabulary.Vocabulary(('a', 'b')))
  with contextlib.closing(manager.Checkpoints(str(tmp_path), config, {}, abstract)) as checkpoints:
    checkpoints.save(3, state)
  network = trained.load(str(tmp_path))
  first, second = params['head']['kernel']
  # Halves and their sum are exact but for the last rounding.
  np.testing.assert_allclose(network.params['head']['kernel'], (first + second) / 2, rtol=2e-7)
  np.testing.assert_array_equal(network.stats['batch_stats']['norm']['count'], [6, 7])
  assert network.step == 3


def test_a_run_of_a_like_name_is_named(tmp_path):
  (tmp_path / 'photos').mkdir()
  (tmp_path / 'photos/config.json').write_text('{}')
  builders.assert_refused("did you mean 'photos'?", trained.find, f'{tmp_path}/phots')
  assert "did you mean 'photos'?" in published_weights.missing_path(f'{tmp_path}/phots')


@pytest.mark.parametrize(
  'place, message',
  [
    ('nowhere', 'expected the workdir of a run'),
    ('checkpoints/7', 'expected the workdir of a run or one of its checkpoints'),
    ('report', 'report has no checkpoint'),
  ],
)
def test_what_there_is_not(averaged, place, message):
  builders.assert_refused(message, trained.load, str(averaged / place))


def test_what_is_damaged_is_not_used(copy):
  data = copy / 'checkpoints/12/state/ocdbt.process_0/d'
  # In every array of some size: the optimizer's, say, are not read.
  for file in data.iterdir():
    content = bytearray(file.read_bytes())
    content[::16] = bytes(byte ^ 1 for byte in content[::16])
    file.write_bytes(content)
  builders.assert_refused('cannot be read whole', trained.load, str(copy))
  assert trained.load(str(copy / 'checkpoints/8')).step == 8


@pytest.mark.parametrize(
  'leaf', ['params/conv1/kernel', 'average/stats/batch_stats/norm/var', 'step']
)
def test_other_values_than_were_saved_are_not_used(copy, leaf):
  """Files that Orbax reads without complaint, and one number is another."""
  path = copy / 'checkpoints/12/state'
  with ocp.StandardCheckpointer() as raw:
    tree = raw.restore(path)
    *groups, last = leaf.split('/')
    place = tree['state']
    for group in groups:
      place = place[group]
    place[last] = np.array(place[last])
    place[last].flat[-1] += 1
    shutil.rmtree(path)
    raw.save(path, tree)
  words = f'cannot be read whole: .*the bytes of {leaf}/? are not those'
  builders.assert_refused(words, trained.load, str(copy))
  assert trained.load(str(copy / 'checkpoints/8')).step == 8


@pytest.mark.parametrize(
  'values, words',
  [
    ({'data.image_size': '28'}, "config.data.image_size='28': expected "),
    ({'model.name': 5}, 'config.model.name=5: expected '),
    ({'ema': None}, 'config.ema=None: expected '),
    (None, 'cannot be read whole'),
    ([1], 'cannot be read whole'),
  ],
)
def test_a_config_of_other_types_is_not_used(copy, values, words):
  path = copy / 'checkpoints/12/meta/metadata'
  meta = json.loads(path.read_text())
  config = meta['config'] | values if isinstance(values, dict) else values
  meta = {key: value for key, value in meta.items() if key != 'checksum'} | {'config': config}
  path.write_text(json.dumps(meta | {'checksum': checksums.of_json(meta)}))
  line = builders.assert_refused(words, trained.load, str(copy))
  assert line.startswith(f'{copy}/checkpoints/12 ')


def test_names_of_classes_are_needed(copy):
  (copy / run_dir.LABELS_FILE).unlink()
  builders.assert_refused('no labels.json', trained.load, str(copy))
  names = {'classes': ['a', 'b\x1b[31m'], 'adjectives': [], 'nouns': []}
  for value, words in (
    ({'classes': ['a']}, 'labels.json: .*adjectives'),
    (names, r'labels.json: .*31m. holds a control character'),
  ):
    (copy / run_dir.LABELS_FILE).write_text(json.dumps(value))
    builders.assert_refused(words, trained.load, str(copy))


def test_names_of_classes_stay_those_of_the_run(averaged):
  before = (averaged / run_dir.LABELS_FILE).read_text()
  config = trained.load(str(averaged)).config
  other_classes = vocabulary.Vocabulary(('big_cat', 'old_dog'))
  builders.assert_refused(
    'names of their classes', run_dir.claim_workdir, str(averaged), config, other_classes
  )
  assert (averaged / run_dir.LABELS_FILE).read_text() == before


def test_a_run_of_pairs_goes_on_with_pairs(tmp_path, config):
  pairs = vocabulary.Vocabulary(('big_cat', 'old_dog'), nouns=('cat', 'dog'))
  run_dir.claim_workdir(str(tmp_path), config, pairs)
  (tmp_path / 'checkpoints' / '1').mkdir(parents=True)
  plain = vocabulary.Vocabulary(pairs.names)
  builders.assert_refused('config.data.pairs', run_dir.claim_workdir, str(tmp_path), config, plain)
  config.data.pairs = 'yes'
  run_dir.claim_workdir(str(tmp_path), config, plain.with_pairs('yes'))
  assert run_dir.labels(str(tmp_path)) == pairs


def test_a_workdir_that_cannot_be_written_to_is_one_line(config, tmp_path, monkeypatch):
  """Though its permissions did not tell: a full disk, say."""
  classes = vocabulary.Vocabulary(('a', 'b'))
  full = OSError(28, 'No space left on device')
  monkeypatch.setattr(run_dir.os, 'makedirs', mock.Mock(side_effect=full))
  line = builders.refusal(run_dir.claim_workdir, str(tmp_path / 'run'), config, classes)
  assert line.endswith("/run' cannot be written to: No space left on device; choose another folder")


@pytest.mark.parametrize('listing, sizes', [(('a', 'b', 'c'), [1, 0, 2]), (None, None)])
def test_class_sizes_of_many_images_are_recorded_where_they_are_listed(
  tmp_path, monkeypatch, listing, sizes
):
  source = mock.MagicMock(kind='encoded', vocabulary=('x', 'y', 'z'))
  source.__len__.return_value = 3
  source.labels.return_value = np.array([2, 0, 2])
  source.listing.return_value = listing
  monkeypatch.setattr(run_dir, '_MAX_COUNTED', 2)
  run_dir.record_class_sizes(str(tmp_path), source)
  got = run_dir.class_sizes(str(tmp_path), 3)
  assert sizes == (None if got is None else got.tolist())
