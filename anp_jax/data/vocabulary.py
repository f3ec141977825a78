"""Classes, and the adjective and noun that each of them is made of."""

import dataclasses
import functools
import hashlib

import numpy as np


@dataclasses.dataclass(frozen=True)
class Vocabulary:
  """Class names in order; Adjective-Noun Pairs where every name is one.

  Attributes:
    names: one a class; an ANP is 'adjective_noun', with one underscore.
  """

  names: tuple[str, ...]

  def __len__(self) -> int:
    return len(self.names)

  @functools.cached_property
  def is_anp(self) -> bool:
    """Whether every class has an adjective and a noun."""
    return all(
      name.count('_') == 1 and all(name.split('_')) for name in self.names
    )

  @functools.cached_property
  def adjectives(self) -> tuple[str, ...]:
    """Adjectives, sorted; empty for plain classes."""
    return tuple(sorted({name.split('_')[0] for name in self._pairs()}))

  @functools.cached_property
  def nouns(self) -> tuple[str, ...]:
    """Nouns, sorted; empty for plain classes."""
    return tuple(sorted({name.split('_')[1] for name in self._pairs()}))

  def adjective_ids(self) -> np.ndarray:
    """(classes,) int32: the adjective of each class."""
    ids = {a: i for i, a in enumerate(self.adjectives)}
    return np.array([ids[n.split('_')[0]] for n in self._pairs()], np.int32)

  def noun_ids(self) -> np.ndarray:
    """(classes,) int32: the noun of each class."""
    ids = {a: i for i, a in enumerate(self.nouns)}
    return np.array([ids[n.split('_')[1]] for n in self._pairs()], np.int32)

  def digest(self) -> str:
    """SHA-256 of the names in order, for a data set's fingerprint."""
    text = '\n'.join(self.names).encode()
    return hashlib.sha256(text).hexdigest()

  def _pairs(self):
    return self.names if self.is_anp else ()
