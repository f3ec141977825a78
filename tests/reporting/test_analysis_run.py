"""A run, from training to the evaluation of other data."""

import json
import os
import shutil

import jax
import numpy as np
import pytest

from anp_jax import cluster, config as config_lib, train
from anp_jax.config import command_line, strategy as strategy_lib
from anp_jax.reporting import run_page
from anp_jax.reporting.analysis import analysis_run
from tests import builders, launching

ADJECTIVES, NOUNS = ('big', 'old', 'red'), ('cat', 'dog', 'sun', 'tree')
NAMES = tuple(f'{a}_{n}' for a in ADJECTIVES for n in NOUNS)
HELD_OUT = ('big_cat', 'red_tree')


def _save(path, names, count, seed, split='validation'):
  """Images whose brightness is their class's place among NAMES."""
  random = np.random.default_rng(seed)
  labels = random.integers(0, len(names), count)
  places = np.array([NAMES.index(name) for name in names])[labels]
  images = random.integers(0, 20, (count, 16, 16, 3)) + 19 * (places[:, None, None, None])
  arrays = {
    f'{split}_images': images.astype(np.uint8),
    f'{split}_labels': labels,
    'class_names': np.array(names),
  }
  if path.exists():
    with np.load(path) as before:
      arrays = {**before, **arrays}
  np.savez(path, **arrays)
  return labels


def _tiny(path):
  config = builders.load(
    'configs/resnet_anp.py:tiny',
    {
      'data.image_size': '16',
      'data.resize': '16',
      'data.source': 'arrays',
      'data.path': str(path),
      'eval.examples': 'True',
      'log.tensorboard': 'False',
      'model.name': 'tests.user_network:SmallNet',
      'duration': '6 steps',
      # An evaluation, which has no training examples, knows no epochs.
      'schedule.name': 'step',
      'schedule.every': '1 epochs, 2 epochs',
      'strategy.name': 'local_sgd',
      'strategy.groups': '1',
      'strategy.period': '1,2@1 epochs,4@2 epochs',
      'data.held_out': repr(HELD_OUT),
      'model.head': 'factored',
    },
  )
  return config


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  """A finished run whose training data are gone."""
  place = tmp_path_factory.mktemp('run')
  data = place / 'set.npz'
  labels = _save(data, NAMES, 64, 0, 'train')
  _save(data, NAMES, 50, 1)
  config = _tiny(data)
  (place / 'mine').mkdir()
  (place / 'work').mkdir()
  for name in ('evaluation', 'report'):
    (place / 'work' / name).symlink_to(place / 'mine')
  scores = builders.train_alone(config, place / 'work')
  data.unlink()
  return place, config, scores | {'labels': labels}


def test_a_training_ends_with_an_evaluation_and_a_page(run):
  place, _, scores = run
  assert not [*(place / 'mine').iterdir()]  # the workdir's links are not followed
  folder = place / 'work' / 'evaluation' / '6-validation'
  evaluation = json.loads((folder / 'scores.json').read_text())
  assert evaluation['step'] == 6 and evaluation['scores']['examples'] == 50
  assert evaluation['scores']['anp_top1'] == scores['anp_top1']
  rows = builders.rows(folder / 'predictions.csv')
  right = sum(row['label'] == row['predicted'] for row in rows)
  assert right / 50 == pytest.approx(scores['anp_top1'], abs=1e-6)
  for i, row in enumerate(builders.rows(folder / 'classes.csv')):
    count = 0 if NAMES[i] in HELD_OUT else (scores['labels'] == i).sum()
    assert int(row['training_images']) == count
  ours = [row for row in rows if row['label'] in HELD_OUT]
  right = sum(row['label'] == row['predicted'] for row in ours)
  totals = evaluation['scores']
  assert totals['unseen_top1'] == right / len(ours) and totals['unseen_images'] == len(ours)
  assert 0 <= right / len(ours) <= totals['best_unseen']
  with np.load(folder / 'logits.npz') as saved:
    best = saved['logits'].argmax(1)
    assert [NAMES[i] for i in best] == [row['predicted'] for row in rows]
    assert [NAMES[i] for i in saved['label']] == [row['label'] for row in rows]
  # The classes are all combinations; ties after another sum in float32 are none here.
  assert totals['open_pairs'] == 2
  for name in ('best_unseen', 'harmonic_mean', 'auc'):
    assert totals[f'open_{name}'] == pytest.approx(totals[name], abs=1e-9)
  page = (place / 'work' / 'report' / 'index.html').read_text()
  assert page.count('data:image/png') >= 6 + 12


