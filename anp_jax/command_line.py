"""From what a person types to a config that is valid."""

import argparse
import importlib.util
import json
import os
import re
import time

import ml_collections

from anp_jax import config as config_lib
from anp_jax import validation


class Parser(argparse.ArgumentParser):
  """Of a command beside main.py: a bad argument is one line, a ConfigError."""

  def __init__(self, **arguments):
    """As argparse's; the description keeps its lines, names are whole."""
    super().__init__(
      formatter_class=argparse.RawDescriptionHelpFormatter,
      allow_abbrev=False,
      **arguments,
    )

  def parse(self, arguments: list[str]) -> argparse.Namespace:
    """The flags; ConfigError for one that there is not, with the nearest."""
    flags, unknown = self.parse_known_args(arguments)
    if unknown:
      known = [option for a in self._actions for option in a.option_strings]
      name = unknown[0].partition('=')[0]
      raise config_lib.ConfigError(
        f'unknown argument {unknown[0]!r}{config_lib.nearest(name, known)}'
      )
    return flags

  def error(self, message):
    """Raises where argparse would print two lines and exit."""
    raise config_lib.ConfigError(message)


def split_overrides(argv: list[str]) -> tuple[dict[str, str], list[str]]:
  """Takes `--config.KEY=VALUE` and `--config.KEY VALUE` out of a command line.

  Returns:
    Overrides by dotted key, and the arguments that are left.

  Raises:
    ConfigError: for a key without a value.
  """
  overrides, rest = {}, []
  arguments = iter(argv)
  for argument in arguments:
    match = re.fullmatch(r'--?config\.([^=]+)(?:=(.*))?', argument, re.DOTALL)
    if not match:
      rest.append(argument)
      continue
    value = match[2] if match[2] is not None else next(arguments, None)
    if value is None:
      raise config_lib.ConfigError(f'{argument}: expected a value')
    overrides[match[1]] = value
  return overrides, rest


def from_flags(flags, overrides: dict[str, str], processes: int = 1):
  """The config and the workdir that a command line asks for.

  Args:
    flags: with config, workdir, mode, checkpoint and output.
    overrides: from `split_overrides`.
    processes: of the run; several cannot each choose a workdir.

  Returns:
    A resolved config, and the workdir's path.

  Raises:
    ConfigError: for a missing flag, or whatever is wrong with the config.
  """
  saved = os.path.join(flags.workdir or '', 'config.json')
  run = _read_json(saved) if os.path.isfile(saved) else {}
  if flags.config:
    config = load(flags.config, overrides)
  elif flags.mode == 'evaluate' and run:
    config = _overridden(config_lib.from_flat(run), overrides)
  elif flags.mode == 'evaluate' and overrides.get('init.from'):
    config = _overridden(config_lib.base(), overrides)
  else:
    raise config_lib.ConfigError(
      '--config=FILE[:VARIANT] is missing; see configs/'
    )
  _adopt_weights(config, overrides, run, flags.mode)
  chosen = flags.checkpoint
  if chosen not in ('newest', 'best') and not chosen.isdecimal():
    raise config_lib.ConfigError(
      f'--checkpoint={chosen!r}: expected newest, best or a step'
      f'{config_lib.nearest(chosen, ("newest", "best"))}'
    )
  if chosen != 'newest' and flags.mode != 'evaluate':
    raise config_lib.ConfigError(
      f'--checkpoint={chosen} is for --mode=evaluate: training goes on from '
      'the newest'
    )
  if flags.output and flags.mode != 'evaluate':
    raise config_lib.ConfigError(
      f'--output={flags.output} is for --mode=evaluate: training writes into '
      'its workdir'
    )
  if flags.output and config.strategy.name == 'relay':
    raise config_lib.ConfigError(
      f'--output={flags.output}: of the models of a ring --mode=evaluate '
      'writes the leaderboard in the workdir, and no folder'
    )
  if os.path.exists(flags.output) and not os.path.isdir(flags.output):
    raise config_lib.ConfigError(
      f'--output={flags.output!r} is a file, expected a folder'
    )
  workdir = flags.workdir
  if (
    flags.mode == 'evaluate'
    and not config.init['from']
    and not os.path.isdir(workdir or '')
  ):
    raise config_lib.ConfigError(
      f'--mode=evaluate needs the --workdir of a run, not {workdir!r}'
    )
  if not workdir and processes > 1:
    raise config_lib.ConfigError(
      f'--workdir is missing: {processes} processes need one that all see'
    )
  if not workdir:
    name = flags.config or os.path.normpath(config.init['from'])
    name = os.path.basename(name).replace('.py', '').replace(':', '-')
    workdir = os.path.join('runs', f'{name}-{time.strftime("%Y%m%d-%H%M%S")}')
  if os.path.exists(workdir) and not os.path.isdir(workdir):
    raise config_lib.ConfigError(
      f'--workdir={workdir!r} is a file, expected a folder'
    )
  return config, os.path.normpath(workdir)


