"""Networks on features: a fusion and its contributions, zero-shot scores."""

import csv

import jax
import numpy as np
import pytest
from scipy import special

from anp_jax import config as config_lib, train
from anp_jax.checkpoint import trained as trained_lib
from anp_jax.predict import __main__ as predict, network as network_lib
from tests import builders

_PAIRS = [f'{adjective}_{noun}' for adjective in ('big', 'old') for noun in ('cat', 'dog', 'sea')]
# Sums of a dozen float32 products of order 1 to 10.
_TOLERANCE = 1e-4


def _write(folder, split, count):
  """Two files of the same images in another order: what tells adjectives, and nouns."""
  rng = np.random.default_rng(count)
  labels = np.repeat(np.arange(6), count)
  names = np.array([f'{_PAIRS[label]}/{i}.jpg' for i, label in enumerate(labels)])
  adjective = np.eye(2)[labels // 3] + rng.normal(0, 0.2, (len(labels), 2))
  noun = np.eye(3)[labels % 3] + rng.normal(0, 0.2, (len(labels), 3))
  order = rng.permutation(len(labels))
  np.savez(folder / f'adj-{split}.npz', names=names, logits=adjective)
  np.savez(folder / f'noun-{split}.npz', names=names[order], logits=noun[order])
  return labels, np.concatenate([adjective, noun], 1)


@pytest.fixture(scope='module')
def fusion(tmp_path_factory):
  """A trained fusion: workdir, source, labels and features of its validation split."""
  root = tmp_path_factory.mktemp('fusion')
  _write(root, 'train', 32)
  labels, values = _write(root, 'validation', 8)
  source = f'features:{root}/adj-{{split}}.npz#logits,{root}/noun-{{split}}.npz#logits'
  config = builders.load('configs/features.py:tiny', {'data.source': source})
  train.run(config_lib.resolved(config), str(root / 'run'))
  return root / 'run', source, labels, values


@pytest.mark.slow
def test_a_fusion_learns_and_says_what_each_network_contributes(fusion, capsys):
  workdir, source, labels, values = fusion
  network = trained_lib.load(str(workdir))
  assert network.config.data.widths == (2, 3)
  norm, head = network.params['norm'], network.params['head']
  stats = network.stats['batch_stats']['norm']
  # In evaluation the network is one linear map of the features.
  factor = norm['scale'] / np.sqrt(stats['var'] + 1e-5)
  centred = (values - stats['mean']) * factor
  logits = (centred + norm['bias']) @ head['kernel'] + head['bias']
  parts = np.stack([centred[:, s] @ head['kernel'][s] for s in (slice(0, 2), slice(2, 5))], 1)
  parts -= parts.mean(-1, keepdims=True)
  (folder,) = (workdir / 'evaluation').iterdir()
  saved = np.load(folder / 'logits.npz')
  np.testing.assert_allclose(saved['logits'], logits, atol=_TOLERANCE)
  contributions = parts[np.arange(len(labels)), :, labels]
  np.testing.assert_allclose(saved['contributions'], contributions, atol=_TOLERANCE)
  # Twenty times chance: the features tell words, and no pair by themselves.
  assert (logits.argmax(1) == labels).mean() > 0.9
  for i, row in enumerate(builders.rows(folder / 'classes.csv')):
    want = contributions[labels == i].mean(0)
    got = [float(row[f'{word}_contribution']) for word in ('adjective', 'noun')]
    np.testing.assert_allclose(got, want, atol=_TOLERANCE)
  # The same of each image by predict, for the pair that it names.
  capsys.readouterr()
  paths = source.removeprefix('features:').replace('{split}', 'validation')
  command = ['predict', f'--checkpoint={workdir}', '--explain', '--top=1', paths]
  assert predict.main(command) == 0
  rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
  assert [row['anp'] for row in rows] == [_PAIRS[i] for i in logits.argmax(1)]
  got = [[float(row[f'{word}_contribution']) for word in ('adjective', 'noun')] for row in rows]
  want = parts[np.arange(len(labels)), :, logits.argmax(1)]
  swapped = ','.join(reversed(paths.split(',')))
  assert predict.main(['predict', f'--checkpoint={workdir}', swapped]) == 2
  assert 'has 3 and 2 numbers per example, expected 2 and 3' in capsys.readouterr().err
  # Five digits are printed, of numbers up to 10.
  np.testing.assert_allclose(got, want, atol=5e-4)


@pytest.mark.slow
def test_texts_give_the_zero_shot_scores_of_clip(tmp_path):
  rng = np.random.default_rng(0)
  names = ['old_sea', 'big_cat', 'big_dog', 'old_cat']  # not sorted, one without an image
  texts = rng.normal(size=(4, 16))
  np.savez(tmp_path / 'texts.npz', names=names, features=texts)
  labels = rng.integers(0, 3, 40)
  unit = texts / np.linalg.norm(texts, axis=1, keepdims=True)
  images = unit[labels] + rng.normal(0, 0.3, (40, 16))
  images /= np.linalg.norm(images, axis=1, keepdims=True)
  paths = [f'{names[label]}/{i}.jpg' for i, label in enumerate(labels)]
  np.savez(tmp_path / 'validation.npz', names=paths, features=images)
  keys = {
    'data.source': f'features:{tmp_path}/{{split}}.npz',
    'init.from': f'text:{tmp_path}/texts.npz',
  }
  config = config_lib.resolved(builders.load('configs/features.py:tiny', keys))
  scores = train.run(config, str(tmp_path / 'run'), 'evaluate')
  log = special.log_softmax(100 * images @ unit.T, 1)
  want = -log[np.arange(40), labels].mean()
  np.testing.assert_allclose(scores['loss'], want, rtol=_TOLERANCE)
  assert 0.5 < scores['anp_top1'] == np.float32((log.argmax(1) == labels).mean())
  # Of another length, they would not be scored by the cosine.
  other = images * np.where(labels == 2, 1.02, 1)[:, None]
  np.savez(tmp_path / 'other.npz', names=paths, features=other)
  other_config = config_lib.replaced(config, {'data.eval_split': 'other'})
  words = r"features of 'big_dog/\d+\.jpg' in features:.*: other have length 1.02, expected 1$"
  builders.assert_refused(words, train.run, other_config, str(tmp_path / 'other'), 'evaluate')
  # The same of words alone, which the texts name.
  np.savez(tmp_path / 'words.npz', names=['old', 'big'], features=texts[:2])
  word_keys = keys | {'data.pairs': 'adjectives', 'init.from': f'text:{tmp_path}/words.npz'}
  config = config_lib.resolved(builders.load('configs/features.py:tiny', word_keys))
  scores = train.run(config, str(tmp_path / 'words'), 'evaluate')
  want = (images @ unit[:2].T).argmax(1) == [names[label].startswith('big') for label in labels]
  assert scores['anp_top1'] == np.float32(want.mean())
  # In a training the classes are in the order of the data, and may stay frozen; it may
  # adapt them to features of any length.
  keys |= {
    'data.eval_split': 'other',
    'data.train_split': 'validation',
    'duration': '2 steps',
    'schedule.warmup': '0 steps',
    'optimizer.multipliers': "(('head', 0),)",
  }
  config = config_lib.resolved(builders.load('configs/features.py:tiny', keys))
  train.run(config, str(tmp_path / 'trained'))
  kernel = trained_lib.load(str(tmp_path / 'trained')).params['head']['kernel']
  order = [names.index(name) for name in sorted({path.partition('/')[0] for path in paths})]
  np.testing.assert_allclose(kernel, 100 * unit[order].T, rtol=1e-6)
  np.savez(tmp_path / 'texts.npz', names=names[1:], features=texts[1:])
  words = "no text of the class 'old_sea'"
  builders.assert_refused(words, train.run, config, str(tmp_path / 'other'))


def test_features_are_what_the_classifier_reads():
  from anp_jax import models

  config = builders.load('configs/lenet.py', {'data.image_size': '28', 'data.resize': '28'})
  model = models.create(config, 10, 'cpu')
  images = np.random.default_rng(0).normal(size=(2, 28, 28, 3)).astype(np.float32)
  variables = model.init(jax.random.key(0), images, False)
  with network_lib._dense_inputs() as inputs:
    logits = model.apply(variables, images, False)
  head = variables['params']['head']
  assert inputs[-1].shape == (2, 500)
  np.testing.assert_allclose(inputs[-1] @ head['kernel'] + head['bias'], logits, atol=1e-5)
