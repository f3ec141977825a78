"""Compiles for the models that come next, while a station trains."""

from collections.abc import Callable, Sequence
from concurrent import futures


class BackgroundCompiler:
  """A thread that compiles for models in their order, a bounded number ahead.

  A station takes in one new model a turn at most, and all that are in the ring
  may leave it in as many turns. With as many ahead as may be in the ring, a
  station that was in time before such a rush is in time through all of it, and
  no more programs are held than twice those of the models in the ring.
  """

  def __init__(
    self, name: str, models: Sequence[int], max_ahead: int, work: Callable, on_error: Callable
  ):
    """Prepares the thread; `start` begins to compile.

    Args:
      name: of the thread.
      models: that are to come, in their order.
      max_ahead: models that may be compiled for and have not arrived.
      work: called (model, stopped) to compile, stopped being () -> whether to
        begin no further program.
      on_error: called (exception) when `work` has raised one.
    """
    self._waiting = list(models)
    self._max_ahead = max_ahead
    self._work, self._on_error = work, on_error
    self._ahead, self._arrived, self._retired = set(), set(), set()
    self._stopped = False
    self._thread = futures.ThreadPoolExecutor(1, name)

  def start(self) -> None:
    """Begins to compile."""
    while self._waiting and not self._stopped:
      model = self._waiting[0]
      if model not in self._arrived:
        if len(self._ahead) >= self._max_ahead:
          return
        self._ahead.add(model)
      del self._waiting[0]
      self._thread.submit(self._run, model)

  def on_arrival(self, model: int) -> None:
    """Makes room for one more: a model has come to the station."""
    self._arrived.add(model)
    self._ahead.discard(model)
    self.start()

  def on_retired(self, model: int) -> None:
    """Compiles nothing more for a model that has left the ring."""
    self._retired.add(model)
    self.on_arrival(model)

  def stop(self) -> None:
    """Begins no further program; returns at once."""
    self._stopped = True

  def join(self) -> None:
    """Returns when the program in progress is compiled; call `stop` first."""
    # A thread within XLA would not survive the end of the process.
    self._thread.shutdown()

  def _run(self, model):
    if self._stopped or model in self._retired:
      return
    try:
      self._work(model, lambda: self._stopped)
    except BaseException as e:  # noqa: BLE001 - raised by the main thread
      self._on_error(e)
