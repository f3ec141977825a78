"""Checks of keys that belong together; see validation.py."""

import math
import os
import re

from anp_jax import config as config_lib

SHARDING_RULES = ('replicate', 'fsdp')


def check(good, key: str, value, expected: str) -> None:
  """Raises ConfigError, naming the key and what was expected, if not good."""
  if not good:
    raise config_lib.ConfigError(f'config.{key}={value!r}: expected {expected}')


def examples(have: dict) -> None:
  """Checks which examples training shows, and how often; have as `strategy`."""
  names, imbalance = have['data.held_out'], have['data.imbalance']
  check(all(isinstance(n, str) for n in names), 'data.held_out', names,
        "names of classes, as in ('red_car',)")  # fmt: skip
  check(imbalance >= 1, 'data.imbalance', imbalance, '1 or more')
  balance, power = have['data.balance'], have['data.balance_power']
  check(0 < power <= 1, 'data.balance_power', power, 'above 0, at most 1')
  check(
    power == 1 or balance == 'weights', 'data.balance_power', power,
    "1 where data.balance is not 'weights'",
  )  # fmt: skip
  if have['data.source'] == 'synthetic':
    check(not names, 'data.held_out', names, '() for synthetic examples')
    check(imbalance == 1, 'data.imbalance', imbalance,
          '1 for synthetic examples')  # fmt: skip
    check(balance == 'none', 'data.balance', balance,
          "'none' for synthetic examples")  # fmt: skip


def sharding(rules) -> None:
  """Checks the (regex, rule) pairs."""
  for rule in rules:
    good = isinstance(rule, tuple | list) and len(rule) == 2
    check(good, 'sharding', rules, "pairs such as (('.*', 'fsdp'),)")
    pattern, name = rule
    _check_pattern('sharding', pattern)
    if name not in SHARDING_RULES:
      raise config_lib.ConfigError(
        f'config.sharding: rule {name!r}: expected one of '
        f'{", ".join(SHARDING_RULES)}{config_lib.nearest(name, SHARDING_RULES)}'
      )


def multipliers(rules) -> None:
  """Checks the (regex, value) pairs of optimizer.multipliers."""
  key = 'optimizer.multipliers'
  for rule in rules:
    good = isinstance(rule, tuple | list) and len(rule) == 2
    check(good, key, rules, "pairs such as (('stage1', 0), ('head', 10.0))")
    pattern, value = rule
    _check_pattern(key, pattern)
    good = type(value) in (int, float) and math.isfinite(value) and value >= 0
    check(good, key, rule, 'a number of 0 or more')


def _check_pattern(key, pattern) -> None:
  try:
    re.compile(pattern)
  except (re.error, TypeError):
    raise config_lib.ConfigError(
      f'config.{key}: {pattern!r} is not a regular expression'
    ) from None


def check_replicated(have: dict, reason: str) -> None:
  """Refuses divided parameters; reason: what they do not go with."""
  rules = have['sharding']
  check(
    all(rule == 'replicate' for _, rule in rules), 'sharding', rules,
    f"'replicate' where {reason}",
  )  # fmt: skip


def check_tls(have: dict) -> None:
  """Refuses a certificate without its key, and files that are not there."""
  pair = [have['strategy.tls_certificate'], have['strategy.tls_key']]
  check(
    all(pair) or not any(pair), 'strategy.tls_key', pair[1],
    'both tls_certificate and tls_key, or none',
  )  # fmt: skip
  for key in ('strategy.tls_certificate', 'strategy.tls_key'):
    path = have[key]
    check(not path or os.path.isfile(path), key, path, 'a file that exists')


def check_shares(have: dict) -> None:
  """Refuses shares that are no numbers, below 0 or all 0."""
  shares = have['strategy.shares']
  good = all(isinstance(s, int | float) and s >= 0 for s in shares)
  check(
    good and (not shares or sum(shares) > 0), 'strategy.shares', shares,
    'a number for each device, 0 or more and not all 0, or () for equal ones',
  )  # fmt: skip
