"""The flag --vary of a study: any key of the config is an axis."""

from collections.abc import Iterable, Mapping
import dataclasses
import itertools
import re

from anp_jax import config as config_lib
from anp_jax.config import command_line, resolve

# (key, text) pairs of the varied keys that a run has.
Varied = tuple[tuple[str, str], ...]
_BRACKETS = re.compile(r'^\((.*)\)$')  # around a text with commas of its own


@dataclasses.dataclass(frozen=True)
class Axis:
  """One varied key.

  Attributes:
    key: dotted name.
    values: values as texts.
    flag: flag that varies it.
  """

  key: str
  values: tuple[str, ...]
  flag: str = '--vary'


def parse(
  texts: Iterable[str],
  strategies: Iterable[str],
  overrides: Mapping[str, str],
  flags: Mapping[str, str],
  flag: str = '--vary',
) -> tuple[Axis, ...]:
  """Returns the axes of a flag, in their order.

  Args:
    texts: texts of the flag, such as 'strategy.mode=async,rennala'. A comma in brackets does not
      separate values; brackets around a text are not part of it.
    strategies: strategies of the study.
    overrides: overrides of all its runs, by dotted key.
    flags: other flags that set a key, by dotted key.
    flag: flag that an error names.

  Raises:
    ConfigError: for an unknown key, with the nearest, for one that is set twice, and for a value
      that the key does not take.
  """
  keys = resolve.known_keys(*strategies)
  axes: dict[str, Axis] = {}
  for text in texts:
    typed, equals, values = text.partition('=')
    key = typed.strip()
    if not equals:
      raise config_lib.ConfigError(
        f'{flag}={text}: expected KEY=VALUE,VALUE,..., such as strategy.mode=async,rennala'
      )
    if key in flags:
      raise config_lib.ConfigError(f'{flag}={text}: the study sets it; use {flags[key]}')
    if key not in keys:
      raise config_lib.ConfigError(
        f'{flag}={text}: unknown key {key}{config_lib.nearest(key, keys)}'
      )
    if key in axes or key in overrides:
      raise config_lib.ConfigError(f'{flag}={text}: {key} is set twice')
    parts = [_value(key, keys[key], part) for part in _split(values)]
    axes[key] = Axis(key, tuple(dict.fromkeys(parts)), flag)
  return tuple(axes.values())


def combinations(spec: str, overrides: Mapping[str, str], axes: Iterable[Axis]) -> list[Varied]:
  """Returns every combination of values, each once.

  A key that does not apply to a run, such as strategy.mode to strategy.name=sync,
  is not in its combination.

  Args:
    spec: FILE[:VARIANT] of the config.
    overrides: overrides of the run with the strategy's name, by dotted key.
    axes: axes of the study.
  """
  combined: dict[Varied, bool] = {}
  for values in itertools.product(*(axis.values for axis in axes)):
    varied = dict(zip((axis.key for axis in axes), values))
    applying = command_line.applying(spec, dict(overrides) | varied)
    combined[tuple((k, v) for k, v in varied.items() if k in applying)] = True
  return list(combined)


def short_names(names: Iterable[str], separator: str = '.') -> dict[str, str]:
  """Returns the shortest endings of dotted keys, or of paths, that tell them apart."""
  names = tuple(names)
  short = {}
  for name in names:
    parts = name.split(separator)
    endings = (separator.join(parts[i:]) for i in reversed(range(len(parts))))
    short[name] = next(
      ending
      for ending in endings
      if ending == name or sum(f'{separator}{n}'.endswith(separator + ending) for n in names) == 1
    )
  return short


def _value(key, declared, text):
  """The text of a value in its canonical form."""
  text = text.strip()
  if isinstance(declared.default, str):
    text = _BRACKETS.sub(r'\1', text)
  value = declared.parse(key, text)
  declared.validate(key, value)
  return value if isinstance(value, str) else repr(value)


def _split(text):
  """The parts between the commas outside brackets."""
  parts, depth = [''], 0
  for letter in text:
    depth += (letter in '([{') - (letter in ')]}')
    if letter == ',' and not depth:
      parts.append('')
    else:
      parts[-1] += letter
  return parts
