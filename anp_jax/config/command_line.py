"""From what a person types to a config that is valid."""

import argparse
from collections.abc import Iterable
import glob
import importlib.util
import json
import os
import re
import sys
import time

import ml_collections

from anp_jax import config as config_lib
from anp_jax.config import strategy as strategy_lib
from anp_jax.config import validation

_MODES = ('train', 'evaluate')


class Parser(argparse.ArgumentParser):
  """Of a command beside main.py: a bad argument is one line, a ConfigError."""

  def __init__(self, **arguments):
    """As argparse's; the description keeps its lines, names are whole."""
    super().__init__(
      formatter_class=argparse.RawDescriptionHelpFormatter,
      allow_abbrev=False,
      **arguments,
    )

  def parse(
    self, arguments: list[str], keys: Iterable[str] = ()
  ) -> argparse.Namespace:
    """The flags; ConfigError for one that there is not, with the nearest.

    Args:
      arguments: of the command line.
      keys: of a config, which may be meant by what is no flag.
    """
    known = [option for a in self._actions for option in a.option_strings]
    try:
      flags, unknown = self.parse_known_args(arguments)
    except config_lib.ConfigError:
      # A flag that is required may be missing because it was mistyped.
      unknown = [
        a for a in arguments
        if a.startswith('--') and a.partition('=')[0] not in (*known, '--')
      ]  # fmt: skip
      if not unknown:
        raise
    if unknown:
      name = unknown[0].partition('=')[0]
      # Typed without its group, or with nothing but it.
      known += [
        f'--config.{key}'
        for key in keys
        if name.removeprefix('--') in (key, key.rpartition('.')[2])
      ]
      raise config_lib.ConfigError(
        f'unknown argument {unknown[0]!r}{config_lib.nearest(name, known)}'
      )
    return flags

  def error(self, message):
    """Raises where argparse would print two lines and exit."""
    raise config_lib.ConfigError(message)


def main_flags(arguments: list[str], description: str) -> argparse.Namespace:
  """Reads the flags of main.py, all but those of the config's keys.

  Args:
    arguments: of the command line, from `split_overrides`.
    description: of the command, for --help.

  Raises:
    SystemExit: once --help is printed.
    ConfigError: for a flag or value that there is not, with the nearest.
  """
  parser = Parser(
    prog='python main.py', description=description, add_help=False
  )
  add = parser.add_argument
  add(
    '-h', '--help', nargs='?', const='', metavar='GROUP',
    help="this; with a name, the keys of the config's group",
  )  # fmt: skip
  add('--config', metavar='FILE[:VARIANT]', help='the recipe; see configs/')
  add(
    '--workdir', metavar='DIR',
    help='folder of the run (default: a fresh one in runs/)',
  )  # fmt: skip
  add(
    '--mode', default='train', metavar='NAME',
    help=f'{" or ".join(_MODES)} (default: %(default)s)',
  )  # fmt: skip
  add(
    '--checkpoint', default='newest', metavar='NAME',
    help='what --mode=evaluate scores: newest, best or a step (default: '
    '%(default)s)',
  )  # fmt: skip
  add(
    '--output', default='', metavar='DIR',
    help='where --mode=evaluate writes its files (default: in the workdir)',
  )  # fmt: skip
  several = parser.add_argument_group(
    'several processes', 'Slurm, Open MPI and TPU pods need none of these.'
  )
  several.add_argument(
    '--coordinator', metavar='HOST:PORT', help='where process 0 is met'
  )
  several.add_argument(
    '--num_processes', type=int, metavar='N', help='of the run, on all hosts'
  )
  several.add_argument(
    '--process_id', type=int, metavar='I', help='of this process, from 0 on'
  )
  flags = parser.parse(arguments, config_lib.flat(config_lib.base()))
  if flags.help is not None:
    from anp_jax.config import help  # seldom needed

    keys = help.text(flags.help)
    try:
      print(keys if flags.help else f'{parser.format_help()}\n{keys}')
      sys.stdout.flush()
    except BrokenPipeError:  # of head, or less
      os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise SystemExit(0)
  if flags.mode not in _MODES:
    raise config_lib.ConfigError(
      f'--mode={flags.mode}: expected {" or ".join(_MODES)}'
      f'{config_lib.nearest(flags.mode, _MODES)}'
    )
  return flags


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
  is_evaluation = flags.mode == 'evaluate'
  if flags.config:
    config = load(flags.config, overrides)
  elif is_evaluation and run:
    config = _overridden(config_lib.from_flat(run), overrides)
  elif is_evaluation and overrides.get('init.from'):
    config = _overridden(config_lib.base(), overrides)
  elif is_evaluation:
    _check_run(flags.workdir)
    raise config_lib.ConfigError(
      f'--workdir={flags.workdir!r} is no run: it has no config.json; '
      '--mode=evaluate expects the --workdir of a training, or '
      '--config=FILE[:VARIANT] besides'
    )
  else:
    raise config_lib.ConfigError(
      '--config=FILE[:VARIANT] is missing; see configs/'
    )
  if is_evaluation and not config.init['from']:
    _check_run(flags.workdir)
  # Checkpoints of several models lie elsewhere; their strategy finds them.
  is_untrained = bool(
    is_evaluation
    and config.init['from']
    and not strategy_lib.find(config).keeps_models_apart
    and not _has_checkpoints(flags.workdir)
  )
  if is_untrained and not flags.config and 'init.from' not in overrides:
    raise config_lib.ConfigError(
      f'{flags.workdir} has no checkpoint to evaluate'
    )
  _adopt_weights(config, overrides, run, is_untrained)
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
  if chosen != 'newest' and is_untrained:
    raise config_lib.ConfigError(
      f'--checkpoint={chosen} is for the checkpoints of a run, and there are '
      f'none: config.init.from={config.init["from"]!r} would be scored'
    )
  if flags.output and flags.mode != 'evaluate':
    raise config_lib.ConfigError(
      f'--output={flags.output} is for --mode=evaluate: training writes into '
      'its workdir'
    )
  if flags.output and strategy_lib.find(config).keeps_models_apart:
    raise config_lib.ConfigError(
      f'--output={flags.output}: of the models of a ring --mode=evaluate '
      'writes the leaderboard in the workdir, and no folder'
    )
  if flags.output:
    check_folder('--output', os.path.expanduser(flags.output))
  workdir = flags.workdir
  if not workdir and processes > 1:
    raise config_lib.ConfigError(
      f'--workdir is missing: {processes} processes need one that all see'
    )
  if not workdir:
    name = flags.config or os.path.normpath(config.init['from'])
    name = os.path.basename(name).replace('.py', '').replace(':', '-')
    workdir = os.path.join('runs', f'{name}-{time.strftime("%Y%m%d-%H%M%S")}')
  if not flags.output:  # else nothing is written there
    check_folder('--workdir', workdir)
  if flags.mode == 'train':
    _check_apart(workdir, config)
  return config, os.path.normpath(workdir)


