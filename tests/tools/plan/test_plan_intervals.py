"""Tests of plan: intervals of predicted rates."""

import math

import numpy as np
import pytest

from anp_jax.tools.plan import intervals


def _error(system, log, mode='sheet', units='tensor', more_nodes=False):
  return intervals.Error(mode, units, more_nodes, system, log)


_ERRORS = [
  # Mean squares of 0.01 and 0.04: the rates of a system share its weight.
  *(_error('a', s * 0.1) for s in (1, -1, 1)),
  _error('b', 0.2),
  _error('c', 0.4, units='vector'),
  _error('d', 0.4, more_nodes=True),
  _error('e', 9.0, mode='few'),
]


def test_an_interval_is_a_quantile_of_student():
  # Two systems that are alike, and the mean of all four of the mode as two more.
  mean = (0.01 + 0.04 + 0.16 + 0.16) / 4
  variance = (0.01 + 0.04 + 2 * mean) / 4
  half = 2.131847 * math.sqrt(variance)  # 95 % of Student's t of 4 degrees, from a table
  interval = intervals.find(_ERRORS, 'sheet', 'tensor', False)
  assert interval.high == pytest.approx(math.exp(half), rel=1e-5)
  assert interval.low == pytest.approx(math.exp(-half), rel=1e-5)
  assert (interval.rates, interval.systems) == (4, 2)
  assert intervals.find(_ERRORS, 'few', 'tensor', False).high > math.exp(9)


@pytest.mark.parametrize(
  'keys', [('sheet', 'cpu', False), ('sheet', 'vector', True), ('few', 'vector', False)]
)
def test_without_a_rate_like_it_there_is_none(keys):
  assert intervals.find(_ERRORS, *keys) is None


def test_a_system_does_not_judge_itself():
  interval = intervals.find(_ERRORS, 'sheet', 'tensor', False, 'b')
  assert (interval.rates, interval.systems) == (3, 1)
  assert intervals.find(_ERRORS, 'few', 'tensor', False, 'e') is None


def test_coverage_of_normal_errors_is_that_of_the_interval():
  """Twenty systems of known scatter: nine of ten further errors lie in the interval."""
  draws = np.random.default_rng(0).normal(0, 0.1, (400, 21))
  covered = []
  for *past, new in draws.tolist():
    interval = intervals.find([_error(str(i), e) for i, e in enumerate(past)], *_KEYS)
    covered.append(interval.low <= math.exp(new) <= interval.high)
  # A binomial deviation is 1.5 %.
  assert np.mean(covered) == pytest.approx(0.9, abs=0.045)


_KEYS = 'sheet', 'tensor', False
