"""Heads in training: one update by hand, and with every strategy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special
from sklearn.utils import class_weight

from anp_jax import config as config_lib, train
from anp_jax.checkpoint import trained
from anp_jax.config import command_line
from anp_jax.reporting import telemetry
from anp_jax.system import cores
from tests import builders, programs

PAIRS = ('cute_cat', 'cute_dog', 'wild_cat', 'wild_sea', 'mild_sea', 'mild_dog')
# Of each class, by hand: cute, mild, wild; cat, dog, sea.
WORDS = (np.array([0, 0, 2, 2, 1, 1]), np.array([0, 1, 0, 2, 2, 1]))
CLASS_WEIGHTS = (0.5, 1.0, 2.0, 1.5, 0.25, 1.0)
BATCH, RATE = 8, 0.1


def _config(**overrides):
  config = command_line.load('configs/resnet_anp.py:tiny', {})
  changes = {
    'model.name': 'tests.user_network:PlainNet',
    'data.image_size': 16,
    'data.resize': 16,
    'batch_size': BATCH,
    'model.norm_group': 2,  # a device has two images
    'log.tensorboard': False,
    **overrides,
  }
  return config_lib.resolved(config_lib.replaced(config, changes))


def _loss(outputs, labels, head):
  """The loss of each example, written down class by class."""

  def cross_entropy(logits, smoothed):
    shifted = logits - logits.max(-1, keepdims=True)
    log = shifted - jnp.log(jnp.exp(shifted).sum(-1, keepdims=True))
    return -(smoothed * log).sum(-1)

  smoothed = np.full((BATCH, 6), 0.1 / 6)
  smoothed[np.arange(BATCH), labels] += 0.9
  words = []
  for i, ids in enumerate(WORDS):
    target = np.zeros((BATCH, 3))
    for label, word in enumerate(ids):
      target[:, word] += smoothed[:, label]
    first = outputs.shape[1] - 6 + 3 * i
    words.append(cross_entropy(outputs[:, first : first + 3], target))
  total = words[0] + words[1]
  if head == 'multitask':
    total = cross_entropy(outputs[:, :6], smoothed) + 0.5 * total
  return total * np.array(CLASS_WEIGHTS)[labels]


@pytest.mark.slow
@pytest.mark.parametrize('head, devices', [('multitask', 2), ('factored', 4)])
def test_one_update_equals_one_by_hand(x64, head, devices):
  config = _config(
    **{
      'model.head': head,
      'model.dtype': 'float64',
      'model.param_dtype': 'float64',
      'label_smoothing': 0.1,
      'optimizer.name': 'sgd',
      'optimizer.learning_rate': RATE,
      'optimizer.weight_decay': 0.0,
      'schedule.name': 'constant',
      'schedule.warmup': '0 steps',
    }
  )
  parts = programs.build(config, devices, PAIRS, CLASS_WEIGHTS)
  batch = programs.batch(0, BATCH, 16, 6)
  state = parts.new_state()
  before = jax.device_get(state.params)
  mean, std = np.float64(config.data.mean), np.float64(config.data.std)
  images = (batch['image'] - mean) / std

  def loss_fn(params):
    outputs = parts.model.apply({'params': params}, images, True)
    assert outputs.shape == (BATCH, {'multitask': 12, 'factored': 6}[head])
    # Divided by the number of examples, whatever they weigh.
    return _loss(outputs, batch['label'], head).sum() / BATCH

  loss, gradients = jax.value_and_grad(loss_fn)(before)
  state, values = parts.train_step(state, programs.put(batch, parts.spec.mesh))
  # float64; sums over devices in another order.
  np.testing.assert_allclose(values[0], loss, rtol=1e-12)
  jax.tree.map(
    lambda new, old, g: np.testing.assert_allclose(new, old - RATE * g, rtol=1e-10, atol=1e-12),
    jax.device_get(state.params),
    before,
    jax.device_get(gradients),
  )


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


def _run_config(path, **overrides):
  return _config(
    **{
      'data.source': 'arrays',
      'data.path': path,
      'model.head': 'factored',
      'data.held_out': ('wild_sea',),
      'data.balance': 'sample',
      'data.mixup': 0.2,
      'label_smoothing': 0.1,
      'ema': 0.5,
      'duration': '6 steps',
      **overrides,
    }
  )


@pytest.mark.slow
def test_loss_of_a_run_is_weighted(pairs, tmp_path, monkeypatch):
  """One step on all examples, of classes of unlike sizes."""
  builders.use_devices(monkeypatch, 1)
  config = _run_config(
    pairs,
    **{
      'model.head': 'joint',
      'data.held_out': (),
      'data.balance': 'weights',
      'data.mixup': 0.0,
      'label_smoothing': 0.0,
      'ema': 0.0,
      'data.augment': 'none',
      'batch_size': 64,
      'duration': '1 steps',
      'schedule.warmup': '0 steps',
      'optimizer.learning_rate': 0.0,
      'optimizer.weight_decay': 0.0,
    },
  )
  train.run(config, str(tmp_path))
  (line,) = [r for r in telemetry.read(str(tmp_path)) if r['kind'] == 'train']
  # With a learning rate of 0 the network is still the one that it saw.
  network = trained.load(str(tmp_path))
  with np.load(pairs) as arrays:
    images, labels = arrays['train_images'], arrays['train_labels']
  images = (images - np.array(config.data.mean)) / np.array(config.data.std)
  logits = network.model('cpu').apply({'params': network.params}, np.float32(images), False)
  losses = -special.log_softmax(np.float64(logits), 1)[np.arange(64), labels]
  weights = class_weight.compute_sample_weight('balanced', labels)
  assert weights.max() > 3
  # float32.
  assert line['loss'] == pytest.approx((weights * losses).mean(), rel=1e-5)
  assert line['loss'] != pytest.approx(losses.mean(), rel=1e-4)


@pytest.fixture(scope='module')
def plain(pairs, tmp_path_factory):
  """What strategy sync ends as."""
  config = _run_config(pairs)
  chosen_devices = jax.devices()[:2]
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(jax, 'devices', lambda: chosen_devices)
    return train.run(config, str(tmp_path_factory.mktemp('sync')))


@pytest.mark.slow
def test_invariant_trains_what_sync_does(pairs, plain, tmp_path, monkeypatch, capsys):
  builders.use_devices(monkeypatch, 2)
  overrides = {
    'strategy.name': 'invariant',
    'strategy.logical_shards': 4,
    'strategy.threads': max(8, cores.count()),  # of this process's pool
  }
  scores = train.run(_run_config(pairs, **overrides), str(tmp_path))
  assert scores.keys() == plain.keys() >= {'noun_top1', 'adjective_top1'}
  text = capsys.readouterr().out
  assert ', head factored\n' in text and ', balanced by sample\n' in text
  # float32 sums in another order, over six steps.
  assert scores['loss'] == pytest.approx(plain['loss'], rel=1e-4)


@pytest.mark.soak
def test_model_ring_scores_models_of_several_heads(pairs, tmp_path, monkeypatch, capsys):
  chosen_devices = jax.devices()[:1]
  monkeypatch.setattr(jax, 'devices', lambda: chosen_devices)
  monkeypatch.setattr(jax, 'local_devices', lambda **_: chosen_devices)
  config = _run_config(
    pairs,
    **{
      'strategy.name': 'model_ring',
      'duration': '1 epochs',
      'data.balance': 'none',
      'schedule.warmup': '0 steps',
      'checkpoint.every': '1 epochs',
      'eval.every': '1 epochs',
      'strategy.models': ('model.head=multitask', 'model.head=factored'),
    },
  )
  train.run(config, str(tmp_path))
  lines = [line for line in capsys.readouterr().out.splitlines() if '  lap 1 of 1' in line]
  assert len(lines) == 2 and all('noun' in line and 'nan' not in line for line in lines)
