"""A data set, optimizer, schedule and head of the user's own, named by address."""

import math

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from anp_jax import config as config_lib, experiment, models, train
from anp_jax.checkpoint import trained
from anp_jax.config import command_line
from anp_jax.data import sources
from anp_jax.parallel import mesh as mesh_lib
from anp_jax.reporting import telemetry
from anp_jax.training import optimizer
from tests import builders, image_sources, user_network, user_source, user_training

_KEYS = {
  'data.source': 'tests.user_source:Circles',
  'data.image_size': '16',
  'data.resize': '16',
  'data.augment': 'none',
  'model.name': 'tests.user_network:PlainNet',
  'model.head': 'tests.user_training:Hinge',
  'model.norm_group': '2',
  'optimizer.name': 'tests.user_training:plain_descent',
  'optimizer.arguments': "(('scale', 0.5),)",
  'optimizer.learning_rate': '0.2',
  'optimizer.weight_decay': '0.0',
  'schedule.name': 'tests.user_training:linear',
  'schedule.warmup': '0 steps',
  'batch_size': '16',
  'duration': '4 steps',
  'eval.every': '4 steps',
  'log.every': '1 steps',
}


def test_a_run_of_own_parts(tmp_path):
  config = command_line.load('configs/resnet_anp.py:tiny', _KEYS)
  scores = train.run(config, str(tmp_path))
  assert 0 <= scores['anp_top1'] <= 1
  lines = telemetry.of_kind(str(tmp_path), 'train')
  rates = [line['learning_rate'] for line in lines]
  np.testing.assert_allclose(rates, 0.2 * (1 - np.arange(4) / 4), rtol=1e-6)
  # The hinge loss of two classes whose outputs are alike is half a margin.
  assert lines[0]['loss'] == pytest.approx(0.5, abs=0.2)
  result = trained.load(str(tmp_path))
  assert result.step == 4 and result.vocabulary.names == ('circle', 'square')


def test_a_config_in_python(tmp_path):
  """A notebook says only what differs; keys that do not apply are left out."""
  config = config_lib.base()
  config.data.update(source=_KEYS['data.source'], image_size=16, resize=16, augment='none')
  config.model.name, config.schedule.warmup = _KEYS['model.name'], '0 steps'
  config.batch_size, config.model.norm_group, config.duration = 16, 2, '1 steps'
  config.optimizer.learning_rate = -1.0
  builders.assert_refused('learning_rate=-1.0: expected', train.run, config, str(tmp_path))
  config.optimizer.learning_rate = 0.1
  assert train.run(config, str(tmp_path))['examples'] == 32


def test_a_resume_says_that_other_images_are_scored(tmp_path, monkeypatch, capsys):
  texts = []
  for steps, count in (4, 32), (8, 20):
    changed = _source(__len__=lambda self, n=count: 64 if 'train' in self.name else n)
    monkeypatch.setattr(user_source, 'Mine', changed, raising=False)
    keys = _KEYS | {'data.source': _MINE, 'duration': f'{steps} steps'}
    train.run(command_line.load('configs/resnet_anp.py:tiny', keys), str(tmp_path))
    texts.append(''.join(capsys.readouterr()))
  line = 'caution  scores are of 20 images from here on, 32 before'
  assert [line in text for text in texts] == [False, True]


def test_a_source_is_given_its_split_and_path():
  # What a path is, a class of the user's decides.
  config = command_line.load('configs/resnet_anp.py:tiny', _KEYS | {'data.path': 'table of 2'})
  splits = [sources.open_source(config, training) for training in (True, False)]
  assert [len(s) for s in splits] == [64, 32]
  assert splits[0].name == 'circles: train table of 2'
  (image,), labels = splits[0].read(np.array([1]))
  # A square of 10 x 10 pixels; labels alternate.
  assert np.count_nonzero(image[..., 0]) == 100 and labels.tolist() == [1]


