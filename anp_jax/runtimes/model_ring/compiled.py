"""Compiled programs of a station, each compiled once for all threads."""

from collections.abc import Callable
from concurrent import futures
import hashlib
import threading

from anp_jax.system import compile_cache


class Once:
  """Values by key: computed by the first thread to ask; others wait for it."""

  def __init__(self):
    self._lock = threading.Lock()
    self._futures = {}

  def get(self, key, compute: Callable):
    """Returns the value of a key; waits for no other key's.

    Args:
      key: hashable.
      compute: called () without a lock, unless the value is there or on its
        way.

    Raises:
      BaseException: what `compute` raised, in every thread that asks.
    """
    with self._lock:
      future = self._futures.get(key)
      if is_first := future is None:
        future = self._futures[key] = futures.Future()
    if is_first:
      try:
        future.set_result(compute())
      except BaseException as e:
        future.set_exception(e)
        raise
    return future.result()

  def forget(self, key) -> None:
    """Drops a value; the next `get` computes it again."""
    with self._lock:
      self._futures.pop(key, None)


class Programs:
  """Compiled programs of one station, by their text.

  Models that differ in their seed alone have the same text. Any thread may ask.
  """

  def __init__(self):
    self._compiled = Once()
    self._lock = threading.Lock()
    self._models = {}  # by text, the models that have asked for it

  def get(self, model: int, program, *arguments):
    """Returns a model's program, compiled for arguments like these."""
    lowered = program.lower(*arguments)
    key = hashlib.sha256(lowered.as_text().encode()).digest()
    with self._lock:
      self._models.setdefault(key, set()).add(model)
    return self._compiled.get(key, lambda: _compile(lowered))

  def release(self, model: int) -> None:
    """Forgets what was compiled for this model and no other."""
    with self._lock:
      for key, models in list(self._models.items()):
        models.discard(model)
        if not models:
          del self._models[key]
          self._compiled.forget(key)


def _compile(lowered):
  compiled = lowered.compile()
  compile_cache.release_memory()
  return compiled
