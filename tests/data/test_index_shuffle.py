"""Tests of order: the permutation that every batch of every run rests on.

A run is continued only if these numbers stay, so some are written down.
"""

import tracemalloc
import warnings

from hypothesis import strategies as st
import numpy as np
import pytest
from scipy import stats

from anp_jax.data import index_shuffle
from tests import builders, random_numbers


@pytest.fixture(autouse=True)
def no_warnings():
  """Sums of 64 bits wrap around on purpose, and must do so without a word."""
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    yield


def test_mix_is_the_finaliser_of_splitmix64():
  # The reference generator (Vigna) adds the golden ratio to its state, then
  # mixes it; these are its first outputs for the seed 1234567.
  state = np.arange(1, 6, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
  assert index_shuffle.mix(state + np.uint64(1234567)).tolist() == [
    6457827717110365317,
    3203168211198807973,
    9817491932198370423,
    4593380528125082431,
    16408922859458223821,
  ]


def test_shuffled_golden():
  p = np.arange(20)
  assert index_shuffle.shuffled(p, 0, 10).reshape(2, 10).tolist() == [
    [2, 5, 6, 0, 4, 8, 7, 3, 9, 1],
    [0, 4, 9, 3, 5, 6, 1, 7, 8, 2],
  ]
  assert index_shuffle.shuffled(p, 1, 10).reshape(2, 10).tolist() == [
    [8, 4, 3, 6, 2, 0, 9, 1, 5, 7],
    [0, 6, 8, 7, 4, 2, 1, 5, 9, 3],
  ]
  far = np.array([10**6, 2**31, 2**40, 2**62])
  assert index_shuffle.shuffled(far, 7, 1281167).tolist() == [1012113, 561270, 1075700, 992562]


def test_uniform_golden():
  got = index_shuffle.uniform(3, 1, np.array([0, 1, 2**40]), 2)
  # 53 bits each: compared exactly.
  assert (got * 2**53).astype(np.int64).tolist() == [
    [7019753605077176, 942840083716530],
    [3340450338359518, 1957936762522372],
    [6704510930699744, 1112795094671771],
  ]
  np.testing.assert_array_equal(index_shuffle.uniform(3, 1, np.array([1]), 1), got[1:2, :1])


def test_balanced_golden():
  classes, members = index_shuffle.balanced(np.arange(12), 0, np.array([1, 0, 3, 8]))
  assert classes.tolist() == [3, 3, 0, 0, 3, 3, 2, 0, 0, 2, 2, 2]
  assert members.tolist() == [3, 6, 0, 0, 5, 7, 0, 0, 0, 1, 0, 2]


@builders.fuzzed(50, st.integers(1, 1100), st.integers(0, 2**63), st.integers(0, 2**40), st.data())
def test_every_epoch_is_a_permutation_from_any_start(size, seed, epoch, data):
  positions = np.arange(3 * size) + epoch * size
  got = index_shuffle.shuffled(positions, seed, size)
  assert got.dtype == np.int64
  for order in got.reshape(3, size):
    assert sorted(order) == list(range(size))
  start = data.draw(st.integers(0, 3 * size - 1))
  np.testing.assert_array_equal(index_shuffle.shuffled(positions[start:], seed, size), got[start:])


def test_epochs_and_seeds_differ():
  first, second = index_shuffle.shuffled(np.arange(2048), 0, 1024).reshape(2, 1024)
  other = index_shuffle.shuffled(np.arange(1024), 1, 1024)
  large = index_shuffle.shuffled(np.arange(1024), 2**63, 1024)
  # Two random permutations share one place on average (Poisson); 10 or more
  # has a chance of 1e-7.
  for a, b in ((first, second), (first, other), (other, large)):
    assert (a == b).sum() < 10


@pytest.mark.parametrize('size', [5, 16, 17])
def test_no_example_prefers_a_place(size):
  epochs = index_shuffle.shuffled(np.arange(size * 4000), 0, size).reshape(4000, size)
  counts = np.zeros((size, size))
  np.add.at(counts, (np.arange(size)[None], epochs), 1)
  expected = 4000 / size
  chi = ((counts - expected) ** 2 / expected).sum()
  assert 1e-5 < stats.chi2.sf(chi, (size - 1) ** 2) < 1 - 1e-5


@pytest.mark.parametrize('size', [1023, 1025, 4096])
def test_order_has_no_structure(size):
  epochs = index_shuffle.shuffled(np.arange(size * 3), 0, size).reshape(3, size)
  natural = np.arange(size)
  pairs = [
    (epochs[0], natural),
    (epochs[0], epochs[1]),
    (epochs[1], epochs[2]),
    (epochs[0][1:], epochs[0][:-1]),
    (epochs[0][2:], epochs[0][:-2]),
    (epochs[0] % 2, natural % 2),
    (epochs[0] % 32, natural % 32),
  ]
  for a, b in pairs:
    # Five standard deviations of a correlation between random orders.
    assert abs(np.corrcoef(a, b)[0, 1]) < 5 / np.sqrt(size)
  # Steps between neighbours: a permutation of another kind, an affine one, say,
  # has few of them.
  steps = np.unique(np.diff(epochs[0]) % size)
  assert len(steps) > 0.55 * size  # 1 - 1/e of them on average


def test_a_thousand_million_examples_need_no_table():
  positions = np.arange(1000, dtype=np.int64) + 3 * 10**9
  index_shuffle.shuffled(positions[:1], 0, 10**9)
  tracemalloc.start()
  indices = index_shuffle.shuffled(positions, 0, 10**9)
  peak = tracemalloc.get_traced_memory()[1]
  tracemalloc.stop()
  assert peak < 10**6  # bytes; one bit an example would be 125 times that
  assert len(set(indices.tolist())) == 1000
  assert indices.min() >= 0 and indices.max() < 10**9
  # Five standard deviations of the mean of a thousand.
  assert abs(indices.mean() / 10**9 - 0.5) < 5 * 0.2887 / np.sqrt(1000)


def test_uniform_is_uniform_and_independent():
  draws = index_shuffle.uniform(0, 1, np.arange(20_000), 4)
  assert draws.shape == (20_000, 4) and draws.dtype == np.float64
  assert draws.min() >= 0 and draws.max() < 1
  columns = [
    *draws.T,
    index_shuffle.uniform(0, 2, np.arange(20_000), 1)[:, 0],
    index_shuffle.uniform(1, 1, np.arange(20_000), 1)[:, 0],
  ]
  random_numbers.assert_uniform([*columns, np.roll(columns[0], 1)])
