"""Heads in training: the loss of a run, and models of several heads."""

import numpy as np
import pytest
from scipy import special
from sklearn.utils import class_weight

from anp_jax import config as config_lib, train
from anp_jax.checkpoint import trained
from anp_jax.config import command_line
from anp_jax.reporting import telemetry
from tests import builders, serving

PAIRS = ('cute_cat', 'cute_dog', 'wild_cat', 'wild_sea', 'mild_sea', 'mild_dog')
# Of each class, by hand: cute, mild, wild; cat, dog, sea.
WORDS = (np.array([0, 0, 2, 2, 1, 1]), np.array([0, 1, 0, 2, 2, 1]))


@pytest.fixture(scope='module')
def pairs(tmp_path_factory):
  """64 and 36 images whose colour tells the pair."""
  random = np.random.default_rng(0)
  arrays = {'class_names': np.array(PAIRS)}
  sizes = {'train': (24, 16, 10, 6, 5, 3), 'validation': (6,) * 6}
  for split, counts in sizes.items():
    labels, count = np.repeat(np.arange(6), counts), sum(counts)
    images = random.integers(0, 100, (count, 16, 16, 3))
    images[..., 0] += 50 * WORDS[0][labels][:, None, None]
    images[..., 1] += 50 * WORDS[1][labels][:, None, None]
    arrays |= {f'{split}_images': images.astype(np.uint8)}
    arrays |= {f'{split}_labels': labels}
  path = tmp_path_factory.mktemp('pairs') / 'set.npz'
  np.savez(path, **arrays)
  return str(path)


def _config(path, **overrides):
  config = command_line.load('configs/resnet_anp.py:tiny', {})
  changes = {
    'model.name': 'tests.user_network:PlainNet',
    'model.head': 'factored',
    'data.image_size': 16,
    'data.resize': 16,
    'data.source': 'arrays',
    'data.path': path,
    'schedule.warmup': '0 steps',
    'log.tensorboard': False,
    **overrides,
  }
  return config_lib.resolved(config_lib.replaced(config, changes))


@pytest.mark.slow
def test_loss_of_a_run_is_weighted(pairs, tmp_path, monkeypatch, capsys):
  """One step on all examples, of classes of unlike sizes."""
  builders.use_devices(monkeypatch, 1)
  config = _config(
    pairs,
    **{
      'data.balance': 'weights',
      'data.augment': 'none',
      'batch_size': 64,
      'duration': '1 steps',
      'optimizer.learning_rate': 0.0,
      'optimizer.weight_decay': 0.0,
    },
  )
  train.run(config, str(tmp_path))
  text = capsys.readouterr().out
  assert ', head factored\n' in text and ', balanced by weights\n' in text
  (line,) = telemetry.of_kind(str(tmp_path), 'train')
  # With a learning rate of 0 the network is still the one that it saw.
  network = trained.load(str(tmp_path))
  with np.load(pairs) as arrays:
    images, labels = arrays['train_images'], arrays['train_labels']
  images = (images - np.array(config.data.mean)) / np.array(config.data.std)
  logits = network.model('cpu').apply({'params': network.params}, np.float32(images), False)
  losses = np.zeros(64)
  for part, ids in zip(np.split(np.float64(logits), 2, 1), WORDS, strict=True):
    losses -= special.log_softmax(part, 1)[np.arange(64), ids[labels]]
  weights = class_weight.compute_sample_weight('balanced', labels)
  assert weights.max() > 3
  # float32.
  assert line['loss'] == pytest.approx((weights * losses).mean(), rel=1e-5)
  assert line['loss'] != pytest.approx(losses.mean(), rel=1e-4)


@pytest.mark.soak
def test_model_ring_scores_models_of_several_heads(pairs, tmp_path, monkeypatch, capsys):
  builders.use_devices(monkeypatch, 1)
  serving.on_devices(monkeypatch, 1)
  config = _config(
    pairs,
    **{
      'strategy.name': 'model_ring',
      'batch_size': 8,
      'data.held_out': ('wild_sea',),
      'data.mixup': 0.2,
      'label_smoothing': 0.1,
      'ema': 0.5,
      'duration': '1 epochs',
      'checkpoint.every': '1 epochs',
      'eval.every': '1 epochs',
      'strategy.models': ('model.head=multitask', 'model.head=factored'),
    },
  )
  train.run(config, str(tmp_path))
  lines = [line for line in capsys.readouterr().out.splitlines() if '  lap 1 of 1' in line]
  assert len(lines) == 2 and all('noun' in line and 'nan' not in line for line in lines)