def test_a_link_in_a_run_leads_nowhere(tmp_path, config):
  folder = builders.write_tree(tmp_path / 'mine', {'run.json': '{"config": ""}'})
  work = tmp_path / 'work'
  work.mkdir()
  for name in ('evaluation', 'report'):
    (work / name).symlink_to(folder)
  invocation = strategy_lib.Invocation(config, str(work), cluster.Processes(config), 'evaluate')
  evaluation = analysis_run._open_folder(invocation, 7)
  assert os.path.realpath(evaluation).startswith(f'{os.path.realpath(work)}/evaluation/7-')
  assert not run_page.rewrite(str(work), evaluation)
  assert [path.name for path in folder.iterdir()] == ['run.json']


@pytest.mark.slow
def test_other_data_of_the_runs_classes_on_any_devices(run, tmp_path, monkeypatch, capsys):
  place, config, _ = run
  some = ('red_tree', 'big_cat', 'old_sun')
  labels = _save(tmp_path / 'other.npz', some, 21, 3, 'test')
  config = builders.editable(config)
  config.data.path = str(tmp_path / 'other.npz')
  config.data.eval_split = 'test'
  everything, tables = jax.devices(), []
  for count in (1, 8):
    monkeypatch.setattr(jax, 'devices', lambda n=count: everything[:n])
    output = tmp_path / f'out{count}'
    scores = train.run(config, str(place / 'work'), 'evaluate', output=str(output))
    assert scores['examples'] == 21
    tables.append(builders.rows(output / 'predictions.csv'))
    text = capsys.readouterr().out
    assert 'checkpoint of step 6, 21 images' in text
    assert 'macro_accuracy' in text and str(output) in text
  assert [row['label'] for row in tables[0]] == [some[i] for i in labels]
  for row, want in zip(*tables, strict=True):
    assert row['predicted'] == want['predicted']
    # Six digits of float32, whose sums are in another order.
    assert float(row['probability']) == pytest.approx(float(want['probability']), rel=1e-4)


def test_an_evaluation_of_other_pixels_is_kept_apart_and_says_so(run, tmp_path, capsys):
  place, config, _ = run
  work = shutil.copytree(place / 'work', tmp_path / 'work')
  before = builders.read_tree(work / 'evaluation' / '6-validation')
  _save(tmp_path / 'set.npz', NAMES, 50, 1)
  changes = {'data.path': str(tmp_path / 'set.npz'), 'data.mean': (127.5, 1.0, 2.0)}
  train.run(config_lib.replaced(config, changes), str(work), 'evaluate')
  assert builders.read_tree(work / 'evaluation' / '6-validation') == before
  folder = work / 'evaluation' / '6-validation-data-mean-127-5-1-0-2-0-of-set-npz'
  evaluation = json.loads((folder / 'scores.json').read_text())
  assert evaluation['data'].endswith('validation; data.mean=(127.5, 1.0, 2.0)')
  for page in folder / 'evaluation.md', work / 'report' / 'index.html':
    assert 'data.mean=(127.5, 1.0, 2.0)' in page.read_text()
  line = 'config.data.mean is (127.5, 1.0, 2.0), and was [123.68, 116.78, 103.94] in training'
  assert line in capsys.readouterr().out


def test_a_class_that_the_run_does_not_know_and_another_network_are_one_line(run, tmp_path):
  place, config, _ = run
  config = builders.editable(config)
  config.data.path = str(tmp_path / 'a.npz')
  _save(tmp_path / 'a.npz', NAMES, 8, 0)
  config.seed = 3
  builders.assert_refused('config.seed is 3', train.run, config, str(place / 'work'), 'evaluate')
  with np.load(tmp_path / 'a.npz') as arrays:
    arrays = dict(arrays, class_names=np.array(['old_sunn', *NAMES[1:]]))
  np.savez(tmp_path / 'a.npz', **arrays)
  words = "has the class 'old_sunn'", "did you mean 'old_sun'"
  builders.assert_refused(words, train.run, config, str(place / 'work'), 'evaluate')


