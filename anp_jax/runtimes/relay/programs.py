"""Compiled programs of a station, each made once by whoever asks first."""

from collections.abc import Callable
from concurrent import futures
import hashlib
import threading

from anp_jax.system import compile_cache


class Once:
  """Values by key: made by the first thread that asks; others wait for it."""

  def __init__(self):
    self._lock = threading.Lock()
    self._futures = {}

  def get(self, key, make: Callable):
    """The value of a key; waits for no other.

    Args:
      key: hashable.
      make: called () without a lock, unless the value is there or on its way.

    Raises:
      BaseException: that of the `make` which was to give the value, to all who
        ask.
    """
    with self._lock:
      found = self._futures.get(key)
      if is_first := found is None:
        found = self._futures[key] = futures.Future()
    if is_first:
      try:
        found.set_result(make())
      except BaseException as e:
        found.set_exception(e)
        raise
    return found.result()

  def forget(self, key) -> None:
    """Keeps it no longer; whoever asks next makes it anew."""
    with self._lock:
      self._futures.pop(key, None)


class Programs:
  """Compiled programs of one station, by their text.

  Models that differ in their seed alone have the same text. Any thread may ask.
  """

  def __init__(self):
    self._compiled = Once()
    self._lock = threading.Lock()
    self._owners = {}  # by text, the models that have asked for it

  def get(self, model: int, program, *arguments):
    """The compiled program for arguments like these, kept for a model."""
    lowered = program.lower(*arguments)
    key = hashlib.sha256(lowered.as_text().encode()).digest()
    with self._lock:
      self._owners.setdefault(key, set()).add(model)
    return self._compiled.get(key, lambda: _compile(lowered))

  def release(self, model: int) -> None:
    """Forgets what was compiled for this model and no other."""
    with self._lock:
      for key, models in list(self._owners.items()):
        models.discard(model)
        if not models:
          del self._owners[key]
          self._compiled.forget(key)


def _compile(lowered):
  compiled = lowered.compile()
  compile_cache.release_memory()
  return compiled
