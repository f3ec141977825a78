"""What may differ between a run and the run that goes on with it."""

import json

from anp_jax.config import resolve
from anp_jax.config import strategy as strategy_lib
from anp_jax.config import table

_NAME = 'strategy.name'
# Of this key alone, runs that are old wrote nothing down: any number may be.
_UNRECORDED = 'strategy.threads'


def resumable(config) -> tuple[str, ...]:
  """Returns the keys that may differ when a run is resumed.

  They say where, how long and how often; everything else must equal what the
  checkpoint was made with. A new duration also moves a schedule that ends with
  the run (cosine, polynomial). Of a group that may differ whole, the group.
  """
  keys = table.KEYS | resolve.strategy_keys(config.strategy.name)
  entries = []
  for key, declared in keys.items():
    group = key.partition('.')[0]
    members = [d for k, d in keys.items() if k.partition('.')[0] == group]
    if declared.resumable:
      entries.append(group if all(d.resumable for d in members) else key)
  return tuple(dict.fromkeys(entries))


def difference(saved: dict, config, free: tuple[str, ...] = ()) -> str:
  """Returns what keeps a checkpoint's config from being continued, or ''.

  Args:
    saved: `flat()` of the run that wrote the checkpoint, after JSON.
    config: the config of this run.
    free: keys or groups that may differ beyond `resumable`.

  Returns:
    One line that names the first key that differs and may not.
  """
  now = json.loads(resolve.to_json(config))
  if _UNRECORDED not in saved:
    free = (*free, _UNRECORDED)
  # A key that came after the run began had its default there.
  saved = resolve.completed(saved)
  of_now = resolve.known_keys(now[_NAME])
  of_saved = resolve.known_keys(saved[_NAME])
  # Other keys follow from the weights that a run begins with.
  for key in sorted({*saved, *now}, key=lambda k: (k != 'init.from', k)):
    if saved.get(key) == now.get(key) or any(
      key == f or key.startswith(f + '.') for f in free
    ):
      continue
    # A key may belong to both strategies and be free in one only.
    declared = [keys[key] for keys in (of_now, of_saved) if key in keys]
    if declared and (
      any(d.resumable for d in declared) or key not in saved or key not in now
    ):
      # What applies in one of them only follows from a key that differs.
      continue
    if not _is_equivalent(key, saved.get(key), now.get(key)):
      return (
        f'config.{key} is {now.get(key)!r}, but the run in this workdir was '
        f'started with {saved.get(key)!r}'
      )
  return ''


def _is_equivalent(key, before, after):
  """Whether two values of a key make the same run."""
  if key == 'data.cache':  # the same files, from memory or not
    return 'decoded' not in (before, after)
  if key == _NAME:
    states = {strategy_lib.by_name(name).state for name in (before, after)}
    return len(states) == 1
  return False
