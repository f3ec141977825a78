"""From what a person types to a config that is valid."""

import argparse
import os
import re
import time

import ml_collections

from anp_jax.config import (
  argument_parser,
  errors,
  exits,
  outputs,
  recipes,
  resolve,
  saved_run,
  strategy as strategy_lib,
  trust,
  urls,
)

_MODES = ('train', 'evaluate', *strategy_lib.TRIALS)
# Flags by name: default, metavar and help.
_FLAGS = {
  'config': ('', 'FILE[:VARIANT]', 'recipe and variant; see configs/'),
  'workdir': ('', 'DIR', 'run folder (default: a new one in runs/)'),
  'mode': ('train', 'NAME', f'mode: {", ".join(_MODES)}'),
  'checkpoint': ('newest', 'NAME', 'checkpoint for --mode=evaluate: newest, best or a step'),
  'output': ('', 'DIR', 'output folder for --mode=evaluate (default: in the workdir)'),
  'sentiment': ('', 'FILE', 'sentiment of pairs for --mode=evaluate, a table of VSO or MVSO'),
  'emotions': ('', 'FILE', 'emotions of pairs for --mode=evaluate, a table of MVSO'),
  'change': ('', 'KEYS', 'keys to change when resuming, such as optimizer.learning_rate,schedule'),
}
# Flag, the only mode that takes it, and why others do not.
_FLAGS_OF_MODES = (
  ('checkpoint', 'evaluate', 'training resumes from the newest'),
  ('output', 'evaluate', 'training writes into its workdir'),
  ('sentiment', 'evaluate', 'it scores predictions'),
  ('emotions', 'evaluate', 'it scores predictions'),
  ('change', 'train', 'it changes a run that is resumed'),
)
# What a mode sets, unless it is typed.
_MODE_KEYS = {
  'range_test': {
    'duration': '200 steps',
    'optimizer.learning_rate': '10',
    'schedule.name': 'range',
    'schedule.warmup': '0 steps',
  }
}


def main_flags(arguments: list[str], description: str, mode: str = '') -> argparse.Namespace:
  """Reads the flags of main.py, all but those of the config's keys.

  Args:
    arguments: rest of the command line, from `split_overrides`.
    description: text for --help.
    mode: only mode of the command; '': --mode chooses.

  Raises:
    SystemExit: once --help is printed.
    ConfigError: for an unknown flag or value, with the nearest.
  """
  parser = argument_parser.Parser(prog='python main.py', description=description, add_help=False)
  parser.add_argument(
    '-h',
    '--help',
    nargs='?',
    const='',
    metavar='GROUP',
    help='this text, or the keys of a config group',
  )
  parser.set_defaults(mode=mode)
  parser.add_flags({name: _FLAGS[name] for name in _FLAGS if name != 'mode' or not mode})
  trust.add_flag(parser)
  _add_process_flags(parser)
  flags = parser.parse(arguments, resolve.known_keys())
  if flags.help is not None:
    from anp_jax.config import help  # seldom needed

    keys = help.text(flags.help)
    with exits.until_reader_goes():
      print(keys if flags.help else f'{parser.format_help()}\n{keys}', flush=True)
    raise SystemExit(0)
  errors.check_choice(f'--mode={flags.mode}', flags.mode, _MODES)
  if flags.join and flags.mode != 'train':
    raise errors.ConfigError('--join is for --mode=train: other modes take nobody in')
  return flags


def _add_process_flags(parser):
  several = parser.add_argument_group(
    'several processes', 'Slurm, Open MPI and TPU pods need none of these.'
  )
  several.add_argument('--coordinator', metavar='HOST:PORT', help='address of process 0')
  several.add_argument(
    '--num_processes', type=int, metavar='N', help='number of processes on all hosts'
  )
  several.add_argument('--process_id', type=int, metavar='I', help='index of this process, from 0')
  several.add_argument(
    '--join', action='store_true', help='take part in the run that goes on in --workdir'
  )


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
    value = match[2] if match[2] is not None else next(arguments, '--')
    if match[2] is None and value.startswith('--'):  # the next flag
      raise errors.ConfigError(f'{argument}: expected a value')
    overrides[match[1]] = value
  return overrides, rest


def typed(overrides: dict[str, str]) -> list[str]:
  """Returns overrides by dotted key as `split_overrides` takes them."""
  return [f'--config.{key}={value}' for key, value in overrides.items()]


def from_flags(
  flags: argparse.Namespace, overrides: dict[str, str], processes: int = 1
) -> tuple[ml_collections.ConfigDict, str]:
  """Returns the config and the workdir that a command line asks for.

  Args:
    flags: flags config, workdir, mode, checkpoint, output and change.
    overrides: texts by dotted key, from `split_overrides`.
    processes: number of processes; several cannot each choose a workdir.

  Returns:
    Resolved config, and path of the workdir.

  Raises:
    ConfigError: for a missing flag, or an invalid config.
  """
  overrides = _MODE_KEYS.get(flags.mode, {}) | overrides
  is_evaluation = flags.mode == 'evaluate'
  run = saved_run.read(flags.workdir)
  config = _wanted_config(flags, overrides, run)
  if is_evaluation and not config.init['from']:
    saved_run.check(flags.workdir)
  # Checkpoints of several models lie elsewhere; their strategy finds them.
  is_untrained = bool(
    is_evaluation
    and config.init['from']
    and not strategy_lib.find(config).keeps_models_apart
    and not saved_run.has_checkpoints(flags.workdir)
  )
  if is_untrained and not flags.config and 'init.from' not in overrides:
    raise errors.ConfigError(f'{flags.workdir} has no checkpoint to evaluate')
  config = saved_run.with_weights_keys(config, overrides, run, is_untrained)
  _check_checkpoint(flags.checkpoint, config, is_untrained)
  _check_mode(flags, config)
  if flags.change:
    saved_run.check_change(flags, config, run)
  if flags.output:
    outputs.check_folder('--output', flags.output)
    outputs.check_apart('--output', flags.output, config)
  if not flags.workdir and processes > 1:
    raise errors.ConfigError(f'--workdir is missing: {processes} processes need one that all see')
  workdir = flags.workdir or _new_workdir(flags.config or os.path.normpath(config.init['from']))
  # With --output, nothing is written there. Several processes try it together:
  # the others would wait for one that ends here.
  if not flags.output and processes == 1:
    outputs.check_folder('--workdir', workdir)
  _check_store(workdir, config)
  if not is_evaluation:
    outputs.check_apart('--workdir', workdir, config, around=True)
  return config, os.path.normpath(workdir)


