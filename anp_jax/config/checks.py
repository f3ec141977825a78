"""Checks of keys that belong together; see validation.py."""

import math
import os
import re

from anp_jax import config as config_lib

SHARDING_RULES = ('replicate', 'fsdp')
# Devices beside the mesh, of this process or all of the others.
_HELPER = re.compile(r'(cpu|gpu|cuda|rocm|tpu):[0-9]{1,4}|processes')


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
  check(
    balance == 'none' or have['strategy.name'] != 'relay', 'data.balance',
    balance, "'none' where strategy.name is relay: a station knows its own "
    'part of the data only',
  )  # fmt: skip


def strategy(have: dict) -> None:
  """Checks what strategy.name needs, or cannot do with; have: by dotted key."""
  _validate_tls(have)
  if have['strategy.name'] == 'server':
    _validate_server(have)
  if have['strategy.name'] == 'invariant':
    check(
      have['batch_size'], 'batch_size', 0, 'a number of images where '
      'strategy.name is invariant: batch_size_per_device makes the batch '
      'depend on the number of devices',
    )  # fmt: skip
  if have['strategy.name'] == 'kernel_split':
    _validate_kernel_split(have)
  else:
    check(
      not have['strategy.helpers'], 'strategy.helpers',
      have['strategy.helpers'], '() where strategy.name is not kernel_split',
    )  # fmt: skip
  if have['strategy.name'] in ('kernel_split', 'relay'):
    _validate_shares(have)
  if have['strategy.name'] == 'relay':
    _validate_relay(have)


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


def _validate_server(have) -> None:
  name = have['optimizer.name']
  check(
    name not in ('lars', 'lamb'), 'optimizer.name', name,
    'another one where strategy.name is server: its trust ratios are norms of '
    'whole layers, and a server has a slice',
  )  # fmt: skip
  mode = have['strategy.mode']
  backups = have['strategy.backup_workers']
  check(
    not backups or mode == 'synchronous', 'strategy.backup_workers', backups,
    f"0 where strategy.mode is '{mode}': nobody is waited for there",
  )  # fmt: skip
  rules = have['sharding']
  check(
    all(rule == 'replicate' for _, rule in rules), 'sharding', rules,
    "'replicate' where strategy.name is server: the servers divide the state",
  )  # fmt: skip


def _validate_tls(have) -> None:
  pair = [have['strategy.tls_certificate'], have['strategy.tls_key']]
  check(
    all(pair) or not any(pair), 'strategy.tls_key', pair[1],
    'both tls_certificate and tls_key, or none',
  )  # fmt: skip
  for key in ('strategy.tls_certificate', 'strategy.tls_key'):
    path = have[key]
    check(not path or os.path.isfile(path), key, path, 'a file that exists')


def _validate_shares(have) -> None:
  shares = have['strategy.shares']
  good = all(isinstance(s, int | float) and s >= 0 for s in shares)
  check(
    good and (not shares or sum(shares) > 0), 'strategy.shares', shares,
    'a number for each device, 0 or more and not all 0, or () for equal ones',
  )  # fmt: skip


def _validate_relay(have) -> None:
  models = have['strategy.models']
  check(
    models and all(isinstance(m, str) for m in models), 'strategy.models',
    models, "texts such as ('seed=1', 'seed=2; model.width=32')",
  )  # fmt: skip
  check(
    not have['log.wandb'], 'log.wandb', have['log.wandb'],
    "'' where strategy.name is relay: its models have records of their own",
  )  # fmt: skip
  halving = have['strategy.halving']
  check(halving != 1, 'strategy.halving', halving, '0, or 2 or more')


def _validate_kernel_split(have) -> None:
  helpers = have['strategy.helpers']
  good = all(isinstance(h, str) and _HELPER.fullmatch(h) for h in helpers)
  check(
    good and len(set(helpers)) == len(helpers), 'strategy.helpers', helpers,
    "each once, of this process as in ('cpu:0', 'gpu:1'), or 'processes'",
  )  # fmt: skip
  pattern = have['strategy.split_layers']
  try:
    re.compile(pattern)
  except re.error:
    check(False, 'strategy.split_layers', pattern, 'a regular expression')
  check(
    not (have['strategy.plan'] and have['strategy.shares']), 'strategy.shares',
    have['strategy.shares'], '() where strategy.plan is given',
  )  # fmt: skip
  rules = have['sharding']
  check(
    all(rule == 'replicate' for _, rule in rules), 'sharding', rules,
    "'replicate' where strategy.name is kernel_split",
  )  # fmt: skip