def test_an_optimizer_of_optax_by_its_address():
  changes = {'optimizer.name': 'optax:lion', 'optimizer.arguments': (('b1', 0.8),)}
  changes |= {'optimizer.weight_decay': 0.03, 'optimizer.learning_rate': 0.1}
  config = config_lib.replaced(builders.config(), {**changes, 'schedule.name': 'constant'})
  random = np.random.default_rng(0)
  params, gradients = ({'kernel': random.normal(size=(3, 4))} for _ in range(2))
  transform = optimizer.create(config, 8, 80, 100)
  updates, _ = transform.update(gradients, transform.init(params), params)
  # The first direction is the gradient's sign; the decay is applied by lion itself.
  expected = -0.1 * (np.sign(gradients['kernel']) + 0.03 * params['kernel'])
  np.testing.assert_allclose(updates['kernel'], expected, rtol=1e-5)


def test_an_argument_of_an_optimizer_may_have_any_name():
  # Without noise and momentum it is gradient descent; `key` seeds the noise.
  arguments = (('eta', 0.0), ('gamma', 0.55), ('key', 1))
  changes = {'optimizer.name': 'optax:noisy_sgd', 'optimizer.arguments': arguments}
  changes |= {'schedule.name': 'constant', 'optimizer.learning_rate': 0.5}
  config = config_lib.replaced(builders.config(), {**changes, 'optimizer.weight_decay': 0.0})
  gradients = params = {'kernel': np.ones((3, 4), np.float32)}
  transform = optimizer.create(config, 8, 80, 100)
  updates, _ = transform.update(gradients, transform.init(params), params)
  np.testing.assert_allclose(updates['kernel'], np.full((3, 4), -0.5))


def no_updates(rate):
  """An optimizer that forgets to return what it makes."""
  optax.sgd(rate)


@pytest.mark.parametrize(
  'changes, words',
  [
    (
      {'optimizer.name': 'optax:adamw', 'optimizer.arguments': (('weight_decay', 0.1),)},
      ["optimizer.arguments=(('weight_decay', 0.1),): expected none of weight_decay, "],
    ),
    ({'optimizer.name': f'{__name__}:no_updates'}, 'expected a function that returns an optax.'),
  ],
)
def test_an_optimizer_that_does_not_suit_is_refused(changes, words):
  config = config_lib.replaced(builders.config(), changes)
  builders.assert_refused(words, optimizer.create, config, 8, 80, 100)


def _created(pairs):
  keys = {'model.name': 'tests.user_network:SmallNet', 'model.arguments': pairs}
  config = command_line.load('configs/resnet_anp.py:tiny', _KEYS | keys)
  return models.create(config, 2, 'cpu')


def test_arguments_of_an_own_network():
  network = _created("(('norm', False), ('drop', 0.25))")
  assert network == user_network.SmallNet(2, 'float32', 'float32', drop=0.25, norm=False)


@pytest.mark.parametrize(
  'pairs, words',
  [
    ("(('dtype', 'bfloat16'),)", ['model.arguments', 'expected none of num_classes, dtype, ']),
    ("(('depth', 3),)", ['model.name', "unexpected keyword argument 'depth'"]),
    ("(('depth', 3, 4),)", ['model.arguments', 'expected pairs such as']),
    ("(('depth', {1: 2}),)", ['model.arguments', 'expected ']),
    ('((True, 3),)', ['model.arguments', 'expected pairs such as']),
  ],
)
def test_arguments_that_an_own_network_cannot_take_are_refused(pairs, words):
  builders.assert_refused(words, _created, pairs)


@pytest.mark.parametrize(
  'key, name, line',
  [
    ('data.source', 'tests.user_source:Circle', "did you mean 'Circles'"),
    ('data.source', 'tests.user_network:SmallNet', 'expected a class that inherits from'),
    ('model.head', 'tests.user_source:Circles', 'expected a class that inherits from'),
    ('optimizer.name', 'optax:lions', "did you mean 'lion'"),
    ('optimizer.name', 'optax:clip', 'unexpected keyword argument'),
    ('schedule.name', 'tests.no_such_module:linear', 'ModuleNotFoundError'),
  ],
)
def test_a_wrong_address_is_one_line(tmp_path, key, name, line):
  config = command_line.load('configs/resnet_anp.py:tiny', _KEYS | {key: name})
  builders.assert_refused((line, f'config.{key}'), train.run, config, str(tmp_path))


