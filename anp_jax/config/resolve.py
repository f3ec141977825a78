"""Configs: the keys that apply, and valid configs from recipes and typed overrides.

A config has a key that depends on the value of another key only while it applies.
"""

import dataclasses
import json
import os
from typing import Any

import ml_collections

from anp_jax.config import (
  errors,
  key_table,
  keys as keys_lib,
  optimizers,
  rules,
  simulation_keys,
  strategy as strategy_lib,
  trust,
)

_NAME = 'strategy.name'
_OPTIMIZER = 'optimizer.name'


def base() -> ml_collections.ConfigDict:
  """Returns every key that applies to the defaults, for a recipe to change.

  Durations are texts with a unit: '90 epochs', '1000 steps', '2e6 examples'.
  """
  return _nested(_completed({}))


def known_keys(*names: str) -> dict[str, keys_lib.Key]:
  """Returns all keys; those of the strategies named go before others."""
  keys = dict(key_table.KEYS)
  for strategy in (*names, *strategy_lib.BUILT_IN):
    for key, declared in strategy_keys(strategy).items():
      keys.setdefault(key, declared)
  return keys


def strategy_keys(name: str) -> dict[str, keys_lib.Key]:
  """Returns the keys that one strategy alone adds.

  A class that may not be imported, see `trust`, adds none.

  Raises:
    ConfigError: if there is no such strategy, with the nearest.
  """
  leaves = strategy_lib.declared(name).default_config()
  good = isinstance(leaves, dict) and all(isinstance(k, keys_lib.Key) for k in leaves.values())
  words = "a default_config with keys, such as {'alpha': keys.number(0.5, 'averaging factor')}"
  errors.check(good, _NAME, name, words)
  return {f'strategy.{leaf}': key for leaf, key in leaves.items()}


def resolved(
  config: ml_collections.ConfigDict, typed: dict[str, str] | None = None
) -> ml_collections.FrozenConfigDict:
  """Returns the config of a recipe and typed overrides.

  Args:
    config: config from `base()`, or resolved before. Keys that do not apply are left
      out; keys that come to apply have their defaults.
    typed: texts by dotted key; these keys must apply.

  Returns:
    Valid, immutable config of all keys that apply.

  Raises:
    ConfigError: naming the key, the value and what was expected.
  """
  values, typed = flat(config), typed or {}
  keys = _keys_of(values, typed)
  for key in values:
    _check_known(key, keys)
  for key, declared in key_table.KEYS.items():
    if key not in values and not declared.only_if:
      raise errors.ConfigError(f'config.{key} is missing (default: {declared.default!r})')
  values = _without_defaults(values, typed.get(_OPTIMIZER, _optimizer_name(values)))
  for key, text in typed.items():
    _check_known(key, keys)
    values[key] = keys[key].parse(key, _expanded(text, keys[key]))
  for key in dict.fromkeys(d.only_if[0] for d in keys.values() if d.only_if):
    keys[key].validate(key, values.get(key, keys[key].default))
  for key in typed:
    _check_applies(key, values)
  values = _completed(values)
  for key, declared in _applicable(values).items():
    declared.validate(key, values[key])
  rules.check_together(values)
  strategy = strategy_lib.by_name(values[_NAME])
  strategy.check(values)
  seeds = values['ensemble.seeds']
  words = f"'' with {_NAME}={strategy.name}, which has no single loop of steps"
  good = not seeds or simulation_keys.has_one_loop(strategy, values)
  errors.check(good, 'ensemble.seeds', seeds, words)
  return _frozen(values)


def applying(config: ml_collections.ConfigDict, typed: dict[str, str]) -> dict[str, str]:
  """Returns the typed keys that apply, when all of them are set.

  It serves commands that give runs of several strategies, models or optimizers the
  same keys. Unknown keys stay, and `resolved` refuses them.

  Args:
    config: config; see `resolved`.
    typed: texts by dotted key.
  """
  values = flat(config)
  keys = _keys_of(values, typed)
  for key in typed.keys() & keys.keys():
    values[key] = keys[key].parse(key, typed[key])
  inapplicable = keys.keys() - _applicable(values).keys()
  return {key: text for key, text in typed.items() if key not in inapplicable}


def replaced(
  config: ml_collections.ConfigDict, changes: dict[str, Any]
) -> ml_collections.FrozenConfigDict:
  """Returns a copy of a config with other values; they are not checked.

  Args:
    config: config, which stays as it is.
    changes: values by dotted key.

  Raises:
    ConfigError: if a key is unknown or does not apply.
  """
  values = flat(config)
  values = _without_defaults(values, changes.get(_OPTIMIZER, _optimizer_name(values))) | changes
  keys = known_keys(_strategy_name(values))
  for key in changes:
    _check_known(key, keys)
    _check_applies(key, values)
  return _frozen(_completed(values))


def from_flat(saved: dict) -> ml_collections.FrozenConfigDict:
  """Returns the config whose `flat()` is `saved`, after JSON.

  Missing keys have their defaults and unknown keys are left out; values are not
  checked, since paths may be those of another machine.
  """
  trust.note_read(saved)
  values = {key: _tuples(value) for key, value in saved.items()}
  return _frozen(_completed(values))


