"""A key of the config: its default, text and allowed values.

A key is declared once, by one of the makers below; its type is that of its default.
Error lines and `--help` are derived from the declaration.
"""

import ast
from collections.abc import Callable, Sequence
import dataclasses
import fnmatch
import math
import operator
import re
from typing import Any

from anp_jax.config import durations, errors

ADDRESS = r'\w+(\.\w+)*:\w+'
CLASS = 'package.module:Class'
FUNCTION = 'package.module:function'
_KINDS = {bool: 'True or False', int: 'a whole number', float: 'a number', str: 'a text'}
# The ways in which ast.literal_eval refuses a text.
_NO_LITERAL = ValueError, TypeError, SyntaxError, MemoryError, RecursionError
_LARGEST = 2**53
_SHOWN = 200  # letters
# What `Key.only_if` may have in place of names.
_PATTERNS = {'?*': 'a value', '[!0]*': 'a number above 0'}


@dataclasses.dataclass(frozen=True)
class Key:
  """A key of the config.

  Attributes:
    default: default value, whose type is the key's.
    help: noun phrase for --help, with unit and reason.
    expected: allowed values, for --help; '' if `help` says them.
    check: check of (dotted key, value), which raises ConfigError; None: every
      value of the right type is allowed.
    only_if: other key, and values of it (as fnmatch patterns) with which this
      key applies; (): it always applies.
    resumable: whether the value may differ when a run is resumed.
    changeable: whether the value may differ if --change names the key.
    was_integer: whether a whole number stands for its text.
  """

  default: Any
  help: str
  expected: str = ''
  check: Callable[[str, Any], None] | None = None
  only_if: tuple[()] | tuple[str, tuple[str, ...]] = ()
  resumable: bool = False
  changeable: bool = False
  was_integer: bool = False

  def as_text(self, value: Any) -> Any:
    """Returns the value, where a whole number stands for a text as that text."""
    return str(value) if self.was_integer and type(value) is int else value

  def validate(self, name: str, value: Any) -> None:
    """Refuses a value of another type, NaN, and what is out of range.

    Args:
      name: dotted key.
      value: value of any type.

    Raises:
      ConfigError: naming the key, the value and what was expected.
    """
    self.validate_kind(name, value)
    if self.check:
      self.check(name, value)

  def validate_kind(self, name: str, value: Any) -> None:
    """Refuses a value of another type, NaN, and too large numbers; see `validate`."""
    kind = type(self.default)
    good = type(value) is kind or (kind is float and type(value) is int)
    if not good or (type(value) is float and not math.isfinite(value)):
      raise self._type_error(name, value)
    if _is_too_large(value):
      raise errors.ConfigError(f'config.{name}={_shown(value)}: expected whole numbers below 2**53')

  def parse(self, name: str, text: str) -> Any:
    """Returns the value that was typed as `text`.

    Raises:
      ConfigError: if that is not of the key's type.
    """
    kind = type(self.default)
    if kind is str:
      return text
    try:
      literal = text.strip().capitalize() if kind is bool else text
      value = ast.literal_eval(literal)
    except _NO_LITERAL:
      raise self._type_error(name, text) from None
    if kind is tuple and isinstance(value, list):
      value = tuple(value)
    if kind is float and type(value) is int and not _is_too_large(value):
      return float(value)
    return value

  def applies(self, values: dict[str, Any]) -> bool:
    """Returns whether the key applies with these values of other keys."""
    if not self.only_if:
      return True
    key, patterns = self.only_if
    value = str(values.get(key))
    return any(fnmatch.fnmatchcase(value, p) for p in patterns)

  @property
  def condition(self) -> str:
    """Returns `only_if` in words: the other key and its values."""
    assert self.only_if
    key, patterns = self.only_if
    return f'{key}={", ".join(_PATTERNS.get(p, p) for p in patterns)}'

  def _type_error(self, name, value):
    words = _KINDS.get(type(self.default), f'a tuple like {self.default or ("a", "b")!r}')
    return errors.ConfigError(f'config.{name}={_shown(value)}: expected {words}')


def _is_too_large(value):
  """Whether a value holds a whole number that no float represents exactly."""
  if isinstance(value, tuple | list):
    return any(map(_is_too_large, value))
  return isinstance(value, int) and abs(value) > _LARGEST


def _shown(value):
  """A value for an error line, which stays short."""
  try:
    text = repr(value)
  except ValueError:  # Python writes no number of more than 4300 digits
    text = 'a number of thousands of digits'
  return text if len(text) <= _SHOWN else f'{text[:_SHOWN]}...'


_LIMITS = {
  'above': operator.gt,
  'at_least': operator.ge,
  'below': operator.lt,
  'at_most': operator.le,
}


def _pop_limits(arguments: dict) -> dict[str, float]:
  """Takes the limits out of a maker's keyword arguments."""
  return {name: arguments.pop(name) for name in _LIMITS if name in arguments}


def _holds(limits, value):
  return all(_LIMITS[name](value, limit) for name, limit in limits.items())