def _check_run(workdir) -> None:
  """Refuses to evaluate what is no folder; names the run that may be meant."""
  if not os.path.isdir(workdir or ''):
    what = f', not {workdir!r}' if workdir else ''
    raise config_lib.ConfigError(
      f'--mode=evaluate needs the --workdir of a run{what}'
      f'{_nearest_run(workdir or "")}'
    )


def _has_checkpoints(workdir):
  """Whether a workdir (or None) has checkpoints; told without JAX."""
  kinds = ('checkpoints', 'best') if workdir else ()
  folders = [os.path.join(workdir, kind) for kind in kinds]
  return any(
    name.isdigit()
    for folder in filter(os.path.isdir, folders)
    for name in os.listdir(folder)
  )


def check_folder(flag: str, path: str) -> None:
  """Refuses a folder to write to that cannot be made or written to.

  Args:
    flag: that names it, with its dashes.
    path: of the folder, which need not be there.

  Raises:
    ConfigError: naming the flag, and the file or folder at fault.
  """
  place = path
  while not os.path.lexists(place):
    place = os.path.dirname(os.path.abspath(place))
  if not os.path.isdir(place):
    where = '' if place == path else f': {place}'
    raise config_lib.ConfigError(
      f'{flag}={path!r}{where} is a file, expected a folder'
    )
  if not os.access(place, os.W_OK | os.X_OK):
    raise config_lib.ConfigError(
      f'{flag}={path!r}: {place} cannot be written to; choose another folder'
    )


def check_file(flag: str, path: str) -> None:
  """Refuses a file that cannot be written; see `check_folder`."""
  folder = os.path.dirname(path) or '.'
  if os.path.isdir(path) or not os.path.isdir(folder):
    what = 'a folder' if os.path.isdir(path) else f'{folder} is no folder'
    raise config_lib.ConfigError(
      f'{flag}={path!r}: {what}, expected a file to write'
    )
  place = path if os.path.exists(path) else folder
  if not os.access(place, os.W_OK):
    raise config_lib.ConfigError(
      f'{flag}={path!r}: {place} cannot be written to; choose another place'
    )


def _nearest_run(path):
  """The run beside it with the nearest name, as text for an error line."""
  folder, name = os.path.split(os.path.normpath(path))
  runs = glob.glob(os.path.join(glob.escape(folder), '*', 'config.json'))
  names = [os.path.basename(os.path.dirname(run)) for run in runs]
  return config_lib.nearest(name, names)


def _check_apart(workdir, config):
  """Refuses a workdir inside the data folder, and the reverse."""
  if config.data.source != 'folder':
    return
  run = os.path.realpath(workdir)
  data = os.path.realpath(os.path.expanduser(config.data.path))
  common = os.path.commonpath([run, data])
  if common in (run, data):
    how = 'inside' if common == data else 'around'
    raise config_lib.ConfigError(
      f'--workdir={workdir} is {how} config.data.path={config.data.path}, '
      'where each folder is taken for a class; expected a folder apart from it'
    )


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


def _adopt_weights(config, overrides, run, is_untrained):
  """Sets what the weights of config.init.from say, but for what was typed.

  A network that is only evaluated is theirs, and so are its images. One that
  is trained has the recipe's; but its normalisation is theirs too where the
  recipe has the default.

  Args:
    config: that is changed.
    overrides: from `split_overrides`; these keys stay.
    run: the flat config of the workdir's run, {} without: the weights may be
      gone when a run is resumed.
    is_untrained: whether the weights are evaluated as they are.
  """
  path = config.init['from']
  if not path:
    return
  # JAX, which reads variables that a config sets, is imported by `read` alone.
  from anp_jax.checkpoint.weights import published

  keys = published.NORMALISATION
  if run.get('init.from') == path and not is_untrained:
    values = {key: tuple(run[key]) for key in keys if key in run}
  elif not published.is_published(path) or published.missing_path(path):
    return  # the run says what is wrong with it
  elif is_untrained:
    keys = values = published.read(path).keys
  else:
    values = published.normalisation(path)
  default = config_lib.flat(config_lib.base())
  have = config_lib.flat(config)
  for key in keys:
    untouched = is_untrained or have[key] == default[key]
    if key in values and key not in overrides and untouched:
      config_lib.put(config, key, values[key])
  validation.validate(config)
