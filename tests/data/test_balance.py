"""Tests of balance: classes of unlike sizes, equally often or weighted."""

import threading

from hypothesis import strategies as st
import numpy as np
import pytest
from sklearn.utils import class_weight

from anp_jax.data.input import batch_sampler, pipeline
from anp_jax.data.sources import balance
from tests import builders, image_sources, opening, showing

# Class 2 has no example.
_LABELS = np.random.default_rng(0).permutation(np.repeat([0, 1, 3, 4, 5], [40, 1, 7, 2, 13]))


@pytest.fixture
def source(tmp_path, config):
  """63 images whose value is their index, classes of unlike sizes."""
  names = ['a_a', 'a_b', 'b_a', 'b_b', 'c_a', 'c_b']
  showing.save_arrays(tmp_path / 'set.npz', _LABELS, names=names, side=8)
  return opening.source(config, 'arrays', tmp_path / 'set.npz')


def _indices(plans, first, last):
  """What several processes read, in the order of the stream."""
  batches = [sampler.indices(s) for s in range(first, last) for sampler in plans]
  positions, indices, weights = (np.concatenate(x) for x in zip(*batches))
  assert (weights == 1).all()
  return indices[np.argsort(positions)]


def _plans(config, source, batch, cuts=()):
  return [
    batch_sampler.BatchSampler(
      config, len(source), batch, rows, True, order=balance.sampler(config, source)
    )
    for rows in np.split(np.arange(batch), cuts)
  ]


def test_every_class_and_each_of_its_examples_equally_often(config, source):
  config.data.balance = 'sample'
  indices = _indices(_plans(config, source, 21), 0, 3 * 200)
  epochs = indices.reshape(200, 63)
  present = np.array([0, 1, 3, 4, 5])
  for epoch in epochs:
    # 63 places over five classes: 12 or 13 each.
    counts = np.bincount(_LABELS[epoch], minlength=6)
    assert counts[2] == 0
    assert set(counts[present].tolist()) == {12, 13}
  for upto in (1, 2, 7, 200):
    indices_so_far = epochs[:upto].ravel()
    of_classes = np.bincount(_LABELS[indices_so_far], minlength=6)[present]
    assert np.ptp(of_classes) <= 1
    of_examples = np.bincount(indices_so_far, minlength=63)
    for label in present:
      assert np.ptp(of_examples[_LABELS == label]) <= 1
  # An epoch's order is shuffled: five classes in turn would differ always.
  labels = _LABELS[epochs]
  same = (labels[:, 1:] == labels[:, :-1]).mean()
  # A fifth, with a standard deviation of 0.4 / sqrt(12400).
  assert abs(same - 12 / 63) < 0.02
  assert (epochs[0] != epochs[1]).any()


@builders.fuzzed(10, st.sets(st.integers(1, 23)), st.integers(0, 11), st.integers(0, 2**31 - 2))
def test_any_process_layout_and_any_start_give_the_same_stream(config, source, cuts, start, seed):
  config.data.balance, config.seed = 'sample', seed
  stream = _indices(_plans(config, source, 24), 0, 12)
  got = _indices(_plans(config, source, 24, sorted(cuts)), start, 12)
  np.testing.assert_array_equal(got, stream[start * 24 :])
  config.seed = seed + 1
  other = _indices(_plans(config, source, 24), 0, 12)
  assert (other != stream).any()


def test_tickets_name_the_same_batches(config, source):
  """Asynchronous workers read them: shares of batches in any order."""
  config.data.balance = 'sample'
  stream = _indices(_plans(config, source, 24), 0, 4)
  shares = [(2, np.arange(8, 16)), (0, np.arange(16, 24)), (3, np.arange(8))]
  sampler = batch_sampler.BatchSampler(
    config,
    len(source),
    24,
    np.arange(8),
    True,
    tickets=shares.__getitem__,
    order=balance.sampler(config, source),
  )
  for count, (step, rows) in enumerate(shares):
    _, indices, _ = sampler.indices(count)
    np.testing.assert_array_equal(indices, stream[step * 24 + rows])


def test_a_ticket_may_wait_for_the_batch_of_an_earlier_one(config):
  source = image_sources.Source([image_sources.pixels(20, 20, i) for i in range(8)])
  used = threading.Event()

  def ticket(count):
    if count and not used.wait(10):
      raise TimeoutError('batch 0 was not given out')
    return count, np.arange(4)

  sampler = batch_sampler.BatchSampler(config, 8, 4, np.arange(4), True, tickets=ticket)
  batches = pipeline.batches(source, sampler)
  assert next(batches)['row'].tolist() == [0, 1, 2, 3]
  used.set()
  assert next(batches)['row'].tolist() == [0, 1, 2, 3]


def test_class_weights_equal_scikit_learn(config, source):
  assert balance.class_weights(config, source) == ()
  assert balance.sampler(config, source) is None
  config.data.balance = 'weights'
  assert balance.sampler(config, source) is None
  weights = np.array(balance.class_weights(config, source))
  present = np.unique(_LABELS)
  want = class_weight.compute_class_weight('balanced', classes=present, y=_LABELS)
  np.testing.assert_allclose(weights[present], want, rtol=1e-15)
  assert weights[2] == 0
  np.testing.assert_allclose(weights[_LABELS].mean(), 1, rtol=1e-14)


def test_a_smaller_power_makes_weights_less_unlike(config, source):
  config.data.balance, config.data.balance_power = 'weights', 0.5
  weights = np.array(balance.class_weights(config, source))
  counts = np.bincount(_LABELS)
  first, last = np.flatnonzero(counts)[[0, -1]]
  # Of the class of n examples 1 / sqrt(n), times what all share.
  want = (counts[last] / counts[first]) ** 0.5
  np.testing.assert_allclose(weights[first] / weights[last], want, rtol=1e-14)
  np.testing.assert_allclose(weights[_LABELS].mean(), 1, rtol=1e-14)
