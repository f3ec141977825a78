"""Tests of ranking: the best steps by sorting all of them."""

import hypothesis
from hypothesis import strategies as st
import pytest

from anp_jax.checkpoint import ranking

_VALUES = st.lists(st.floats(-100, 100, allow_nan=False), min_size=1, max_size=30, unique=True)


def _kept(best, steps):
  """Which of the steps a ranking holds, told from outside of it."""
  return {step for step in steps if step in best._keys}


@pytest.mark.parametrize('metric, is_best_first', [('loss', 1), ('top1', -1)])
@hypothesis.given(values=_VALUES, size=st.integers(1, 5))
def test_the_best_are_kept_in_any_order(metric, is_best_first, values, size):
  """Also where the best comes first, last, or in the middle."""
  best = ranking.BestSteps(metric, size)
  for step, value in enumerate(values):
    ranked = sorted(values[:step], key=lambda v: is_best_first * v)
    bar = ranked[size - 1] if len(ranked) >= size else None
    expected = bar is None or is_best_first * (bar - value) > 0
    assert best.accepts(value) == expected
    best.add(step, value)
  order = sorted(range(len(values)), key=lambda i: is_best_first * values[i])
  assert _kept(best, range(len(values))) == set(order[:size])


@pytest.mark.parametrize('metric, mode', [('loss', 'min'), ('anp_top1', 'max'), ('x', 'max')])
def test_which_values_are_the_best(metric, mode):
  assert ranking.best_mode(metric) == mode


@pytest.mark.parametrize('metric, better', [('loss', -1), ('accuracy', 1)])
def test_a_value_as_good_as_the_worst_kept_is_no_better(metric, better):
  best = ranking.BestSteps(metric, 2)
  best.add(1, 0.5)
  best.add(2, 0.5 + better * 0.25)
  assert not best.accepts(0.5) and best.accepts(0.5 + better * 0.001)