_MINE = 'tests.user_source:Mine'


def _source(**parts):
  return type('Mine', (user_source.Circles,), parts)


def _reading(images, labels):
  return _source(read=lambda self, indices: (images, labels))


def _network(output, trained=lambda self, x: x):
  class Mine(nn.Module):
    num_classes: int

    @nn.compact
    def __call__(self, images, train):
      x = output(nn.Dense(self.num_classes)(images.mean((1, 2))))
      return trained(self, x) if train else x

  return Mine


def _without_train(self, images):
  return nn.Dense(self.num_classes)(images.mean((1, 2)))


def _head(**parts):
  return type('Mine', (user_training.Hinge,), parts)


def _optimizer(init, update):
  return lambda learning_rate: optax.GradientTransformation(init, update)


_PIXELS = np.zeros((16, 16, 3), np.uint8)
_FORM = r'expected read\(\[0, 1\]\) to return images .*uint8 and integer labels, one for each index'
_SHAPE = 'expected a network that returns .batch, 2. numbers'
_RATES = 'expected a function that returns an array of the shape of its argument'
_UPDATES = 'expected one whose updates have the shapes of the parameters'


@pytest.mark.parametrize(
  'key, part, pattern',
  [
    (
      'data.source',
      _source(kind='pixel'),
      "expected kind to be 'encoded' or 'pixels', not 'pixel'",
    ),
    ('data.source', _source(kind='synthetic'), "not 'synthetic'"),
    ('data.source', _source(kind='vectors'), "not 'vectors'"),
    ('data.source', _source(kind=None), 'expected a class that defines kind$'),
    ('data.source', _source(labels=sources.Source.labels), 'a class that defines labels$'),
    ('data.source', _source(__len__=sources.Source.__len__), 'a class that defines __len__$'),
    ('data.source', _source(vocabulary=property(lambda s: ('a', 'b'), lambda *_: None)), 'vocab'),
    (
      'data.source',
      _source(__init__=lambda self: None),
      "expected a class with an argument 'split'",
    ),
    ('data.source', _source(kind='encoded'), 'to return images bytes and'),
    ('data.source', _reading([_PIXELS / 255], np.array([0])), _FORM),
    ('data.source', _reading([_PIXELS.transpose(2, 0, 1)], np.array([0])), _FORM),
    ('data.source', _reading([_PIXELS[..., 0]], np.array([0])), _FORM),
    ('data.source', _reading([_PIXELS[..., [0, 1, 2, 2]]], np.array([0])), _FORM),
    ('data.source', _reading([_PIXELS, _PIXELS], np.array([0])), _FORM),
    ('data.source', _reading([_PIXELS], np.array([])), _FORM),
    ('data.source', _reading([_PIXELS], np.array([0.0])), _FORM),
    ('data.source', _source(read=lambda self, indices: None), _FORM),
    ('model.name', _network(lambda x: x[:, :1]), _SHAPE),
    ('model.name', _network(lambda x: (x, x)), _SHAPE),
    ('model.name', _network(lambda x: None), _SHAPE),
    ('model.name', _network(lambda x: x.mean(0, keepdims=True)), _SHAPE),
    ('model.name', _network(lambda x: x.reshape(2, -1)), _SHAPE),  # of one size
    # Faults of the call that trains.
    ('model.name', _network(jnp.array, lambda _, x: (x, x)), _SHAPE),
    ('model.name', _network(jnp.array, lambda _, x: x[:, :1]), _SHAPE),
    ('model.name', _network(jnp.array, lambda self, x: x + self.make_rng('noise')), 'InvalidRng'),
    ('model.name', _network(jnp.array, lambda _, x: nn.Dense(2)(x)), 'ScopeParamNotFoundError: '),
    ('model.name', _network(jnp.array, lambda _, x: x if x.sum() > 0 else -x), 'TracerBool'),
    ('model.name', type('Mine', (_network(None),), {'__call__': _without_train}), 'TypeError: '),
    ('model.head', _head(loss=lambda *_: jnp.zeros((2, 1))), 'that gives loss of shape .2,. for'),
    ('model.head', _head(loss=lambda *_: jnp.zeros(())), 'that gives loss of shape .2,. for'),
    ('model.head', _head(logits=lambda self, x: x[:, :1]), 'that gives logits of shape .2, 2. for'),
    ('model.head', _head(scores=lambda self, x: {}), 'that gives anp of shape .2, 2. for'),
    ('model.head', _head(loss=lambda self, x: x), 'TypeError: '),
    (
      'model.head',
      _head(__init__=lambda self: None),
      "expected a class with an argument 'classes'",
    ),
    ('schedule.name', np.cos, 'TracerArrayConversionError: '),
    ('schedule.name', math.cos, 'TypeError: '),
    ('schedule.name', lambda done: 1 if done < 0.5 else 0, 'TracerBoolConversionError: '),
    ('schedule.name', lambda: 1, 'TypeError: '),
    ('schedule.name', lambda done: None, _RATES),
    ('schedule.name', lambda done: [done], _RATES),
    ('schedule.name', lambda done: jnp.ones(3), _RATES),
    ('schedule.name', nn.Dense, 'TypeError: '),
    ('optimizer.name', optax.lbfgs, 'TypeError: '),
    ('optimizer.name', optax.polyak_sgd, 'TypeError: '),
    ('optimizer.name', _optimizer(lambda params: (), lambda g, s: (g, s)), 'TypeError: '),
    ('optimizer.name', _optimizer(lambda params: 0, lambda g, s, _: (g, s + 0.5)), _UPDATES),
    (
      'optimizer.name',
      _optimizer(lambda params: (), lambda g, s, _: (jax.tree.map(jnp.sum, g), s)),
      _UPDATES,
    ),
  ],
)
def test_a_part_that_does_not_fit_is_refused_before_a_step(monkeypatch, key, part, pattern):
  monkeypatch.setattr(user_source, 'Mine', part, raising=False)
  keys = _KEYS | {key: _MINE} | ({'optimizer.arguments': '()'} if key == 'optimizer.name' else {})
  config = command_line.load('configs/resnet_anp.py:tiny', keys)
  line = builders.assert_refused(pattern, lambda: experiment.open(config).program)
  assert line.startswith(f"config.{key}='{_MINE}': ")