@pytest.mark.slow
def test_a_lexicon_of_the_classes_is_scored(run, tmp_path, capsys):
  place, config, _ = run
  config = builders.editable(config)
  config.data.path = str(tmp_path / 'a.npz')
  labels = _save(tmp_path / 'a.npz', NAMES, 30, 4)
  path = tmp_path / 'mood.csv'
  path.write_text(''.join(f'{name},{i / 8 - 0.7:.3f}\n' for i, name in enumerate(NAMES[1:])))
  output = str(tmp_path / 'out')
  files = {'output': output, 'sentiment': str(path)}
  how = str(place / 'work'), cluster.Processes(config), 'evaluate'
  train.start(strategy_lib.Invocation(config, *how, **files))
  totals = json.loads((tmp_path / 'out' / 'scores.json').read_text())['scores']
  assert totals['sentiment_images'] == (labels > 0).sum()
  lines = capsys.readouterr().out.splitlines()
  assert any('mood.csv has 11 of the 12 classes' in line for line in lines)
  for name in ('sentiment_spearman', 'sentiment_sign', 'harmonic_mean', 'mean_average_precision'):
    assert any(line.split()[:1] == [name] for line in lines), name
  page = (tmp_path / 'out' / 'evaluation.md').read_text()
  assert f'| sentiment, same sign | {100 * totals["sentiment_sign"]:.1f}% |' in page
  path.write_text('old_cat\n')
  with pytest.raises(config_lib.ConfigError, match='mood.csv:1: '):
    train.start(strategy_lib.Invocation(config, *how, **files))


class _Flags:
  config, mode, checkpoint, output, change = '', 'evaluate', 'newest', '', ''
  sentiment, emotions = '', ''


def test_the_config_of_a_run_is_in_its_workdir(run, tmp_path):
  place, config, _ = run
  _save(tmp_path / 'a.npz', NAMES, 8, 0)
  flags = _Flags()
  flags.workdir = str(place / 'work')
  path = str(tmp_path / 'a.npz')
  run_config, workdir = command_line.from_flags(flags, {'data.path': path})
  assert workdir == str(place / 'work')
  want = builders.editable(config)
  want.data.path = path
  assert config_lib.flat(run_config) == config_lib.flat(want)
  builders.assert_refused('data.path', command_line.from_flags, flags, {})
  flags.mode = 'train'
  builders.assert_refused('--config=FILE', command_line.from_flags, flags, {'data.path': path})
  flags.mode, flags.workdir = 'evaluate', str(tmp_path)
  builders.assert_refused('--config=FILE', command_line.from_flags, flags, {})


def test_a_folder_to_write_to_is_for_evaluations(run, tmp_path):
  flags = _Flags()
  flags.config, flags.workdir = 'configs/resnet_anp.py:tiny', str(tmp_path)
  flags.mode, flags.output = 'train', 'out'
  builders.assert_refused('--output=out', command_line.from_flags, flags, {})
  flags.mode, flags.output = 'evaluate', str(tmp_path / 'file')
  (tmp_path / 'file').write_text('')
  builders.assert_refused('is a file', command_line.from_flags, flags, {})
  flags.mode, flags.output, flags.sentiment = 'train', '', 'mood.csv'
  with pytest.raises(config_lib.ConfigError, match='--sentiment=mood.csv is for --mode=evaluate'):
    command_line.from_flags(flags, {})
  flags.mode, flags.sentiment = 'evaluate', ''
  flags.config, flags.output = 'configs/model_ring_anp.py:tiny', 'out'
  builders.assert_refused('leaderboard', command_line.from_flags, flags, {})


@pytest.mark.multiprocess
def test_two_processes_write_what_one_does(tmp_path, monkeypatch):
  builders.use_devices(monkeypatch, 1)
  config = builders.load('configs/resnet_anp.py:tiny', launching.TINY)
  work = str(tmp_path / 'work')
  train.run(config, work)
  train.run(config, work, 'evaluate')
  texts = launching.run(
    tmp_path / 'logs',
    2,
    ['--trust', f'--workdir={work}', '--mode=evaluate', f'--output={tmp_path / "two"}'],
  )
  assert 'checkpoint of step 12, 70 images' in texts[0]
  single = builders.rows(tmp_path / 'work/evaluation/12-validation/predictions.csv')
  two = builders.rows(tmp_path / 'two/predictions.csv')
  assert len(single) == len(two) == 70
  for a, b in zip(single, two):
    assert a['label'] == b['label']
    # A device has other rows: float32 sums may be in another order.
    assert float(a['loss']) == pytest.approx(float(b['loss']), rel=1e-4)
