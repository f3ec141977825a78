"""Losses and metrics against NumPy in float64, one example at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from anp_jax import config as config_lib
from anp_jax.data import vocabulary as vocabulary_lib
from anp_jax.training import objective as objective_lib

ADJECTIVES = ('cute', 'dark', 'wild')
NOUNS = ('cat', 'dog', 'sea', 'sky')
PAIRS = tuple(f'{a}_{n}' for a in ADJECTIVES for n in NOUNS)


def _create(names, smoothing=0.0, class_weights=()):
  config = config_lib.base()
  config.label_smoothing = smoothing
  vocabulary = vocabulary_lib.Vocabulary(names)
  return objective_lib.create(vocabulary, config, class_weights)


def _objective():
  return _create(PAIRS)


def _logits(batch=64, classes=12):
  random = np.random.default_rng(0)
  logits = 3 * random.normal(size=(batch, classes))
  return logits.astype(np.float32), random.integers(0, classes, batch)


def _metrics(objective, logits, labels):
  return jax.jit(objective.metrics)(jnp.asarray(logits), jnp.asarray(labels, jnp.int32))


@pytest.mark.parametrize('smoothing', [0.0, 0.3])
def test_an_example_counts_by_its_own_class_whatever_the_smoothing(smoothing):
  weights = tuple(0.25 * 2.0**c for c in range(12))
  logits, labels = _logits()
  plain = _create(PAIRS, smoothing)
  weighted = _create(PAIRS, smoothing, weights)
  targets = plain.targets(jnp.asarray(labels, jnp.int32), jnp.float32)
  smoothed = np.full((64, 12), smoothing / 12)
  smoothed[np.arange(64), labels] += 1 - smoothing
  want = -(smoothed * special.log_softmax(np.float64(logits), -1)).sum(-1)
  want *= np.array(weights)[labels]
  # Sums of 12 float32 terms of order 10: 1e-6 a rounding.
  np.testing.assert_allclose(weighted.loss(logits, targets), want, rtol=1e-5)
  # Of two blended images, the blend of both weights.
  blended = 0.75 * targets + 0.25 * targets[::-1]
  factor = 0.75 * np.array(weights)[labels]
  factor += 0.25 * np.array(weights)[labels[::-1]]
  np.testing.assert_allclose(
    weighted.loss(logits, blended), factor * plain.loss(logits, blended), rtol=1e-5
  )


def test_loss_survives_large_logits():
  logits = np.array([[1e4, 0, -1e4]], np.float32)
  objective = _create(('a', 'b', 'c'))
  for label, want in enumerate((0, 1e4, 2e4)):
    targets = objective.targets(jnp.array([label]), jnp.float32)
    np.testing.assert_allclose(objective.loss(logits, targets), [want])
    got = _metrics(objective, logits, [label])
    np.testing.assert_allclose(got['loss'], [want])


def test_plain_classes_have_no_parts():
  names = tuple(f'class{i}' for i in range(5))
  objective = _create(names)
  logits, labels = _logits(classes=5)
  # Among the best five of five would be no news.
  assert set(_metrics(objective, logits, labels)) == {'loss', 'anp_top1'}
  assert set(objective.train_metrics(logits, jnp.asarray(labels))) == {'anp_top1'}


def test_many_classes_are_counted_to_a_hundred():
  names = tuple(f'class{i}' for i in range(101))
  objective = _create(names)
  logits = -np.arange(101, dtype=np.float32)[None].repeat(3, 0)
  got = _metrics(objective, logits, [9, 10, 100])
  want = {
    'anp_top1': (0, 0, 0),
    'anp_top5': (0, 0, 0),
    'anp_top10': (1, 0, 0),
    'anp_top100': (1, 1, 0),
  }
  for name, hits in want.items():
    np.testing.assert_array_equal(got[name], hits, err_msg=name)


def test_of_equal_scores_the_lower_class_wins():
  # All equal: the order is that of the classes, so top k is exactly k of them;
  # counting ties as hits would give a constant network 100 %.
  logits = np.zeros((12, 12), np.float32)
  got = _metrics(_objective(), logits, np.arange(12))
  for k in (1, 5, 10):
    want = np.arange(12) < k
    np.testing.assert_array_equal(got[f'anp_top{k}'], want)
  # Each adjective, each noun has the same sum to rounding or exactly; exactly
  # one of them may win, which is that of a third or a quarter of the classes.
  assert got['adjective_top1'].sum() == 4 and got['noun_top1'].sum() == 3
  # Two share the first place: 3 wins over 7.
  logits = np.zeros((2, 12), np.float32)
  logits[:, [3, 7]] = 5
  hits = _metrics(_objective(), logits, [3, 7])
  np.testing.assert_array_equal(hits['anp_top1'], [1, 0])
  np.testing.assert_array_equal(hits['anp_top5'], [1, 1])


@pytest.mark.parametrize('bad', [np.nan, np.inf, -np.inf])
def test_a_label_without_a_finite_score_is_never_a_hit(bad):
  logits, _ = _logits(12)
  labels = np.arange(12)
  logits[:, 2] = bad
  got = _metrics(_objective(), logits, labels)
  assert all(got[f'anp_top{k}'][2] == 0 for k in (1, 5, 10))
  got = _metrics(_objective(), np.full((12, 12), bad, np.float32), labels)
  for name, hits in got.items():
    if name != 'loss':
      np.testing.assert_array_equal(hits, 0, err_msg=name)


def test_one_nan_leaves_no_part_to_be_known():
  logits, labels = _logits()
  logits[:, 5] = np.nan
  got = _metrics(_objective(), logits, labels)
  # The softmax, and so each sum, is NaN.
  assert not got['adjective_top1'].any() and not got['noun_top1'].any()