def completed(saved: dict) -> dict:
  """Returns `saved`, after JSON, with the defaults of missing keys.

  Unknown keys stay; keys that do not apply are left out.
  """
  trust.note_read(saved)
  keys = known_keys(_strategy_name(saved))
  removed = {k: v for k, v in saved.items() if k not in keys}
  return json.loads(json.dumps(_completed(saved))) | removed


def flat(config: ml_collections.ConfigDict) -> dict[str, Any]:
  """Returns the config as {dotted key: value}, tuples kept."""
  result = {}
  for key, value in config.items(preserve_field_references=False):
    if isinstance(value, ml_collections.ConfigDict):
      result.update({f'{key}.{k}': v for k, v in flat(value).items()})
    else:
      result[key] = value
  return result


def to_text(config: ml_collections.ConfigDict) -> str:
  """Returns one line a key, sorted."""
  lines = [f'{k} = {v!r}' for k, v in sorted(flat(config).items())]
  return '\n'.join(lines) + '\n'


def to_json(config: ml_collections.ConfigDict) -> str:
  """Returns the resolved config as JSON text, one flat object."""
  return json.dumps(flat(config), indent=1)


def variant(name: str, variants: dict) -> dict:
  """Returns the overrides of variant `name`; '' is the plain recipe.

  Raises:
    ConfigError: for an unknown variant, with the nearest one.
  """
  if name and name not in variants:
    raise errors.ConfigError(
      f'no variant {name!r} (have: {", ".join(variants)}){errors.nearest(name, variants)}'
    )
  return variants.get(name, {})


def _expanded(text, declared):
  """The typed text, with ~ and $VARIABLE of a path replaced.

  A ~ stays where its key is compared when a run is resumed: the code that opens the
  path replaces it.
  """
  if not isinstance(declared.default, str) or '\0' in text:
    return text
  text = os.path.expandvars(text)
  return os.path.expanduser(text) if declared.resumable else text


def _keys_of(values, typed):
  """All keys, first those of the typed strategy and of the recipe's."""
  names = dict.fromkeys([_strategy_name(values | typed), _strategy_name(values)])
  return known_keys(*names)


def _strategy_name(values):
  name = values.get(_NAME, key_table.KEYS[_NAME].default)
  key_table.KEYS[_NAME].validate(_NAME, name)
  return name


def _optimizer_name(values):
  return values.get(_OPTIMIZER, key_table.KEYS[_OPTIMIZER].default)


def _without_defaults(values, name):
  """The values without the defaults of the previous optimizer, if `name` is another."""
  before = _optimizer_name(values)
  defaults = optimizers.defaults(before) if name != before else {}
  return {k: v for k, v in values.items() if k not in defaults or v != defaults[k]}


def _applicable(values):
  """The keys that apply with these values, by dotted key."""
  name = _strategy_name(values)
  keys = key_table.KEYS | strategy_keys(name)
  for key, default in optimizers.defaults(_optimizer_name(values)).items():
    keys[key] = dataclasses.replace(keys[key], default=default)
  effective = {key: values.get(key, k.default) for key, k in keys.items()}
  models = [effective] + [
    effective | texts for texts in strategy_lib.declared(name).alternatives(effective)
  ]
  # A key that does not apply makes no other apply.
  models = [{key: m[key] for key, k in keys.items() if k.applies(m)} for m in models]
  return {key: k for key, k in keys.items() if any(k.applies(m) for m in models)}


def _completed(values):
  """The values of the keys that apply, in the table's order."""
  return {
    key: declared.as_text(values.get(key, declared.default))
    for key, declared in _applicable(values).items()
  }


def _check_known(key, keys):
  if key in keys:
    return
  members = [k for k in keys if k.startswith(f'{key}.')]
  if members:
    raise errors.ConfigError(f'config.{key} is a group; its keys are {", ".join(members)}')
  raise errors.ConfigError(f'unknown key config.{key}{errors.nearest(key, keys)}')


def _check_applies(key, values):
  """Refuses a known key that does not apply with these values."""
  applicable = _applicable(values)
  if key in applicable:
    return
  keys = key_table.KEYS | strategy_keys(_strategy_name(values))
  declared = keys.get(key)
  if declared:
    while declared.only_if[0] not in applicable:
      declared = keys[declared.only_if[0]]
    chooser, condition = declared.only_if[0], declared.condition
  else:
    chooser = _NAME
    names = (n for n in strategy_lib.BUILT_IN if key in strategy_keys(n))
    condition = f'{chooser}={", ".join(names)}'
  now = values.get(chooser, keys[chooser].default)
  now = "''" if now == '' else now
  raise errors.ConfigError(f'config.{key} belongs to {condition}, not {now}')


def _frozen(values):
  return ml_collections.FrozenConfigDict(_nested(values))


def _nested(values):
  result: dict[str, Any] = {}
  for key, value in values.items():
    *groups, leaf = key.split('.')
    group = result
    for name in groups:
      group = group.setdefault(name, {})
    group[leaf] = value
  return ml_collections.ConfigDict(result)


def _tuples(value):
  """JSON has lists where a config has tuples."""
  return tuple(map(_tuples, value)) if isinstance(value, list) else value
