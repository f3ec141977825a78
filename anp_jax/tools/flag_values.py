"""Values of the flags of tools: lists of numbers, TOML files, and flags that go together."""

import argparse
from collections.abc import Iterable
import re
import tomllib
from typing import Any

from anp_jax import config as config_lib

_ELLIPSES = ('...', '…')


def numbers(flag: str, text: str, least: int = 1) -> tuple[int, ...]:
  """Returns whole numbers, such as '1,2,4' or '1,2,4,...,512', sorted, each once.

  Three points continue the numbers before them: by equal differences if the
  numbers have these, else by equal ratios.

  Args:
    flag: flag that an error names.
    text: text of the flag.
    least: smallest number that is accepted.

  Raises:
    ConfigError: naming the flag, the text and what was expected.
  """
  parts = [p.strip() for p in text.split(',')]
  gaps = [i for i, p in enumerate(parts) if p in _ELLIPSES]
  plain = [p for p in parts if p not in _ELLIPSES]
  if not all(re.fullmatch('[0-9]{1,9}', p) and int(p) >= least for p in plain):
    raise config_lib.ConfigError(
      f'{flag}={text!r}: expected whole numbers from {least}, such as 1,2,4 or 1,2,4,...,512'
    )
  if not gaps:
    return tuple(sorted(set(map(int, plain))))
  start, after = [int(p) for p in parts[: gaps[0]]], parts[gaps[0] + 1 :]
  terms = None
  if len(gaps) == 1 and len(start) >= 2 and len(after) == 1:
    terms = _progression(start, int(after[0]))
  if terms is None:
    raise config_lib.ConfigError(
      f'{flag}={text!r}: expected two or more numbers of equal differences or '
      'ratios, three points and a last number that they reach, such as '
      '1,2,4,...,512'
    )
  return tuple(terms)


def check_pairs(
  parser: argparse.ArgumentParser,
  flags: argparse.Namespace,
  pairs: Iterable[tuple[str, str, str, str]],
) -> None:
  """Refuses flags that do nothing without another, and flags that exclude each other.

  Args:
    parser: the parser of the flags, which knows their defaults.
    flags: its flags.
    pairs: (flag, 'with' or 'without', the other flag, reason) of each pair.

  Raises:
    ConfigError: naming the flag and the other.
  """
  typed = {name for name, value in vars(flags).items() if value != parser.get_default(name)}
  for name, word, other, reason in pairs:
    if name in typed and (other in typed) == (word == 'without'):
      value = getattr(flags, name)
      value = value[0] if isinstance(value, list) else value
      text = '' if value == '' or value is True else f'={value}'
      raise config_lib.ConfigError(f'--{name}{text}: expected {word} --{other}: {reason}')


def tables(flag: str, path: str) -> dict[str, Any]:
  """Returns the content of a TOML file.

  Args:
    flag: flag with its value, which an error names.
    path: path of the file.

  Raises:
    ConfigError: if it cannot be read.
  """
  try:
    with open(path, 'rb') as f:
      return tomllib.load(f)
  except (OSError, ValueError) as e:
    reason = (getattr(e, 'strerror', None) or str(e)).splitlines()[0]
    raise config_lib.ConfigError(f'{flag}: {reason}') from e


def _progression(start, last) -> list[int] | None:
  """The terms from a start to the last one; None if they do not reach it."""
  first, second = start[:2]
  if second <= first or last < start[-1] or last - first > 2**20:
    return None
  arithmetic = list(range(first, last + 1, second - first))
  ratio, geometric = second // max(first, 1), [first]
  while first and second % first == 0 and geometric[-1] < last:
    geometric.append(geometric[-1] * ratio)
  for terms in (arithmetic, geometric):
    if terms[: len(start)] == start and terms[-1] == last:
      return terms
  return None