def _new_workdir(source):
  """A path in runs/, named after the recipe or the weights, and the time."""
  name = os.path.basename(source).replace('.py', '').replace(':', '-')
  return os.path.join('runs', f'{name}-{time.strftime("%Y%m%d-%H%M%S")}')


def _wanted_config(flags, overrides, run):
  """The recipe's config, or that of the run that is evaluated."""
  if flags.config:
    return load(flags.config, overrides)
  if flags.mode != 'evaluate':
    raise errors.ConfigError('--config=FILE[:VARIANT] is missing; see configs/')
  if run:
    file = os.path.join(flags.workdir, saved_run.FILE)
    trust.allow(overrides)
    run = trust.from_file(run | overrides, file)
    return resolve.resolved(resolve.from_flat(run), overrides)
  if overrides.get('init.from'):
    return resolve.resolved(resolve.base(), overrides)
  saved_run.check(flags.workdir)
  raise errors.ConfigError(
    f'--workdir={flags.workdir!r} is not a run: it has no config.json; '
    '--mode=evaluate expects the --workdir of a training, or '
    '--config=FILE[:VARIANT] too'
  )


def _check_mode(flags, config):
  """Refuses flags of another mode, and a mode that the config cannot have."""
  strategy = strategy_lib.find(config)
  for name, mode, reason in _FLAGS_OF_MODES:
    default = _FLAGS[name][0]
    text = f'--{name}={getattr(flags, name)}'
    if text == f'--{name}={default}':
      continue
    if flags.mode != mode:
      raise errors.ConfigError(f'{text} is for --mode={mode}: {reason}')
    if strategy.keeps_models_apart and not default:
      raise errors.ConfigError(
        f'{text}: the models of a ring keep the config that they began with, and '
        'its evaluation writes a leaderboard in the workdir'
      )
  if config.ensemble.seeds and flags.mode != 'train':
    raise errors.ConfigError(
      f'--mode={flags.mode}: config.ensemble.seeds={config.ensemble.seeds!r} has a run for each '
      'seed; expected the --workdir of one of them, such as RUNS/seed0'
    )
  if flags.mode not in strategy_lib.TRIALS:
    return
  if not strategy.steps_together:
    raise errors.ConfigError(
      f'--mode={flags.mode}: with config.strategy.name={strategy.name!r} '
      'devices do not step together; expected another strategy, such as '
      '--config.strategy.name=sync'
    )
  if flags.mode == 'range_test' and config.schedule.name != 'range':
    raise errors.ConfigError(
      f'--mode=range_test: config.schedule.name={config.schedule.name!r}, '
      "expected 'range', which the mode sets"
    )


def _check_checkpoint(chosen, config, is_untrained):
  if not chosen.isdecimal():
    errors.check_choice(f'--checkpoint={chosen!r}', chosen, ('newest', 'best'), 'a step')
  if chosen != 'newest' and is_untrained:
    raise errors.ConfigError(
      f'--checkpoint={chosen} is for the checkpoints of a run, and there are '
      f'none: config.init.from={config.init["from"]!r} would be scored'
    )


def _check_store(workdir, config):
  """Refuses a workdir in a store where files count between two checkpoints."""
  strategy = strategy_lib.find(config)
  is_live = strategy.serves_gradients or strategy.keeps_models_apart
  if (is_live or config.ensemble.seeds) and urls.is_mirror(workdir):
    key = f'strategy {strategy.name}' if is_live else 'ensemble.seeds'
    raise errors.ConfigError(
      f'--workdir={urls.remote_url(workdir)!r}: expected a path of this machine '
      f'for {key}, whose files must be up to date'
    )


def load(spec: str, overrides: dict[str, str]) -> ml_collections.ConfigDict:
  """Returns the config of `FILE[:VARIANT]` with overrides, all checked.

  Args:
    spec: path of a config file, optionally with a variant after a colon.
    overrides: texts by dotted key, as typed after --config.

  Returns:
    Resolved config: every key that applies, and no other.

  Raises:
    ConfigError: in one line that names the file or key at fault.
  """
  config = recipe(spec)
  trust.allow(resolve.flat(config) | overrides)
  return resolve.resolved(config, overrides)


def applying(spec: str, overrides: dict[str, str]) -> dict[str, str]:
  """Returns those of the overrides that apply; see `resolve.applying`."""
  return resolve.applying(recipe(spec), overrides)


def recipe(spec: str) -> ml_collections.ConfigDict:
  """Returns the config of `FILE[:VARIANT]` as it is, which alone need not be valid."""
  path, _, variant = spec.partition(':')
  path = recipes.find(path)
  return recipes.read(path, variant)
