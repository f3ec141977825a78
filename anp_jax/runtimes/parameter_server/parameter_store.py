"""One server's slice during a run: gradients in, weights out."""

import collections
from collections.abc import Callable
import threading
from typing import Any

from absl import logging
import numpy as np

from anp_jax.runtimes.parameter_server import slice_optimizer

# Snapshots that wait to be fetched before updates wait for them.
_SNAPSHOTS = 2


class InvalidMessageError(ValueError):
  """A message that was refused, and has changed nothing."""


class ParameterStore:
  """Applies updates in the scheduler's order, in a thread of its own.

  A gradient is pending until the scheduler has ordered its ticket; what other
  workers computed for the same ticket is dropped then. Weights are immutable
  arrays: a reader keeps the version that it began with.

  Attributes:
    optimizer: optimizer of the slice.
    error: why no more updates are applied; '' while they are.
  """

  def __init__(
    self,
    optimizer: slice_optimizer.SliceOptimizer,
    state: slice_optimizer.SliceState,
    is_snapshot: Callable[[int], bool],
    max_pending: int,
  ):
    """Starts the thread.

    Args:
      optimizer: optimizer of the slice.
      state: state to begin with.
      is_snapshot: version -> whether its state is kept until it is fetched.
      max_pending: gradients that may be pending, of all workers.
    """
    self.optimizer = optimizer
    self._newest = int(state.step), state  # version and state
    self._is_snapshot = is_snapshot
    self._max_pending = max_pending
    # (ticket, worker) -> gradient, stats_delta
    self._pending: dict[tuple, tuple[np.ndarray, np.ndarray]] = {}
    self._used: set[tuple[int, int]] = set()  # tickets of what was applied
    self._updates: collections.deque = collections.deque()
    # Version -> state, not fetched yet; and the last one that was.
    self._snapshots: dict[int, slice_optimizer.SliceState] = {}
    self._fetched: tuple[int, Any] = -1, None
    self._closed = False
    self.error = ''
    self._changed = threading.Condition()
    threading.Thread(target=self._run, name='parameter store', daemon=True).start()

  @property
  def version(self) -> int:
    """Updates applied."""
    return self._newest[0]

  def enqueue_gradient(
    self, ticket: tuple[int, int], worker: str, gradient: np.ndarray, stats_delta: np.ndarray
  ) -> None:
    """Holds a gradient until its update; drops one of a used ticket.

    Args:
      ticket: (step, data shard).
      worker: name of the worker that computed it.
      gradient: (n,) of the slice.
      stats_delta: (m,) of the statistics.

    Raises:
      InvalidMessageError: if too many are pending.
    """
    with self._changed:
      if ticket in self._used:
        return
      if len(self._pending) >= self._max_pending:
        raise InvalidMessageError(f'{len(self._pending)} gradients wait already')
      self._pending[ticket, worker] = gradient, stats_delta

  def has_gradient(self, ticket: tuple[int, int], worker: str) -> bool:
    """Whether a gradient is pending, or its ticket was used."""
    with self._changed:
      return ticket in self._used or (ticket, worker) in self._pending

  def submit(self, order: int, contributions: list[dict]) -> None:
    """Queues the next update in order; all its gradients are pending here."""
    with self._changed:
      self._updates.append((order, contributions))
      self._changed.notify_all()

  def read(self, at_least: int, timeout: float) -> tuple[int, slice_optimizer.SliceState]:
    """Returns (version, SliceState), not older than version `at_least`.

    Raises:
      TimeoutError: if it is not there in time.
    """
    with self._changed:
      self._wait_for_version(at_least, timeout)
      return self._newest

  def next_snapshot(self) -> int | None:
    """Returns the oldest version whose snapshot waits to be fetched."""
    with self._changed:
      return min(self._snapshots, default=None)

  def snapshot(self, version: int, timeout: float) -> slice_optimizer.SliceState:
    """Returns the SliceState of a snapshot, or of the newest version.

    It can be fetched again until a later one is: an answer may be lost.

    Raises:
      TimeoutError: if it is not there in time.
      InvalidMessageError: if it is not kept.
    """
    with self._changed:
      self._wait_for_version(version, timeout)
      if version != self._fetched[0]:
        states = self._snapshots | dict([self._newest])
        if version not in states:
          raise InvalidMessageError(f'version {version} is not kept here')
        state = states[version]
        self._fetched = version, state.replace(momenta=())
        self._snapshots = {v: s for v, s in self._snapshots.items() if v > version}
        self._changed.notify_all()
      return self._fetched[1]

  def close(self) -> None:
    """Ends the thread."""
    with self._changed:
      self._closed = True
      self._changed.notify_all()

  def _wait_for_version(self, version, timeout):
    self._changed.wait_for(lambda: self.version >= version or self._closed, timeout)
    if self.version < version:
      raise TimeoutError(f'version {version} is not there yet')

  def _run(self):
    error = ''
    while not error:
      with self._changed:
        self._changed.wait_for(
          lambda: self._closed or (self._updates and len(self._snapshots) < _SNAPSHOTS)
        )
        if self._closed:
          return
        order, contributions = self._updates.popleft()
      try:
        error = self._apply(order, contributions)
      except Exception as e:  # noqa: BLE001 - else all would wait for this thread
        logging.exception('update %d cannot be applied', order)
        error = f'update {order} cannot be applied: {type(e).__name__}: {e}'
    with self._changed:
      self.error = error
      self._changed.notify_all()

  def _apply(self, order, contributions):
    """Makes one update; returns why not, where it is not finite."""
    keys = [(tuple(c['ticket']), c['worker']) for c in contributions]
    with self._changed:
      gradients, stats_deltas = zip(*(self._pending[key] for key in keys))
    state, finite = self.optimizer.apply(self._newest[1], gradients, stats_deltas, contributions)
    if not finite:
      return f'update {order} is not finite; nothing of it was saved'
    with self._changed:
      self._newest = order + 1, state
      if self._is_snapshot(self.version):
        # Not saved: momenta that are kept nowhere else are as large as weights.
        self._snapshots[self.version] = state.replace(momenta=())
      self._used.update(ticket for ticket, _ in keys)
      for key in [k for k in self._pending if k[0] in self._used]:
        del self._pending[key]
      self._changed.notify_all()
    return ''
