"""Checks of keys that belong together, and of lists of rules."""

import math
import os
import re

from anp_jax.config import emulation_keys, errors, urls
from anp_jax.config.errors import check

SHARDING_RULES = ('replicate', 'fsdp')


def check_together(values: dict) -> None:
  """Refuses values that are good by themselves, but not with each other.

  Args:
    values: by dotted key, of all keys that apply.

  Raises:
    ConfigError: naming the key, its value and what was expected.
  """
  check(
    values['batch_size'] or values['batch_size_per_device'],
    'batch_size',
    0,
    'above 0 where batch_size_per_device is 0',
  )
  decays = values.get('optimizer.decay_multipliers', ())
  check(
    not decays or values['optimizer.weight_decay'],
    'optimizer.decay_multipliers',
    decays,
    '() where optimizer.weight_decay is 0',
  )
  _check_source(values)
  _check_synthetic(values)
  _check_emulation(values)
  size, resize = values['data.image_size'], values['data.resize']
  check(resize >= size, 'data.resize', resize, 'at least data.image_size')
  if 'data.scale_range' in values:
    scales = values['data.scale_range']
    check(scales[0] >= size, 'data.scale_range', scales, 'at least data.image_size')


def _check_emulation(values):
  if not values['emulate.enabled']:
    return
  sleeps = values['emulate.sleep']
  for name in emulation_keys.OF_SLEEPS:
    key = f'emulate.{name}'
    default = emulation_keys.KEYS[name].default
    check(
      sleeps or values[key] == default,
      key,
      values[key],
      f'{default!r} where emulate.sleep is False',
    )


def _check_source(values):
  if 'data.path' in values:
    path, source = values['data.path'], values['data.source']
    # A source such as tar:PATTERN may be the whole path.
    check(path or ':' in source, 'data.path', path, f'the path of the {source}')
    urls.check('config.data.path', path)
    # What is in a store is looked up when it is copied.
    is_local = path and not urls.scheme(path)
    check(
      not is_local or os.path.exists(os.path.expanduser(path)),
      'data.path',
      path,
      'a path that exists',
    )
  urls.check('config.data.dir', values['data.dir'])
  lists = values.get('data.lists', '')
  check(
    values['data.pairs'] != 'no' or ',' not in lists,
    'data.pairs',
    'no',
    'auto or yes where data.lists has adjectives and nouns',
  )
  for name in filter(None, (part.strip() for part in lists.split(','))):
    check(
      os.path.isfile(os.path.expanduser(name)),
      'data.lists',
      lists,
      f'files of names, one a line, but there is no {name!r}',
    )


def _check_synthetic(values):
  if values['data.source'] != 'synthetic':
    return
  for key, default, words in (
    ('data.held_out', (), '()'),
    ('data.imbalance', 1, '1'),
    ('data.balance', 'none', "'none'"),
  ):
    check(values[key] == default, key, values[key], f'{words} for synthetic examples')


def check_sharding(key: str, pairs: tuple) -> None:
  """Refuses what are no (regex, rule) pairs."""
  for pair in pairs:
    good = isinstance(pair, tuple | list) and len(pair) == 2
    check(good, key, pairs, "pairs such as (('.*', 'fsdp'),)")
    pattern, rule = pair
    _check_pattern(key, pattern)
    if rule not in SHARDING_RULES:
      raise errors.ConfigError(
        f'config.{key}: rule {rule!r}: expected one of '
        f'{", ".join(SHARDING_RULES)}{errors.nearest(rule, SHARDING_RULES)}'
      )


def check_multipliers(key: str, pairs: tuple) -> None:
  """Refuses what are no (regex, factor) pairs."""
  for pair in pairs:
    good = isinstance(pair, tuple | list) and len(pair) == 2
    check(good, key, pairs, "pairs such as (('stage1', 0), ('head', 10.0))")
    pattern, factor = pair
    _check_pattern(key, pattern)
    good = type(factor) in (int, float) and 0 <= factor < math.inf
    check(good, key, pair, 'a number of 0 or more')


def check_arguments(key: str, pairs: tuple) -> None:
  """Refuses what are no (name, value) pairs."""
  for pair in pairs:
    good = isinstance(pair, tuple | list) and len(pair) == 2 and str(pair[0]).isidentifier()
    check(good, key, pairs, "pairs such as (('b2', 0.95),)")


def _check_pattern(key, pattern):
  try:
    re.compile(pattern)
  except (re.error, TypeError, OverflowError, RecursionError):
    raise errors.ConfigError(f'config.{key}: {pattern!r} is not a regular expression') from None


def check_replicated(values: dict, reason: str) -> None:
  """Refuses divided parameters; reason: what they do not go with."""
  rules = values['sharding']
  check(
    all(rule == 'replicate' for _, rule in rules), 'sharding', rules, f"'replicate' where {reason}"
  )


def check_tls(values: dict) -> None:
  """Refuses a certificate without its key, and files that are not there."""
  pair = [values['strategy.tls_certificate'], values['strategy.tls_key']]
  check(
    all(pair) or not any(pair),
    'strategy.tls_key',
    pair[1],
    'both tls_certificate and tls_key, or none',
  )
  for key in ('strategy.tls_certificate', 'strategy.tls_key'):
    path = values[key]
    check(not path or os.path.isfile(path), key, path, 'a file that exists')


def check_shares(key: str, shares: tuple) -> None:
  """Refuses shares that are no numbers, below 0 or all 0."""
  good = all(isinstance(s, int | float) and s >= 0 for s in shares)
  check(
    good and (not shares or sum(shares) > 0),
    key,
    shares,
    'a number for each device, 0 or more and not all 0, or () for equal ones',
  )
