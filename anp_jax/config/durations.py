"""Durations and windows of steps, as texts of a config."""

import itertools
import math
import re

from anp_jax.config import errors

_POSITIVE = re.compile(r'0*[1-9][0-9]{0,8}')
_MOST_STEPS = 1e15  # a float counts them exactly
_UNITS = ('steps', 'epochs', 'examples')
_WINDOW = re.compile(r'([0-9]{1,18}):([0-9]{1,18})')
_DURATION = re.compile(r'\s*([0-9]+(?:\.[0-9]*)?(?:e[0-9]+)?)\s*([a-z]+)\s*')


def amount(text: str) -> tuple[float, str]:
  """Returns the number of a duration and its unit: 'steps', 'epochs' or 'examples'.

  Raises:
    ConfigError: if the text is not of that form.
  """
  match = _DURATION.fullmatch(str(text))
  count, unit = match.groups() if match else ('0', str(text))
  number, units = float(count), unit.removesuffix('s') + 's'
  if units not in _UNITS or not match or not math.isfinite(number):
    raise errors.ConfigError(
      f'{text!r} is not a duration: expected a number and a unit, such as '
      f"'10 epochs', '500 steps' or '1e6 examples'"
      f'{errors.nearest(unit, _UNITS)}'
    )
  return number, units


def steps(text: str, batch_size: int, examples: int) -> int:
  """Returns a duration in steps, rounded up so that nothing is cut short.

  Args:
    text: number and steps, epochs or examples ('1.5 epochs', '2e6 examples').
    batch_size: images per step.
    examples: images per epoch.

  Raises:
    ConfigError: if the text is not of that form.
  """
  number, units = amount(text)
  images = {'steps': batch_size, 'epochs': examples, 'examples': 1}[units]
  total = number * images / batch_size
  if total > _MOST_STEPS:
    raise errors.ConfigError(f'{text!r} is {total:.3g} steps: expected {_MOST_STEPS:.0e} at most')
  # Rounded first: 0.1 x 30 must not become 4 steps by its last bit.
  return max(math.ceil(round(total, 6)), int(number > 0))


def milestones(text: str, batch_size: int, examples: int) -> list[int]:
  """Returns the steps of a text of durations ('32000 steps, 48000 steps').

  Args:
    text: durations, divided by commas, each longer than the one before.
    batch_size: images per step.
    examples: images per epoch.

  Raises:
    ConfigError: if the text is not of that form.
  """
  counts = [steps(part, batch_size, examples) for part in str(text).split(',')]
  if any(late <= early for early, late in itertools.pairwise([0, *counts])):
    raise errors.ConfigError(
      f'{text!r}: expected more than nothing, and each duration longer than the one before'
    )
  return counts


def staircase(text: str, batch_size: int, examples: int) -> list[tuple[int, int]]:
  """Returns from which step on which whole number holds.

  Args:
    text: the first number, then more, each with the duration after which it
      holds ('1,8@1000 steps,32@5 epochs').
    batch_size: images per step.
    examples: images per epoch.

  Returns:
    [(0, number), (step, number), ...], in the text's order.

  Raises:
    ConfigError: if the text is not of that form.
  """
  first, *later = (part.strip() for part in str(text).split(','))
  pairs = [part.partition('@')[::2] for part in later]
  numbers = [first, *(number.strip() for number, _ in pairs)]
  are_numbers = all(_POSITIVE.fullmatch(number) for number in numbers)
  if not are_numbers or not all('@' in part for part in later):
    raise errors.ConfigError(
      f"{text!r}: expected a whole number above 0, such as '8', or several, "
      "each with what precedes it, such as '1,8@1000 steps,32@5 epochs'"
    )
  starts = [0, *(steps(start, batch_size, examples) for _, start in pairs)]
  return list(zip(starts, map(int, numbers)))


def window(text: str, least: int = 1) -> range:
  """Returns the numbers that 'first:last' names, without last; none for ''.

  Args:
    text: text of the window.
    least: smallest first number; a run's first step is 1.

  Raises:
    ConfigError: if the text is not of that form.
  """
  match = _WINDOW.fullmatch(text)
  if text and (not match or not least <= int(match[1]) < int(match[2])):
    raise errors.ConfigError(
      f"{text!r}: expected first:last, such as '10:15' for 10 to 14, from {least} on, or nothing"
    )
  return range(int(match[1]), int(match[2])) if match else range(0)