def _limit_words(limits):
  """The limits for an error line; '' if there are none."""
  if not limits:
    return ''
  if list(limits) == ['at_least']:
    return f'{limits["at_least"]} or more'
  upper = ' to' if 'at_least' in limits else ', at most'
  words = {'above': ' above', 'at_least': ' from', 'below': ', below', 'at_most': upper}
  return 'a number' + ''.join(f'{words[name]} {limit}' for name, limit in limits.items())


def number(default: float, help: str, **more: Any) -> Key:
  """Returns the key of a number within limits.

  Args:
    default: default value.
    help: text of the key.
    **more: the limits `above`, `at_least`, `below` and `at_most`, and further
      fields of `Key`.
  """
  return integer(float(default), help, **more)


def integer(default: float, help: str, **more: Any) -> Key:
  """Returns the key of a whole number within limits; see `number`."""
  limits = _pop_limits(more)
  words = _limit_words(limits)

  def check(name, value):
    errors.check(_holds(limits, value), name, value, words)

  return Key(default, help, words, check if limits else None, **more)


def share(default: float, help: str, **more: Any) -> Key:
  """Returns the key of a number from 0 to 1; see `number`."""
  return number(default, help, at_least=0, at_most=1, **more)


def decay(default: float, help: str, **more: Any) -> Key:
  """Returns the key of a number from 0, below 1; see `number`."""
  return number(default, help, at_least=0, below=1, **more)


def flag(default: bool, help: str, **more: Any) -> Key:
  """Returns the key of True or False."""
  return Key(default, help, **more)


def text(
  default: str, help: str, choices: Sequence[str] = (), form: str = '', words: str = '', **more: Any
) -> Key:
  """Returns the key of a text.

  Args:
    default: default value.
    help: text of the key.
    choices: allowed texts; (): any.
    form: regular expression of further allowed texts.
    words: name of `form` in error lines; '': `choices` say it.
    **more: further fields of `Key`.
  """
  if not choices:
    return Key(default, help, **more)
  names = ', '.join(c or "''" for c in choices)
  expected = f'one of {names}' + (f' or {words}' if words else '')

  def check(name, value):
    if not form or not re.fullmatch(form, value):
      errors.check_choice(f'config.{name}={value!r}', value, choices, words)

  return Key(default, help, expected, check, **more)


def _parsed(default: str, help: str, parse: Callable, **more: Any) -> Key:
  """Returns the key of a text; `parse` raises ConfigError for a wrong one."""

  def check(name, value):
    try:
      parse(value)
    except errors.ConfigError as e:
      raise errors.ConfigError(f'config.{name}={e}') from None

  return Key(default, help, '', check, **more)


def duration(default: str, help: str, zero: bool = False, **more: Any) -> Key:
  """Returns the key of a duration ('3 epochs'), which may be 0 if `zero`."""

  def parse(text):
    if not durations.steps(text, 1, 1) and not zero:
      raise errors.ConfigError(f'{text!r}: expected more than nothing')

  return _parsed(default, help, parse, **more)


def milestones(default: str, help: str, **more: Any) -> Key:
  """Returns the key of `durations.milestones`."""
  return _parsed(default, help, lambda text: durations.milestones(text, 1, 1), **more)


def staircase(default: str, help: str, **more: Any) -> Key:
  """Returns the key of `durations.staircase`, which may be a whole number."""
  return _parsed(
    default, help, lambda text: durations.staircase(text, 1, 1), was_integer=True, **more
  )


def window(default: str, help: str, least: int = 1, **more: Any) -> Key:
  """Returns the key of `durations.window`."""
  return _parsed(default, help, lambda text: durations.window(text, least), **more)


def numbers(
  default: tuple, help: str, increasing: bool = False, integers: bool = False, **more: Any
) -> Key:
  """Returns the key of a tuple of as many numbers as the default has.

  Args:
    default: default value.
    help: text of the key.
    increasing: whether the first is at most the second.
    integers: whether the numbers are whole.
    **more: the limits of each number, and further fields of `Key`; see `number`.
  """
  limits = _pop_limits(more)
  kinds = (int,) if integers else (int, float)
  limit = _limit_words(limits).removeprefix('a number')
  words = f'{len(default)} {"whole " * integers}numbers'
  words += ' of ' * limit[:1].isdigit() + limit + ', low before high' * increasing

  def check(name, value):
    good = len(value) == len(default) and all(
      type(v) in kinds and math.isfinite(v) and _holds(limits, v) for v in value
    )
    errors.check(good and (not increasing or value[0] <= value[1]), name, value, words)

  return Key(default, help, words, check, **more)


def value(default: Any, help: str, good: Callable[[Any], Any], expected: str, **more: Any) -> Key:
  """Returns the key of a value with a check of its own.

  Args:
    default: default value.
    help: text of the key.
    good: whether a value of the right type is allowed.
    expected: allowed values, for error lines.
    **more: further fields of `Key`.
  """

  def check(name, candidate):
    errors.check(good(candidate), name, candidate, expected)

  return Key(default, help, expected, check, **more)
