"""Compiled programs of a station, shared by models with the same program text."""

import hashlib
from typing import Any

import jax

from anp_jax.system import compile_cache


class Programs:
  """Compiled programs of one station, by the hash of their text.

  Models that differ in their seed alone have the same text. One thread calls at
  a time: the station's, and the main thread once that has ended.
  """

  def __init__(self):
    self._compiled: dict[bytes, jax.stages.Compiled] = {}
    self._models: dict[bytes, set[int]] = {}

  def get(self, model: int, program: Any, *arguments: Any) -> jax.stages.Compiled:
    """Returns a model's jitted program, compiled for arguments like these."""
    lowered = program.lower(*arguments)
    key = hashlib.sha256(lowered.as_text().encode()).digest()
    self._models.setdefault(key, set()).add(model)
    if key not in self._compiled:
      self._compiled[key] = lowered.compile()
      compile_cache.release_memory()
    return self._compiled[key]

  def release(self, model: int) -> None:
    """Drops what was compiled for this model and no other."""
    for key, models in list(self._models.items()):
      models.discard(model)
      if not models:
        del self._models[key], self._compiled[key]
