"""The ranking of steps, against a sort of all values."""

import itertools

import pytest

from anp_jax.checkpoint import ranking


@pytest.mark.parametrize('size', [1, 2, 3])
@pytest.mark.parametrize(
  'metric, is_reversed', [('accuracy', True), ('loss', False)]
)
def test_the_best_are_kept_in_any_order(metric, is_reversed, size):
  for values in itertools.permutations([0.1, 0.2, 0.3, 0.4]):
    best = ranking.BestSteps(metric, size)
    for step, value in enumerate(values):
      before = sorted(values[:step], reverse=is_reversed)[:size]
      worst = before[-1] if before else value
      beats = value > worst if is_reversed else value < worst
      assert best.accepts(value) == (len(before) < size or beats)
      best.add(step, value)
    full = sorted(values, reverse=is_reversed)[:size]
    # A value as good as the worst kept is no better; one past it is.
    nudge = 1e-3 if is_reversed else -1e-3
    assert not best.accepts(full[-1])
    assert best.accepts(full[-1] + nudge)
    assert not best.accepts(full[-1] - nudge)


def test_a_lost_checkpoint_makes_room():
  best = ranking.BestSteps('accuracy', 2)
  best.add(1, 0.9)
  best.add(2, 0.8)
  assert not best.accepts(0.1)
  best.keep_only({2})
  assert best.accepts(0.1)
  best.add(3, 0.1)
  assert not best.accepts(0.05) and best.accepts(0.2)
