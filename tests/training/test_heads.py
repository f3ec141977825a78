"""Heads against NumPy in float64, and gradients against finite differences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from anp_jax import config as config_lib
from anp_jax.data import vocabulary as vocabulary_lib
from anp_jax.training import heads, objective as objective_lib
from tests import builders

# Not all combinations; 'dark' and 'sun' are words of no class.
PAIRS = ('cute_cat', 'cute_dog', 'wild_cat', 'wild_sea', 'mild_sea', 'mild_dog')
ADJECTIVES = ('cute', 'dark', 'mild', 'wild')
NOUNS = ('sea', 'sun', 'cat', 'dog')
# Of each class, by hand.
ADJECTIVE_IDS = np.array([0, 0, 3, 3, 2, 2])
NOUN_IDS = np.array([2, 3, 2, 0, 0, 3])
WEIGHTS = (1.0, 0.5, 0.25)
RANK = 2
OUTPUTS = {'joint': 6, 'multitask': 14, 'factored': 8, 'bilinear': 24}
BATCH = 16

pytestmark = pytest.mark.usefixtures('x64')


def _objective(head, names=PAIRS):
  config = config_lib.base()
  config.model.head = head
  config.model.head_weights = WEIGHTS
  config.model.head_rank = RANK
  words = (ADJECTIVES, NOUNS) if names == PAIRS else (None, None)
  vocabulary = vocabulary_lib.Vocabulary(names, *words)
  return objective_lib.create(vocabulary, config)


def _outputs(head):
  return 2 * np.random.default_rng(0).normal(size=(BATCH, OUTPUTS[head]))


def _soft_targets():
  """Targets that are mixed and smoothed."""
  return np.random.default_rng(1).dirichlet(np.ones(6), BATCH)


def _sums(values, ids, count):
  """Over the classes of each word, one by one."""
  result = np.zeros((len(values), count))
  for c, word in enumerate(ids):
    result[:, word] += values[:, c]
  return result


def _read(head, outputs):
  """Class logits and probabilities, by hand."""
  if head == 'bilinear':
    # Adjectives and nouns of the sum, then of each product.
    sums, *products = np.split(outputs, 1 + RANK, 1)
    logits = [
      sums[:, a] + sums[:, 4 + n] + sum(x[:, a] * x[:, 4 + n] for x in products)
      for a, n in zip(ADJECTIVE_IDS, NOUN_IDS)
    ]
    return np.stack(logits, 1), _read('joint', np.stack(logits, 1))[1]
  if head == 'joint':
    anp = special.softmax(outputs, 1)
    return outputs, {
      'anp': anp,
      'adjective': _sums(anp, ADJECTIVE_IDS, 4),
      'noun': _sums(anp, NOUN_IDS, 4),
    }
  words = outputs[:, -8:]
  logits = outputs[:, :6]
  if head == 'factored':
    logits = np.stack([words[:, a] + words[:, 4 + n] for a, n in zip(ADJECTIVE_IDS, NOUN_IDS)], 1)
  return logits, {
    'anp': special.softmax(logits, 1),
    'adjective': special.softmax(words[:, :4], 1),
    'noun': special.softmax(words[:, 4:], 1),
  }


def _loss(head, outputs, targets):
  if head in ('joint', 'bilinear'):
    return -(targets * special.log_softmax(_read(head, outputs)[0], 1)).sum(1)
  words = outputs[:, -8:]
  adjective = _sums(targets, ADJECTIVE_IDS, 4)
  adjective = -(adjective * special.log_softmax(words[:, :4], 1)).sum(1)
  noun = _sums(targets, NOUN_IDS, 4)
  noun = -(noun * special.log_softmax(words[:, 4:], 1)).sum(1)
  if head == 'factored':
    return adjective + noun
  pair = -(targets * special.log_softmax(outputs[:, :6], 1)).sum(1)
  return pair + 0.5 * adjective + 0.25 * noun


@pytest.mark.parametrize('head', OUTPUTS)
def test_reading_equals_numpy(head):
  objective, outputs = _objective(head), _outputs(head)
  assert objective.head.outputs == OUTPUTS[head] and objective.head.classes == 6
  logits, scores = _read(head, outputs)
  # float64 rounds at 1e-16; sums of ten terms.
  np.testing.assert_allclose(objective.head.logits(outputs), logits, rtol=1e-13)
  got = objective.head.scores(outputs)
  assert got.keys() == scores.keys()
  for name, want in scores.items():
    np.testing.assert_allclose(got[name], want, rtol=1e-13, err_msg=name)
    np.testing.assert_allclose(got[name].sum(1), 1, rtol=1e-13)


@pytest.mark.parametrize('head', OUTPUTS)
def test_logarithms_of_scores_do_not_underflow(head):
  objective, outputs = _objective(head), _outputs(head)
  for name, want in _read(head, outputs)[1].items():
    got = np.exp(objective.head.log_scores(outputs)[name])
    np.testing.assert_allclose(got, want, rtol=1e-12)
  if head in ('multitask', 'factored'):  # heads whose scores are no sums over classes
    words = 1000 * outputs[:, -8:]
    got = objective.head.log_scores(1000 * outputs)
    for name, logits in ('adjective', words[:, :4]), ('noun', words[:, 4:]):
      np.testing.assert_allclose(got[name], special.log_softmax(logits, 1), rtol=1e-12)


@pytest.mark.parametrize('head', OUTPUTS)
def test_metrics_are_of_what_is_read(head):
  objective, outputs = _objective(head), _outputs(head)
  labels = np.arange(BATCH) % 6
  logits, scores = _read(head, outputs)
  want = {
    'loss': -special.log_softmax(logits, 1)[np.arange(BATCH), labels],
    'anp_top1': logits.argmax(1) == labels,
    'anp_top5': (-logits).argsort(1).argsort(1)[np.arange(BATCH), labels] < 5,
    'adjective_top1': scores['adjective'].argmax(1) == ADJECTIVE_IDS[labels],
    'noun_top1': scores['noun'].argmax(1) == NOUN_IDS[labels],
  }
  got = objective.metrics(jnp.asarray(outputs), jnp.asarray(labels))
  assert tuple(got) == objective.metric_names == tuple(want)
  for name, value in want.items():
    # A loss near 0 is a difference of logits of order 10.
    np.testing.assert_allclose(got[name], value, rtol=1e-13, atol=1e-14, err_msg=name)
  assert 0 < want['noun_top1'].mean() < 1
  some = objective.train_metrics(jnp.asarray(outputs), jnp.asarray(labels))
  assert ('loss', *some) == objective.train_names
  for name, value in some.items():
    np.testing.assert_array_equal(value, got[name])


@pytest.mark.parametrize('head', OUTPUTS)
def test_loss_and_its_gradient(head):
  objective, outputs = _objective(head), _outputs(head)
  targets = _soft_targets()

  @jax.jit
  def loss_and_gradient(outputs):
    loss, pull = jax.vjp(lambda o: objective.loss(o, targets), outputs)
    return loss, pull(jnp.ones_like(loss))[0]

  loss, got = loss_and_gradient(outputs)
  np.testing.assert_allclose(loss, _loss(head, outputs, targets), rtol=1e-13)
  # Central differences: of order step^2, and of rounding 1e-16 / step.
  step = 1e-5
  want = np.empty_like(outputs)
  for j in range(outputs.shape[1]):
    moved = outputs.copy()
    moved[:, j] += step
    up = _loss(head, moved, targets)
    moved[:, j] -= 2 * step
    want[:, j] = (up - _loss(head, moved, targets)) / (2 * step)
  np.testing.assert_allclose(got, want, atol=1e-9)


def test_factored_loss_is_that_of_all_combinations():
  """A table of every adjective with every noun, and one softmax over it."""
  outputs = _outputs('factored')
  labels = np.arange(BATCH) % 6
  table = outputs[:, :4, None] + outputs[:, None, 4:]
  log = special.log_softmax(table.reshape(BATCH, -1), 1).reshape(table.shape)
  rows = np.arange(BATCH)
  want = -log[rows, ADJECTIVE_IDS[labels], NOUN_IDS[labels]]
  objective = _objective('factored')
  targets = objective.targets(jnp.asarray(labels), np.float64)
  np.testing.assert_allclose(objective.loss(outputs, targets), want, rtol=1e-13)
  result = objective.contributions(objective.head.scores(outputs))
  total = result['adjective'] + result['noun']
  np.testing.assert_allclose(total[rows, labels], -want, rtol=1e-13)


@pytest.mark.parametrize('head', OUTPUTS)
def test_contributions_are_logarithms_of_the_words(head):
  objective, outputs = _objective(head), _outputs(head)
  _, scores = _read(head, outputs)
  result = objective.contributions(scores)
  assert set(result) == {'adjective', 'noun'}
  for name, ids in (('adjective', ADJECTIVE_IDS), ('noun', NOUN_IDS)):
    want = np.log(scores[name][:, ids])
    np.testing.assert_allclose(result[name], want, rtol=1e-13)
  nothing = {k: np.zeros_like(v) for k, v in scores.items()}
  assert np.isfinite(objective.contributions(nothing)['noun']).all()


def test_heads_of_pairs_need_pairs():
  for head in ('multitask', 'factored', 'bilinear'):
    line = builders.refusal(_objective, head, ('ant', 'bee'))
    assert line == (
      f"config.model.head='{head}': expected 'joint' where classes are no "
      "adjective_noun pairs, as 'ant' and others (config.data.pairs=yes, if "
      'they are)'
    )
  plain = _objective('joint', ('ant', 'bee'))
  assert plain.head == heads.Joint(2)
  assert set(plain.head.scores(np.zeros((1, 2)))) == {'anp'}
  assert plain.contributions(plain.head.scores(np.zeros((1, 2)))) == {}
