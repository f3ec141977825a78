"""Compiles for the models that come next, while a station trains."""

from collections.abc import Callable
from collections.abc import Sequence
import threading


class Ahead:
  """A thread that compiles for models in their order, a bounded number ahead.

  A station takes in one new model a turn at most, and all that are in the ring
  may leave it in as many turns. So with as many ahead as there are seats a
  station that was in time before such a rush is in time through all of it, and
  no more programs are held than twice those of the models in the ring.
  """

  def __init__(
    self, name: str, models: Sequence[int], count: int, work: Callable,
    failed: Callable,
  ):  # fmt: skip
    """Makes it; `start` begins.

    Args:
      name: of the thread.
      models: that are to come, in their order.
      count: models that may be compiled for and have not come.
      work: called (model, stopped) to compile, stopped being () -> whether to
        begin no further program.
      failed: called (exception) when `work` has raised one; it was the last.
    """
    self._waiting = list(models)
    self._count = count
    self._work, self._failed = work, failed
    self._begun, self._come = set(), set()
    self._stopped = False
    self._changed = threading.Condition()
    self._thread = threading.Thread(target=self._run, name=name, daemon=True)

  def start(self) -> None:
    """Begins to compile."""
    self._thread.start()

  def came(self, model: int) -> None:
    """A model has come to the station: there is room for one more."""
    with self._changed:
      self._come.add(model)
      self._changed.notify_all()

  def gone(self, model: int) -> None:
    """A model has left the ring: nothing more is to be compiled for it."""
    with self._changed:
      self._come.add(model)
      if model in self._waiting:
        self._waiting.remove(model)
      self._changed.notify_all()

  def stop(self) -> None:
    """Begins no further program; returns at once."""
    with self._changed:
      self._stopped = True
      self._changed.notify_all()

  def join(self) -> None:
    """Returns when the program in progress is compiled; `stop` comes first."""
    # A thread within XLA would not survive the end of the process.
    if self._thread.ident is not None:
      self._thread.join()

  def _run(self):
    try:
      while (model := self._next()) is not None:
        self._work(model, lambda: self._stopped)
    except BaseException as e:  # noqa: BLE001 - raised by the main thread
      self._failed(e)

  def _next(self):
    """The next model, once there is room for it; None at the end."""
    with self._changed:
      while self._waiting and not self._stopped:
        if (
          self._waiting[0] in self._come
          or len(self._begun - self._come) < self._count
        ):
          model = self._waiting.pop(0)
          self._begun.add(model)
          return model
        self._changed.wait()
    return None
