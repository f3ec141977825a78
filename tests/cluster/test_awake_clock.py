"""The clock that stands still while its process is stopped."""

from hypothesis import given, strategies as st

from anp_jax.cluster import awake_clock
from tests import builders


def test_every_second_counts_until_the_first_tick():
  clock = builders.Clock(5.0)
  awake = awake_clock.AwakeClock(1.0, clock)
  clock.now += 600
  assert awake() == 605


def test_a_gap_between_two_ticks_counts_as_two_periods():
  clock = builders.Clock(5.0)
  awake = awake_clock.AwakeClock(1.0, clock)
  awake.tick()
  clock.now += 600
  assert awake() == 5 + 2  # seen before the next tick, and after it
  awake.tick()
  assert awake() == 5 + 2
  clock.now += 1.5
  assert awake() == 5 + 2 + 1.5


@given(st.lists(st.floats(0, 1e6, allow_subnormal=False)), st.data())
def test_it_never_runs_backwards_nor_faster_than_the_other(gaps, data):
  clock = builders.Clock(0.0)
  awake = awake_clock.AwakeClock(1.0, clock)
  before = awake()
  for gap in gaps:
    clock.now += gap
    seconds = awake()
    if data.draw(st.booleans()):
      awake.tick()
    assert before <= seconds <= awake() + 1e-6
    assert awake() - before <= gap + 1e-6 * clock.now
    before = awake()
