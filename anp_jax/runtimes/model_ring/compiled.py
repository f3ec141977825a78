"""Compiled programs of a station, shared by models that have the same."""

import hashlib

from anp_jax.system import compile_cache


class Programs:
  """Compiled programs of one station, by their text.

  Models that differ in their seed alone have the same text. One thread at a time
  asks: the station's, and the main thread once that has ended.
  """

  def __init__(self):
    self._compiled = {}
    self._models = {}  # by text, the models that have asked for it

  def get(self, model: int, program, *arguments):
    """Returns a model's program, compiled for arguments like these."""
    lowered = program.lower(*arguments)
    key = hashlib.sha256(lowered.as_text().encode()).digest()
    self._models.setdefault(key, set()).add(model)
    if key not in self._compiled:
      self._compiled[key] = lowered.compile()
      compile_cache.release_memory()
    return self._compiled[key]

  def release(self, model: int) -> None:
    """Forgets what was compiled for this model and no other."""
    for key, models in list(self._models.items()):
      models.discard(model)
      if not models:
        del self._models[key], self._compiled[key]
