"""The config of a run in its workdir, and what its weights imply for a config."""

import argparse
from collections.abc import Container, Iterable
import glob
import importlib
import itertools
import json
import os

import ml_collections

from anp_jax.config import errors, key_table, resolve, resume

FILE = 'config.json'
NEWEST, BEST = 'checkpoints', 'best'  # folders of checkpoints
# Folders from a checkpoint up to its run: WORKDIR/models/NAME/checkpoints/STEP.
_DEPTH = 4
# What a broken file raises.
_UNREADABLE = (OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError)
# Like a strategy, it stands above this folder: it is imported if needed.
_PUBLISHED = 'anp_jax.checkpoint.weights.published_weights'


def read(workdir: str) -> dict:
  """Returns the flat config of the run in a workdir; {} without a run, or for ''.

  Raises:
    ConfigError: if it cannot be read.
  """
  path = os.path.join(workdir, FILE)
  if not workdir or not os.path.isfile(path):
    return {}
  try:
    with open(path, encoding='utf-8') as f:
      run = json.load(f)
    if not isinstance(run, dict):
      raise errors.ConfigError('expected an object')
    check_values(run)
  except _UNREADABLE as e:
    raise errors.ConfigError(f'cannot read {path}: {e}') from e
  return run


def check_values(run: dict) -> None:
  """Refuses values of wrong types; paths may be those of another machine.

  Args:
    run: flat config, after JSON.

  Raises:
    ConfigError: naming the key. What is no flat config causes other errors.
  """
  run = resolve.completed(run)
  keys = resolve.known_keys(run['strategy.name'])
  for key, value in resolve.flat(resolve.from_flat(run)).items():
    keys[key].validate_kind(key, value)


def file_above(name: str, path: str) -> str:
  """Returns the path of a run's file, for a path in its workdir; '' if there is none."""
  path = os.path.abspath(os.path.expanduser(path))
  folders = itertools.accumulate(range(_DEPTH), lambda p, _: os.path.dirname(p), initial=path)
  return next(filter(os.path.isfile, (os.path.join(p, name) for p in folders)), '')


def check(workdir: str) -> None:
  """Refuses to evaluate a path that is not a folder; names the nearest run."""
  if not os.path.isdir(workdir):
    what = f', not {workdir!r}' if workdir else ''
    raise errors.ConfigError(
      f'--mode=evaluate needs the --workdir of a run{what}{nearest_run(workdir)}'
    )


def nearest_run(path: str) -> str:
  """Returns the name of the nearest run in the same folder, as text for an error line.

  Args:
    path: path that is not a run.
  """
  folder, name = os.path.split(os.path.normpath(path))
  runs = glob.glob(os.path.join(glob.escape(folder), '*', FILE))
  names = [os.path.basename(os.path.dirname(run)) for run in runs]
  return errors.nearest(name, names)


def check_change(flags: argparse.Namespace, config: ml_collections.ConfigDict, run: dict) -> None:
  """Refuses a --change of keys which may not change, or of a run that is new.

  Args:
    flags: flags workdir and change.
    config: resolved config.
    run: flat config of the workdir's run; {} without a run.

  Raises:
    ConfigError: saying what was expected.
  """
  is_resumed = bool(run) and has_checkpoints(flags.workdir)
  resume.changed(run if is_resumed else resolve.flat(config), config, flags.change)
  if not is_resumed:
    raise errors.ConfigError(
      f'--change={flags.change} is for a run that is resumed: '
      f'--workdir={flags.workdir!r} has no checkpoint'
    )


def saved_steps(folder: str) -> list[int]:
  """Returns the steps of the whole checkpoints in a folder, ascending."""
  if not os.path.isdir(folder):
    return []
  # One that is being written has another ending.
  return sorted(int(name) for name in os.listdir(folder) if name.isdigit())


def has_checkpoints(workdir: str, kinds: Iterable[str] = (NEWEST, BEST)) -> bool:
  """Returns whether any step of a run was saved in a workdir."""
  return any(saved_steps(os.path.join(workdir, kind)) for kind in kinds if workdir)


def with_weights_keys(
  config: ml_collections.ConfigDict, typed: Container[str], run: dict, is_untrained: bool
) -> ml_collections.ConfigDict:
  """Returns the config with the keys that the weights of config.init.from imply.

  Weights that are only evaluated decide the network and its images. A network that
  is trained is the recipe's, but the weights decide its normalisation where the
  recipe has the default. Those of an earlier run decide the normalisation alone.

  Args:
    config: resolved config.
    typed: dotted keys that were typed, and stay.
    run: flat config of the workdir's run; {} without a run. The weights may be gone
      when a run is resumed.
    is_untrained: whether the weights are evaluated without training.
  """
  path = config.init['from']
  if not path:
    return config
  # JAX, which reads variables that a config sets, is imported by its `read` alone.
  published = importlib.import_module(_PUBLISHED)
  keys = published.NORMALISATION
  if run.get('init.from') == path and not is_untrained:
    values = {key: tuple(run[key]) for key in keys if key in run}
  elif path.startswith(published.TEXT) or published.missing_path(path):
    return config  # the run says what is wrong with it
  elif is_untrained and published.is_published(path):
    keys = values = published.read(path).keys
  else:
    values = published.normalisation(path, config.model.name)
  current = resolve.flat(config)
  # A decoder that was typed may be one that does not stretch images.
  missing = {'data.stretch'} - current.keys() if 'data.decode' in typed else ()
  changes = {
    key: values[key]
    for key in keys
    if key in values
    and key not in typed
    and key not in missing
    and (is_untrained or current[key] == key_table.KEYS[key].default)
  }
  return resolve.resolved(resolve.replaced(config, changes))
