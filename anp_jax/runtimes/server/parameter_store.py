"""One server's slice while the run goes on: gradients in, weights out."""

import collections
import threading

from absl import logging
import numpy as np

# Snapshots that wait to be fetched before updates wait for them.
_SNAPSHOTS = 2


class Unfit(ValueError):
  """A message that is not what it should be; nothing was changed by it."""


class Keeper:
  """Applies updates in the desk's order, by a thread of its own.

  A gradient waits here until the desk has given its ticket a place; what other
  workers computed for the same ticket is dropped then. Weights are immutable
  arrays: a reader keeps the version that it began with.
  """

  def __init__(self, shard, state, is_due, most: int):
    """Starts the thread.

    Args:
      shard: `shard.Shard`.
      state: SliceState to begin with.
      is_due: version -> whether its state is to be kept until fetched.
      most: gradients that may wait, of all workers.
    """
    self._shard = shard
    self._state = state
    self._version = int(state.step)
    self._is_due = is_due
    self._most = most
    self._staged = {}  # (ticket, worker) -> gradient, term
    self._used = set()  # tickets of what was applied
    self._entries = collections.deque()
    self._snapshots = {}  # version -> SliceState, not fetched yet
    self._fetched = None, None  # the last of them that was
    self._over = False
    self.error = ''  # why no more updates are applied
    self._changed = threading.Condition()
    threading.Thread(target=self._run, name='keeper', daemon=True).start()

  @property
  def version(self) -> int:
    """Updates applied."""
    return self._version

  def stage(self, ticket, worker: str, gradient, term) -> None:
    """Holds a gradient until it is its turn; one of a used ticket is dropped.

    Args:
      ticket: (step, shard).
      worker: that computed it.
      gradient: (n,) in the wire's dtype.
      term: (m,) of the statistics.

    Raises:
      Unfit: if it is not finite, or too many wait.
    """
    for name, array in (('gradient', gradient), ('statistics', term)):
      # A sum is quicker to look at; it may overflow where no element does.
      total = np.add.reduce(array, dtype=np.float64)
      if not np.isfinite(total) and not np.isfinite(array).all():
        raise Unfit(f'{name} of ticket {ticket} are not finite')
    with self._changed:
      if ticket in self._used:
        return
      if len(self._staged) >= self._most:
        raise Unfit(f'{len(self._staged)} gradients wait already')
      self._staged[ticket, worker] = gradient, term

  def holds(self, ticket, worker: str) -> bool:
    """Whether a gradient is here, or has been, or another of its ticket."""
    with self._changed:
      return ticket in self._used or (ticket, worker) in self._staged

  def submit(self, order: int, parts: list[dict]) -> None:
    """The next update of the desk's order; all of it is staged here."""
    with self._changed:
      self._entries.append((order, parts))
      self._changed.notify_all()

  def read(self, at_least: int, timeout: float):
    """(version, SliceState), not older than version `at_least`.

    Raises:
      TimeoutError: if it is not there in time.
    """
    with self._changed:
      if not self._changed.wait_for(
        lambda: self._version >= at_least or self._over, timeout
      ):
        raise TimeoutError(f'version {at_least} is not there yet')
      return self._version, self._state

  def due(self) -> int | None:
    """The oldest version whose state waits to be fetched."""
    with self._changed:
      return min(self._snapshots, default=None)

  def snapshot(self, version: int, timeout: float):
    """The SliceState of a version that was due, or of the last one.

    It can be had again until a later one is asked for: it may be lost on its
    way.

    Raises:
      TimeoutError: if it is not there in time.
      Unfit: if it is not kept.
    """
    with self._changed:
      self._changed.wait_for(
        lambda: self._version >= version or self._over, timeout
      )
      if self._version < version:
        raise TimeoutError(f'version {version} is not there yet')
      if version != self._fetched[0]:
        is_last = version == self._version
        state = self._state if is_last else self._snapshots.get(version)
        if state is None:
          raise Unfit(f'version {version} is not kept here')
        self._fetched = version, state
        self._snapshots = {
          v: s for v, s in self._snapshots.items() if v > version
        }
        self._changed.notify_all()
      return self._fetched[1]

  def close(self) -> None:
    """Ends the thread."""
    with self._changed:
      self._over = True
      self._changed.notify_all()

  def _run(self):
    error = ''
    while not error:
      with self._changed:
        self._changed.wait_for(
          lambda: (
            self._over or (self._entries and len(self._snapshots) < _SNAPSHOTS)
          )
        )
        if self._over:
          return
        order, parts = self._entries.popleft()
      try:
        error = self._apply(order, parts)
      except Exception as e:  # noqa: BLE001 - else all would wait for this thread
        logging.exception('update %d cannot be applied', order)
        error = f'update {order} cannot be applied: {type(e).__name__}: {e}'
    with self._changed:
      self.error = error
      self._changed.notify_all()

  def _apply(self, order, parts):
    """Makes one update; says why not, where it is not finite."""
    keys = [(tuple(p['ticket']), p['worker']) for p in parts]
    with self._changed:
      staged = [self._staged[key] for key in keys]
    state, finite = self._shard.apply(
      self._state,
      [gradient for gradient, _ in staged],
      [term for _, term in staged],
      [part['weight'] for part in parts],
      order - parts[0]['reads'][0],
    )
    if not finite:
      return f'update {order} is not finite; nothing of it was saved'
    with self._changed:
      self._state, self._version = state, order + 1
      if self._is_due(self._version):
        self._snapshots[self._version] = state
      self._used.update(ticket for ticket, _ in keys)
      for key in [k for k in self._staged if k[0] in self._used]:
        del self._staged[key]
      self._changed.notify_all()
    return ''
