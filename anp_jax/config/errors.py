"""Errors of configs, flags and workdirs: one line each, with the nearest valid name."""

from collections.abc import Collection, Iterable
import difflib
import os
import unicodedata

# Below this share of equal letters a proposal is nonsense: maybe, yes.
_ALIKE = 0.6
_JOINERS = '\u200c\u200d'  # of letters in Persian, and of emoji


class ConfigError(ValueError):
  """A config, flag or workdir that a run cannot start with; its text is one line."""


def printable(text: str) -> str:
  """Returns a text on one line, with escapes for what a terminal would obey or would not show."""
  # macOS has a narrow space, which Python does not print, in the names of screenshots.
  return ''.join(
    c
    if c.isprintable() or unicodedata.category(c) == 'Zs' or c in _JOINERS
    else c.encode('unicode_escape').decode()
    for c in text
  )


def nearest(name: object, valid: Iterable[object]) -> str:
  """Returns the valid name nearest to `name`, as text for an error line.

  A name whose start was typed comes first, then a key that was typed
  without its group, then a similar name, then one that is in small letters; '' if there is none.
  """
  text, names = str(name), [str(v) for v in valid]
  stem, suffix = os.path.splitext(text)
  is_short = len(stem.strip('-')) < 2
  continued = [n for n in names if n.startswith(stem) and n.endswith(suffix) and not is_short]
  leaf = text.rpartition('.')[2]
  same_leaf = [n for n in names if n.rpartition('.')[2] == leaf]
  for candidates, cutoff in ((continued, 0), (same_leaf, 0), (names, _ALIKE)):
    matches = difflib.get_close_matches(text, candidates, 1, cutoff)
    if matches:
      return f'; did you mean {matches[0]!r}?'
  return nearest(text.lower(), names) if text != text.lower() else ''


def check_choice(place: str, value: object, choices: Collection[str], form: str = '') -> None:
  """Raises ConfigError for a value that is none of the choices; it names the nearest.

  Args:
    place: flag or key with the value, as text for the error line.
    value: value of the flag or key.
    choices: allowed values.
    form: form of further allowed values, as text for the error line.
  """
  if value not in choices:
    names = ', '.join(choice or "''" for choice in choices) + (form and f' or {form}')
    raise ConfigError(f'{place}: expected one of {names}{nearest(value, choices)}')


def check(good: object, key: str, value: object, expected: str) -> None:
  """Raises ConfigError, naming the key and what was expected, if not good."""
  if not good:
    raise ConfigError(f'config.{key}={value!r}: expected {expected}')
