"""What is timed, and when."""

import time

from anp_jax.system import stopwatch


def test_the_second_call_is_timed():
  waits = iter([0.5, 0.0])
  # A call that returns at once; the machine may have other work meanwhile.
  assert stopwatch.timed_again(lambda: time.sleep(next(waits))) < 0.25
  assert next(waits, None) is None