def load(spec: str, overrides: dict[str, str]) -> ml_collections.ConfigDict:
  """Reads `FILE[:VARIANT]`, applies overrides, checks every key and value.

  Args:
    spec: path of a config file, optionally with a variant after a colon.
    overrides: dotted key to text, as typed after --config.

  Returns:
    The resolved config; every key of `base()`, and no other.

  Raises:
    ConfigError: in one line that names the file or key at fault.
  """
  path, _, variant = spec.partition(':')
  if not os.path.isfile(path):
    folder = os.path.dirname(path) or '.'
    others = []
    if os.path.isdir(folder):
      others = [
        os.path.join(os.path.dirname(path), f)
        for f in sorted(os.listdir(folder))
        if f.endswith('.py')
      ]
    raise config_lib.ConfigError(
      f'--config: no file {path!r}{config_lib.nearest(path, others)}'
    )
  module_spec = importlib.util.spec_from_file_location('anp_config', path)
  module = importlib.util.module_from_spec(module_spec)
  try:
    module_spec.loader.exec_module(module)
    config = module.get_config(variant)
  except config_lib.ConfigError:
    raise
  except Exception as e:  # whatever the user's file raises
    text = str(e).splitlines()[0] if str(e) else ''
    raise config_lib.ConfigError(f'{path}: {type(e).__name__}: {text}') from e
  if not isinstance(config, ml_collections.ConfigDict):
    raise config_lib.ConfigError(f'{path}: get_config must return a ConfigDict')
  return _overridden(config, overrides)


def _read_json(path):
  """The flat config that a run left in its workdir."""
  try:
    with open(path) as f:
      run = json.load(f)
    config_lib.from_flat(run)
  except (OSError, ValueError, TypeError, AttributeError) as e:
    raise config_lib.ConfigError(f'cannot read {path}: {e}') from e
  return run


def _overridden(config, overrides):
  for key, text in overrides.items():
    validation.override(config, key, text)
  validation.validate(config)
  return config


def _adopt_weights(config, overrides, run, mode):
  """Sets what the weights of config.init.from say, but for what was typed.

  A network that is only evaluated is theirs, and so are its images. One that
  is trained has the recipe's; but its normalisation is theirs too where the
  recipe has the default.

  Args:
    config: that is changed.
    overrides: from `split_overrides`; these keys stay.
    run: the flat config of the workdir's run, {} without: the weights may be
      gone when a run is resumed.
    mode: 'train' or 'evaluate'.
  """
  path = config.init['from']
  if not path:
    return
  from anp_jax.weights import published  # safetensors, NumPy

  keys = published.NORMALISATION
  if run:
    same = run.get('init.from') == path
    values = {key: tuple(run[key]) for key in keys if same and key in run}
  elif not published.is_published(path) or published.absent(path):
    return  # the run says what is wrong with it
  else:
    values = published.read(path).keys
    if mode == 'evaluate':
      keys = values
  default = config_lib.flat(config_lib.base())
  have = config_lib.flat(config)
  for key in keys:
    untouched = mode == 'evaluate' and not run or have[key] == default[key]
    if key in values and key not in overrides and untouched:
      config_lib.put(config, key, values[key])
  validation.validate(config)
