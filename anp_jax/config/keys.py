"""A key of the config: its default, what it is, and what values it takes.

A key is declared once, by one of the makers below; its type is that of its
default. The error lines and `--help` are derived from the declaration.
"""

import ast
from collections.abc import Callable
import dataclasses
import fnmatch
import math
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
_PATTERNS = {'?*': 'a path', '[!0]*': 'a number above 0'}


@dataclasses.dataclass(frozen=True)
class Key:
  """A key of the config.

  Attributes:
    default: its type is the key's.
    help: what the key is, with its unit and reason.
    expected: the values it takes, for --help; '' if `help` says it.
    check: raises ConfigError for (dotted key, value) of the right type that is
      out of range; None: every value is good.
    only_if: another key, and values of it (as fnmatch patterns) with which this
      key has a meaning; (): it always has.
    resumable: whether it may differ when a run is resumed.
    changeable: whether it may if --change names it.
    was_integer: whether a whole number stands for its text: what the key was
      before it became a text.
  """

  default: Any
  help: str
  expected: str = ''
  check: Callable[[str, Any], None] | None = None
  only_if: tuple = ()
  resumable: bool = False
  changeable: bool = False
  was_integer: bool = False

  def renewed(self, value):
    """Returns a value of the type that the key has now."""
    return str(value) if self.was_integer and type(value) is int else value

  def validate(self, name: str, value) -> None:
    """Refuses a value of another type, NaN, and what is out of range.

    Args:
      name: the dotted key.
      value: of the key.

    Raises:
      ConfigError: naming the key, the value and what was expected.
    """
    self.validate_kind(name, value)
    if self.check:
      self.check(name, value)

  def validate_kind(self, name: str, value) -> None:
    """Refuses a value of another type, NaN, and what is too large.

    For the arguments and errors see `validate`.
    """
    kind = type(self.default)
    good = type(value) is kind or (kind is float and type(value) is int)
    if not good or (type(value) is float and not math.isfinite(value)):
      raise self._type_error(name, value)
    if _is_too_large(value):
      raise errors.ConfigError(f'config.{name}={_shown(value)}: expected whole numbers below 2**53')

  def parse(self, name: str, text: str):
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
    """Returns whether the key has a meaning with these values of others."""
    if not self.only_if:
      return True
    key, patterns = self.only_if
    value = str(values.get(key))
    return any(fnmatch.fnmatchcase(value, p) for p in patterns)

  @property
  def condition(self) -> str:
    """Returns `only_if` in words: the other key and its values."""
    key, patterns = self.only_if
    return f'{key}={", ".join(_PATTERNS.get(p, p) for p in patterns)}'

  def _type_error(self, name, value):
    words = _KINDS.get(type(self.default), f'a tuple like {self.default!r}')
    return errors.ConfigError(f'config.{name}={_shown(value)}: expected {words}')


def _is_too_large(value):
  """Whether there is a whole number that no float has exactly."""
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


@dataclasses.dataclass(frozen=True)
class _Limits:
  above: float | None = None
  at_least: float | None = None
  below: float | None = None
  at_most: float | None = None

  @classmethod
  def pop_from(cls, arguments: dict) -> '_Limits':
    """Takes the limits out of a maker's keyword arguments."""
    names = [f.name for f in dataclasses.fields(cls)]
    return cls(**{n: arguments.pop(n) for n in names if n in arguments})

  def hold(self, value) -> bool:
    """Returns whether a number is within the limits."""
    return (
      (self.above is None or value > self.above)
      and (self.at_least is None or value >= self.at_least)
      and (self.below is None or value < self.below)
      and (self.at_most is None or value <= self.at_most)
    )

  def words(self) -> str:
    """Returns the limits as an error line says them; '' if there are none."""
    if self.above is not None:
      most = '' if self.at_most is None else f', at most {self.at_most}'
      return f'above {self.above}{most}' if most else (f'a number above {self.above}')
    if self.at_least is None:
      return ''
    if self.at_most is not None:
      return f'a number from {self.at_least} to {self.at_most}'
    if self.below is not None:
      return f'a number from {self.at_least}, below {self.below}'
    return f'{self.at_least} or more'


def _limited(default, help, expected, more):
  limits = _Limits.pop_from(more)
  words = expected or limits.words()

  def check(name, value):
    errors.check(limits.hold(value), name, value, words)

  return Key(default, help, words, check if words else None, **more)


