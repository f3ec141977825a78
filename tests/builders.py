"""Small objects that tests of several rooms need."""


class Clock:
  """A clock that only a test moves: `clock.now += 3`."""

  def __init__(self, now: float = 1000.0):
    self.now = now

  def __call__(self) -> float:
    return self.now
