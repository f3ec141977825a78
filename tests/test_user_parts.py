"""A data set, optimizer, schedule and head of the user's own, named by address."""

import numpy as np
import optax
import pytest

from anp_jax import config as config_lib, train
from anp_jax.checkpoint import trained
from anp_jax.config import command_line
from anp_jax.data import sources
from anp_jax.reporting import telemetry
from anp_jax.training import optimizer
from tests import builders, user_training

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
  lines = [r for r in telemetry.read(str(tmp_path)) if r['kind'] == 'train']
  rates = [line['learning_rate'] for line in lines]
  np.testing.assert_allclose(rates, 0.2 * (1 - np.arange(4) / 4), rtol=1e-6)
  # The hinge loss of two classes whose outputs are alike is half a margin.
  assert lines[0]['loss'] == pytest.approx(0.5, abs=0.2)
  result = trained.load(str(tmp_path))
  assert result.step == 4 and result.vocabulary.names == ('circle', 'square')


def test_a_source_is_given_its_split_and_path():
  config = command_line.load('configs/resnet_anp.py:tiny', _KEYS | {'data.path': 'tests'})
  splits = [sources.open_source(config, training) for training in (True, False)]
  assert [len(s) for s in splits] == [64, 32]
  assert splits[0].path == 'tests'
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


def no_updates(rate):
  """An optimizer that forgets to return what it makes."""
  optax.sgd(rate)


@pytest.mark.parametrize(
  'changes, words',
  [
    (
      {'optimizer.name': 'optax:adamw', 'optimizer.arguments': (('weight_decay', 0.1),)},
      ["arguments=(('weight_decay', 0.1),): expected none of ", 'optimizer.weight_decay'],
    ),
    ({'optimizer.name': f'{__name__}:no_updates'}, 'expected a function that returns an optax.'),
  ],
)
def test_an_optimizer_that_does_not_suit_is_refused(changes, words):
  config = config_lib.replaced(builders.config(), changes)
  builders.assert_refused(words, optimizer.create, config, 8, 80, 100)


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
