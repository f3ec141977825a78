"""Checks of related keys, and of lists of pairs."""

import os
import re
import sys
from typing import Any

from anp_jax.config import data_keys, errors, trust, urls
from anp_jax.config.errors import check

SHARDING_RULES = ('replicate', 'fsdp')


def check_together(values: dict) -> None:
  """Refuses values that are valid by themselves, but not together.

  Args:
    values: values of all keys that apply, by dotted key.

  Raises:
    ConfigError: naming the key, its value and what was expected.
  """
  is_sized = values['batch_size'] or values['batch_size_per_device']
  check(is_sized, 'batch_size', 0, 'above 0 where batch_size_per_device is 0')
  decays = values.get('optimizer.decay_multipliers', ())
  if not values['optimizer.weight_decay']:
    check(not decays, 'optimizer.decay_multipliers', decays, '() where optimizer.weight_decay is 0')
  seeds = values['ensemble.seeds']
  good = not (seeds and values['emulate.enabled'])
  check(good, 'ensemble.seeds', seeds, "'' where emulate.enabled is True")
  _check_source(values)
  if values['data.source'] == 'synthetic':
    for key, default in ('data.held_out', ()), ('data.imbalance', 1), ('data.balance', 'none'):
      value = values[key]
      check(value == default, key, value, f'{default!r} for synthetic examples')
  if values['data.source'].startswith(data_keys.FEATURES):
    name = values['model.name']
    check(name == 'linear' or ':' in name, 'model.name', name, 'linear where data are features')
  size, resize = values['data.image_size'], values['data.resize']
  check(resize >= size, 'data.resize', resize, 'at least data.image_size')
  scales = values.get('data.scale_range', (size,))
  check(scales[0] >= size, 'data.scale_range', scales, 'at least data.image_size')


def _check_source(values):
  source = values['data.source']
  if 'data.path' in values and not trust.is_source_class(source):  # a class reads it as it likes
    path = values['data.path']
    # A source such as tar:PATTERN may be the whole path.
    check(path or ':' in source, 'data.path', path, f'the path of the {source}')
    urls.check('config.data.path', path)
    # What is in a store is looked up when it is copied.
    is_local = path and not urls.scheme(path)
    good = not is_local or os.path.exists(os.path.expanduser(path))
    check(good, 'data.path', path, 'a path that exists')
  urls.check('config.data.dir', values['data.dir'])
  lists = values.get('data.lists', '')
  if ',' in lists:
    words = 'auto or yes where data.lists has adjectives and nouns'
    check(values['data.pairs'] != 'no', 'data.pairs', 'no', words)
  for name in filter(None, (part.strip() for part in lists.split(','))):
    words = f'files of names, one a line, but there is no {name!r}'
    check(os.path.isfile(os.path.expanduser(name)), 'data.lists', lists, words)


def check_sharding(key: str, pairs: tuple) -> None:
  """Refuses values other than (regex, rule) pairs."""
  check_pairs(key, pairs, "(('.*', 'fsdp'),)")
  for pattern, rule in pairs:
    _check_pattern(key, pattern)
    errors.check_choice(f'config.{key}: rule {rule!r}', rule, SHARDING_RULES)


def check_multipliers(key: str, pairs: tuple) -> None:
  """Refuses values other than (regex, factor) pairs."""
  check_pairs(key, pairs, "(('stage1', 0), ('head', 10.0))")
  for pattern, factor in pairs:
    _check_pattern(key, pattern)
    good = is_number(factor) and factor >= 0
    check(good, key, (pattern, factor), 'a number of 0 or more')


def check_arguments(key: str, pairs: tuple) -> None:
  """Refuses values other than (name, value) pairs."""
  example = "(('b2', 0.95),)"
  check_pairs(key, pairs, example)
  good = all(isinstance(name, str) and name.isidentifier() for name, _ in pairs)
  check(good, key, pairs, f'pairs such as {example}')
  words = 'texts, numbers, True, False, None or tuples of these as values'
  check(all(_is_plain(value) for _, value in pairs), key, pairs, words)


def _is_plain(value):
  """Whether JSON keeps a value, with tuples as lists."""
  if isinstance(value, tuple | list):
    return all(map(_is_plain, value))
  return value is None or isinstance(value, bool | int | float | str)


def check_pairs(key: str, pairs: tuple, example: str) -> None:
  """Refuses values other than pairs; the error line has the example."""
  good = all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs)
  check(good, key, pairs, f'pairs such as {example}')


def is_number(value: Any) -> bool:
  """Returns whether a value is a finite number, and neither True nor False."""
  return type(value) in (int, float) and abs(value) <= sys.float_info.max  # not so for NaN


def is_pattern(value: Any) -> bool:
  """Returns whether a value is a regular expression."""
  try:
    re.compile(value)
  except (re.error, TypeError, OverflowError, RecursionError):
    return False
  return True


def _check_pattern(key, pattern):
  if not is_pattern(pattern):
    raise errors.ConfigError(f'config.{key}: {pattern!r} is not a regular expression')


def check_replicated(values: dict, reason: str) -> None:
  """Refuses divided parameters, for a reason that ends the error line."""
  rules = values['sharding']
  good = all(rule == 'replicate' for _, rule in rules)
  check(good, 'sharding', rules, f"'replicate' where {reason}")


def check_tls(values: dict) -> None:
  """Refuses a certificate without its key, and missing files."""
  certificate, key_file = values['strategy.tls_certificate'], values['strategy.tls_key']
  words = 'both tls_certificate and tls_key, or none'
  check(bool(certificate) == bool(key_file), 'strategy.tls_key', key_file, words)
  for key in ('strategy.tls_certificate', 'strategy.tls_key'):
    path = values[key]
    check(not path or os.path.isfile(path), key, path, 'a file that exists')


def check_shares(key: str, shares: tuple) -> None:
  """Refuses shares that are not numbers, negative or all 0."""
  good = all(is_number(s) and 0 <= s <= 1e9 for s in shares)
  check(
    good and (not shares or sum(shares) > 0),
    key,
    shares,
    'a number from 0 to 1e9 for each device, not all 0, or () for equal ones',
  )