def number(default: float, help: str, *, expected: str = '', **more) -> Key:
  """Returns the key of a number within limits.

  Args:
    default: of the key.
    help: what it is.
    expected: the limits in words; '': derived from them.
    **more: the limits `above`, `at_least`, `below` and `at_most`; `only_if`
      and `resumable` of `Key`.
  """
  return _limited(float(default), help, expected, more)


def integer(default: int, help: str, *, expected: str = '', **more) -> Key:
  """Returns the key of a whole number within limits; see `number`."""
  return _limited(default, help, expected, more)


def flag(default: bool, help: str, **more) -> Key:
  """Returns the key of True or False."""
  return Key(default, help, **more)


def text(default: str, help: str, choices=(), form: str = '', words: str = '', **more) -> Key:
  """Returns the key of a text.

  Args:
    default: of the key.
    help: what it is.
    choices: the texts that are allowed; (): any.
    form: regular expression of other texts that are allowed beyond these.
    words: what `form` is, for an error line; '': `choices` say it.
    **more: further fields of `Key`.
  """
  if not choices:
    return Key(default, help, **more)
  names = ', '.join(c or "''" for c in choices)
  expected = f'one of {names}' + (f' or {words}' if words else '')

  def check(name, value):
    if value in choices or (form and re.fullmatch(form, value)):
      return
    raise errors.ConfigError(
      f'config.{name}={value!r}: expected {expected}{errors.nearest(value, choices)}'
    )

  return Key(default, help, expected, check, **more)


def duration(default: str, help: str, zero: bool = False, **more) -> Key:
  """Returns the key of a duration ('3 epochs'), which may be 0 if `zero`."""

  def check(name, value):
    try:
      count = durations.steps(value, 1, 1)
    except errors.ConfigError as e:
      raise errors.ConfigError(f'config.{name}={e}') from None
    errors.check(count > 0 or zero, name, value, 'more than nothing')

  return Key(default, help, '', check, **more)


def milestones(default: str, help: str, **more) -> Key:
  """Returns the key of durations, divided by commas; of one, each repeats."""

  def check(name, value):
    try:
      durations.milestones(value, 1, 1)
    except errors.ConfigError as e:
      raise errors.ConfigError(f'config.{name}={e}') from None

  return Key(default, help, '', check, **more)


def staircase(default: str, help: str, **more) -> Key:
  """Returns the key of whole numbers over time; see `durations.staircase`."""

  def check(name, value):
    try:
      durations.staircase(value, 1, 1)
    except errors.ConfigError as e:
      raise errors.ConfigError(f'config.{name}={e}') from None

  return Key(default, help, '', check, was_integer=True, **more)


def numbers(
  default: tuple,
  help: str,
  *,
  expected: str = '',
  increasing: bool = False,
  integers: bool = False,
  **more,
) -> Key:
  """Returns the key of a tuple of as many numbers as the default has.

  Args:
    default: of the key.
    help: what it is.
    expected: the words for `at_most`.
    increasing: whether the first is at most the second.
    integers: whether they are whole numbers.
    **more: `above` and `at_most`, the limits of each; `only_if` and `resumable`
      of `Key`.
  """
  limits = _Limits.pop_from(more)
  above = _Limits(above=limits.above)
  kinds = (int,) if integers else (int, float)
  words = f'{len(default)} {"whole " * integers}numbers'
  words += '' if limits.above is None else f' above {limits.above}'

  def check(name, value):
    good = len(value) == len(default) and all(
      type(v) in kinds and math.isfinite(v) and above.hold(v) for v in value
    )
    errors.check(good, name, value, words)
    if increasing:
      errors.check(value[0] <= value[1], name, value, 'low before high')
    errors.check(limits.hold(max(value)), name, value, expected)

  order = ', low before high' if increasing else ''
  return Key(default, help, words + order, check, **more)


def value(default, help: str, good: Callable, expected: str, **more) -> Key:
  """Returns the key of a value of a kind of its own.

  Args:
    default: of the key.
    help: what it is.
    good: whether a value of the right type is allowed.
    expected: what is, for an error line.
    **more: further fields of `Key`.
  """

  def check(name, candidate):
    errors.check(good(candidate), name, candidate, expected)

  return Key(default, help, expected, check, **more)