def test_a_network_may_name_the_axis_of_the_devices(monkeypatch):
  class Mine(nn.Module):
    num_classes: int

    @nn.compact
    def __call__(self, images, train):
      x = nn.BatchNorm(not train, axis_name=mesh_lib.DATA)(images.mean((1, 2)))
      return nn.Dense(self.num_classes)(x)

  monkeypatch.setattr(user_source, 'Mine', Mine, raising=False)
  config = command_line.load('configs/resnet_anp.py:tiny', _KEYS | {'model.name': _MINE})
  assert experiment.open(config).program


def test_a_network_without_parameters_is_refused(monkeypatch):
  class Mine(nn.Module):
    num_classes: int

    def __call__(self, images, train):
      return images[:, 0, :2, 0]

  monkeypatch.setattr(user_source, 'Mine', Mine, raising=False)
  config = command_line.load('configs/resnet_anp.py:tiny', _KEYS | {'model.name': _MINE})
  builders.assert_refused('with parameters', lambda: experiment.open(config).program)


@pytest.mark.parametrize('balance', ['none', 'weights'])
def test_labels_beyond_the_classes_name_an_example(monkeypatch, tmp_path, balance):
  counted = _source(
    read=lambda self, indices: (user_source.Circles.read(self, indices)[0], indices % 2 + 1),
    labels=lambda self: np.arange(len(self)) % 2 + 1,
  )
  monkeypatch.setattr(user_source, 'Mine', counted, raising=False)
  keys = _KEYS | {'data.source': _MINE, 'data.balance': balance}
  config = command_line.load('configs/resnet_anp.py:tiny', keys)
  words = r'circles: train, example \d*[13579] has label 2; expected 0 to 1'
  builders.assert_refused(words, train.run, config, str(tmp_path))


