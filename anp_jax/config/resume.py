"""The keys that may differ between a run and its resumption.

`resumable` keys may differ, and `changeable` keys if the flag --change names them.
"""

import json

import ml_collections

from anp_jax.config import errors, key_table, optimizers, resolve, strategy as strategy_lib

_NAME = 'strategy.name'
# At 0 the optimizer omits these, and its saved state has one part less; optimizers
# with decoupled weight decay always have a part for it.
_LEFT_OUT_AT_0 = ('optimizer.clip_norm', 'optimizer.clip_value', 'optimizer.weight_decay')


def resumable(config: ml_collections.ConfigDict) -> tuple[str, ...]:
  """Returns the keys that may differ when a run is resumed.

  They say where, how long and how often; all other keys must equal those of the
  checkpoint. A new duration also moves a schedule that ends with the run (cosine,
  polynomial). A group all of whose keys may differ is one entry.
  """
  keys = key_table.KEYS | resolve.strategy_keys(config.strategy.name)
  entries = []
  for key, declared in keys.items():
    group = key.partition('.')[0]
    members = [d for k, d in keys.items() if k.partition('.')[0] == group]
    if declared.resumable:
      entries.append(group if all(d.resumable for d in members) else key)
  return tuple(dict.fromkeys(entries))


def changeable(config: ml_collections.ConfigDict) -> tuple[str, ...]:
  """Returns the keys that --change may name."""
  keys = resolve.known_keys(config.strategy.name)
  return tuple(key for key, declared in keys.items() if declared.changeable)


def changes(saved: dict, config: ml_collections.ConfigDict) -> dict[str, tuple]:
  """Returns {key: (old, new)} of the `changeable` keys that differ.

  Args:
    saved: `flat()` of the previous run, after JSON.
    config: config of this run. A value is None where a key does not apply.
  """
  before, now = resolve.completed(saved), json.loads(resolve.to_json(config))
  return {
    key: (before.get(key), now.get(key))
    for key in changeable(config)
    if before.get(key) != now.get(key)
  }


def changed(saved: dict, config: ml_collections.ConfigDict, text: str) -> dict:
  """Returns the flat config of a run with new values of the keys in --change.

  Args:
    saved: `flat()` of the run, after JSON.
    config: config with the new values.
    text: value of --change: keys, or the group 'schedule', separated by commas.

  Raises:
    ConfigError: for a name that is not `changeable`, or a value that does not fit
      the saved state of the optimizer.
  """
  choices = changeable(config)
  names = [name.strip().removeprefix('config.') for name in text.split(',')]
  for name in names:
    if name != 'schedule' and name not in choices:
      raise errors.ConfigError(_refusal(name, text, choices, config))
  has_new_schedule = any(n in ('schedule', 'schedule.name') for n in names)
  result = dict(saved)
  for key, (before, now) in changes(saved, config).items():
    # What comes or goes with another schedule needs no name.
    follows = has_new_schedule and None in (before, now)
    if not follows and not {key, key.partition('.')[0]} & set(names):
      continue
    if key in _LEFT_OUT_AT_0 and (
      _is_in_chain(key, before, config) != _is_in_chain(key, now, config)
    ):
      raise errors.ConfigError(
        f'--change={text}: config.{key} is {before!r} in the run and {now!r} '
        'here, but the saved state of the optimizer has another structure at '
        f'0; expected {"a number above 0" if before else "0"}'
      )
    if now is None:
      result.pop(key, None)
    else:
      result[key] = now
  return result


def difference(saved: dict, config: ml_collections.ConfigDict, free: tuple[str, ...] = ()) -> str:
  """Returns why a checkpoint cannot be resumed with a config, or ''.

  Args:
    saved: `flat()` of the run that wrote the checkpoint, after JSON.
    config: config of this run.
    free: keys or groups that may differ beyond `resumable`.

  Returns:
    Line that names the first key that differs and may not.
  """
  now = json.loads(resolve.to_json(config))
  # A key that came after the run began had its default there.
  saved = resolve.completed(saved)
  of_now = resolve.known_keys(now[_NAME])
  of_saved = resolve.known_keys(saved[_NAME])
  # Other keys follow from the weights that a run begins with.
  for key in sorted({*saved, *now}, key=lambda k: (k != 'init.from', k)):
    if saved.get(key) == now.get(key) or any(key == f or key.startswith(f + '.') for f in free):
      continue
    # A key may belong to both strategies and be free in one only.
    declared = [keys[key] for keys in (of_now, of_saved) if key in keys]
    if declared and (any(d.resumable for d in declared) or key not in saved or key not in now):
      # What applies in one of them only follows from a key that differs.
      continue
    if not _is_equivalent(key, saved.get(key), now.get(key)):
      return (
        f'config.{key} is {now.get(key)!r}, but the run in this workdir was '
        f'started with {saved.get(key)!r}'
      )
  return ''


def _refusal(name, text, choices, config):
  """Why --change may not name a key, in one line."""
  expected = f'expected some of {", ".join(choices)}'
  if name not in resolve.known_keys(config.strategy.name):
    return f'--change={text}: there is no key {name!r}; {expected}{errors.nearest(name, choices)}'
  if any(name == k or name.startswith(k + '.') for k in resumable(config)):
    return f'--change={text}: {name} may differ without it; {expected}'
  why = ''
  if name == 'optimizer.name':
    why = ': it decides what a checkpoint holds of the optimizer'
  return f'--change={text}: {name} may not change{why}; {expected}'


def _is_in_chain(key, value, config):
  """Whether the optimizer has a part for a key with this value."""
  # What applies weight decay itself does so of 0 too; of a user's function it is not known.
  optimizer = optimizers.OPTIMIZERS.get(config.optimizer.name)
  has_own_place = (
    key == 'optimizer.weight_decay' and optimizer is not None and optimizer.is_decoupled
  )
  return has_own_place or value != 0


def _is_equivalent(key, before, after):
  """Whether two values of a key make the same run."""
  if key != _NAME:
    return False
  states = {strategy_lib.by_name(name).state for name in (before, after)}
  return len(states) == 1