def test_a_damaged_first_example_leaves_a_source_in_use(monkeypatch):
  def read(self, indices):
    if 0 in indices:
      raise ValueError('truncated')
    return user_source.Circles.read(self, indices)

  monkeypatch.setattr(user_source, 'Mine', _source(read=read), raising=False)
  config = command_line.load('configs/resnet_anp.py:tiny', _KEYS | {'data.source': _MINE})
  assert len(sources.open_source(config, True)) == 64


@pytest.mark.parametrize(
  'other', [_PIXELS / 255, _PIXELS[..., 0], _PIXELS[..., [0, 1, 2, 2]], b'a file', None]
)
def test_an_example_of_another_form_is_damaged(monkeypatch, other):
  """One that is found later than at the start is not taken for pixels of something else."""

  def read(self, indices):
    images, labels = user_source.Circles.read(self, indices)
    changed = [other if i == 5 else x for i, x in zip(indices, images)]
    return [x for x in changed if x is not None], labels

  monkeypatch.setattr(user_source, 'Mine', _source(read=read), raising=False)
  config = command_line.load('configs/resnet_anp.py:tiny', _KEYS | {'data.source': _MINE})
  source = sources.open_source(config, True)
  for indices in ([5], [4, 5]):
    with pytest.raises(ValueError, match='no image .*uint8 with an integer label'):
      source.read(np.array(indices))
  weights = image_sources.evaluated(config, source)['weight']
  np.testing.assert_array_equal(weights, np.arange(64) != 5)


@pytest.mark.parametrize('labels', [np.zeros(63, int), np.zeros(64), [[0]] * 64])
def test_labels_of_another_form_are_refused(monkeypatch, labels):
  monkeypatch.setattr(user_source, 'Mine', _source(labels=lambda self: labels), raising=False)
  config = command_line.load('configs/resnet_anp.py:tiny', _KEYS | {'data.source': _MINE})
  source = sources.open_source(config, True)
  builders.assert_refused(['labels() to return an array of 64 integers'], source.labels)


def test_hyper_parameters_have_the_defaults_of_the_optimizer():
  adamw = builders.config({'optimizer.name': 'adamw'})
  assert (adamw.optimizer.b1, adamw.optimizer.b2) == (0.9, 0.999)
  lion = config_lib.resolved(adamw, {'optimizer.name': 'lion'})
  assert (lion.optimizer.b1, lion.optimizer.b2) == (0.9, 0.99)
  assert config_lib.replaced(adamw, {'optimizer.name': 'lion'}).optimizer.b2 == 0.99
  # What was changed stays, and what is typed goes before all.
  slow = config_lib.replaced(adamw, {'optimizer.b2': 0.9999})
  assert config_lib.resolved(slow, {'optimizer.name': 'lion'}).optimizer.b2 == 0.9999
  typed = {'optimizer.name': 'lion', 'optimizer.b2': '0.999'}
  assert config_lib.resolved(adamw, typed).optimizer.b2 == 0.999


def test_the_head_teaches_by_its_own_loss():
  head = user_training.Hinge(classes=3)
  outputs = np.array([[2.0, 1.5, -1.0]])
  # Margins of the first class: 0, 1 + 1.5 - 2, and none.
  loss = head.loss(outputs, np.eye(3)[:1])
  np.testing.assert_allclose(loss, [0.5 / 3], rtol=1e-6)
