"""Compares ways of spreading a training over devices and nodes.

  python -m anp_jax.tools.study strategies --config=configs/lenet.py
    --workdir=runs/study --nodes=1,2,4 --devices_per_node=1,2
    --strategies=sync,local_sgd --seeds=0,1,2 --target_accuracy=0.95

trains every combination, as processes of this machine (a core for each device)
or, with --slurm, as jobs, and writes a table, figures and CSV files to the
workdir. Run the same command to resume; finished runs are not repeated.
--config.KEY=VALUE sets a key for all runs; --vary=KEY=V1,V2 makes any other
key an axis of the grid; --tune=KEY=V1,V2 finds its best value for each cell;
with --simulate one process computes for all of --workers=1,8,64.

With model_ring or independent in --strategies, the other strategies train each
model of config.strategy.models by itself. `papers --help` describes the page
that compares published figures with ours. docs/study.md explains more.

Status 0: all runs that are possible finished; 1: one did not; 2: bad input.
"""

from collections.abc import Iterable
import dataclasses
import functools
import os
import shlex
import signal
import sys

from anp_jax import config as config_lib
from anp_jax.config import (
  argument_parser,
  command_line,
  emulation_keys,
  exits,
  outputs,
  strategy as strategy_lib,
)
from anp_jax.system import emulation
from anp_jax.tools import flag_values
from anp_jax.tools.study import (
  axes,
  emulate,
  grid,
  local,
  named_strategies,
  scaling,
  settings,
  simulate,
  slurm,
  study_progress as progress_lib,
  study_results,
  study_runner,
  tune,
)
from anp_jax.tools.study.papers import papers_command as papers

_NODES = '1,2'
_STRATEGIES = 'sync,invariant,local_sgd,parameter_server'  # those that divide the batch

# A flag, whether it needs or excludes another one, and why.
_PAIRS = (
  ('workers', 'with', 'simulate', 'otherwise nodes are processes, --nodes'),
  ('nodes', 'without', 'simulate', 'a run is one process, which computes for --workers'),
  ('emulate', 'without', 'simulate', 'times are those of strategy.simulate'),
  ('target_accuracy', 'without', 'emulate', 'nothing is learnt'),
  ('tune', 'without', 'emulate', 'nothing is learnt'),
  ('tune_budget', 'with', 'tune', 'nothing else is tuned'),
)


@exits.with_status('interrupted; run the same command to resume')
def main(arguments: list[str]) -> int:
  """Returns the process's exit status."""
  if arguments and arguments[0] == 'papers':
    return papers.main(arguments[1:])
  overrides, rest = command_line.split_overrides(arguments)
  flags = _flags(rest)
  study, cells, tuning = _study(flags, overrides)
  progress = progress_lib.Progress(study)
  lost: dict[grid.Cell, str] = {}
  contests: list[tune.Tuned] = []
  if tuning:
    train = functools.partial(_train, study, options=flags.slurm, progress=progress)
    cells, lost, contests = tune.run(study, cells, tuning, train)
    progress.log(*tune.notes(tuning, contests))
  failures = _train(study, [c for c in cells if c not in lost], flags.slurm, progress) | lost
  runs = _runs(study, cells, failures)
  table = _write_page(study, cells, (runs, failures, tuning, contests), flags, arguments)
  left_out = all(isinstance(e, study_runner.Refusal) for e in failures.values())
  print(f'\n{table}')
  print(f'\nstudy: {os.path.join(study.folder, "study.md")}')
  return 0 if runs and left_out else 1


def _flags(arguments):
  parser = argument_parser.Parser(prog='python -m anp_jax.tools.study', description=__doc__)
  add = functools.partial(parser.add_argument, metavar='KEY=VALUE,...')
  parser.add_argument('what', choices=['strategies', 'papers'], help='what is compared')
  parser.add_argument('--config', help='FILE[:VARIANT], and --config.KEY=VALUE')
  parser.add_argument('--workdir', help='folder of the study')
  parser.add_argument('--nodes', help=f'processes, as in 1,2,4 (default: {_NODES})')
  parser.add_argument('--devices_per_node', default='1', help='as in 1,2')
  strategies = f'default: {_STRATEGIES}; with --simulate {simulate.STRATEGIES}'
  files = 'FILE.toml has strategies with settings'
  parser.add_argument('--strategies', help=f'as in sync,FILE.toml; {files} ({strategies})')
  parser.add_argument('--seeds', default='0', help='as in 0,1,2')
  varied = 'any key of the config is an axis, as in --vary=strategy.mode=async,rennala'
  add('--vary', action='append', default=[], help=f'{varied}; may be repeated')
  halving = 'successive halving of the grid: shorter runs first, with another seed'
  best = f'each strategy is trained with its best value, found by {halving}'
  add('--tune', action='append', default=[], help=best)
  budget = "training of each tuning, such as '60 epochs' (default: for each rung that of one run)"
  parser.add_argument('--tune_budget', metavar='DURATION', help=budget)
  targets = 'above 0, at most 1: show the time and the images to each'
  parser.add_argument('--target_accuracy', default='', metavar='A,...', help=targets)
  sleeps = 'nodes, in any number, whose computing is a sleep; keys of config.emulate, such as'
  times = 'step_seconds=0.1,spread=0.05,megabytes=10,bandwidth=1gbit'
  add('--emulate', nargs='?', const='', help=f'{sleeps} --emulate={times}')
  workers = 'a run is one process of this machine, which computes for --workers in simulated time'
  simulated = f'{workers}; keys of config.strategy.simulate, such as --simulate=step_seconds=0.2'
  add('--simulate', nargs='?', const='', help=simulated)
  parser.add_argument('--workers', metavar='N,...', help=f'simulated (default: {simulate.NODES})')
  scalings = "strong: batch_size is that of all nodes; weak: each node's"
  parser.add_argument('--scaling', default='strong', metavar='KIND,...', help=scalings)
  example = '--slurm="--partition=gpu --gpus-per-node={devices}"'
  jobs = f'options of sbatch, by which the runs become Slurm jobs, such as {example}'
  parser.add_argument('--slurm', nargs='?', const='', metavar='OPTIONS', help=jobs)
  flags = parser.parse(arguments)
  flag_values.check_pairs(parser, flags, _PAIRS)
  return flags


def _study(flags, overrides):
  """What the flags ask for; ConfigError for whatever is wrong with them.

  Returns:
    `study_runner.Study`, its cells, `tune.Tuning` or None.
  """
  _check_flags(flags, overrides)
  emulated, simulated = flags.emulate is not None, flags.simulate is not None
  strategies = named_strategies.parse(
    flags.strategies or (simulate.STRATEGIES if simulated else _STRATEGIES)
  )
  overrides = emulate.overrides(flags.emulate, overrides)
  names = tuple(dict.fromkeys(strategy.name for strategy in strategies))
  overrides = settings.overrides('--simulate', flags.simulate, simulate.GROUP, overrides, names)
  flag, nodes = '--nodes', flags.nodes or _NODES
  of_flags = grid.AXES | emulate.reserved(emulated)
  if simulated:
    flag, nodes = '--workers', flags.workers or simulate.NODES
  varied = axes.parse(flags.vary, names, overrides, of_flags)
  seeds = flag_values.numbers('--seeds', flags.seeds, 0)
  used = overrides | {axis.key: axis.values[0] for axis in varied}
  tuning = tune.parse(flags, names, used, of_flags, seeds)
  set_by = {key: f'--config.{key}' for key in overrides} | of_flags
  set_by |= {axis.key: axis.flag for axis in varied + (tuning.axes if tuning else ())}
  if tuning:
    set_by['duration'] = f'{tune.FLAG}, for its shorter runs'
  named_strategies.check_unset(strategies, set_by)
  models = _models(flags, overrides, strategies)

  def combinations(strategy, nodes):
    chosen = overrides | {'strategy.name': strategy.name} | dict(strategy.settings)
    if simulated:
      chosen[grid.WORKERS] = str(nodes)
    alone = models and not strategy_lib.by_name(strategy.name).keeps_models_apart
    return [
      (*model, *combination)
      for model in (models if alone else [()])
      for combination in axes.combinations(flags.config, chosen | dict(model), varied)
    ]

  cells = grid.expand(
    strategies,
    flag_values.numbers(flag, nodes, 1),
    flag_values.numbers('--devices_per_node', flags.devices_per_node, 1),
    seeds,
    combinations,
  )
  study = study_runner.Study(flags.config, overrides, flags.workdir, emulated, simulated=simulated)
  if simulated:
    cells = simulate.cells(study, cells)
  cells = scaling.cells(study.config, cells, scaling.parse(flags.scaling))
  _check_keys(study, cells, varied + (tuning.axes if tuning else ()))
  if emulated:
    emulate.check(study, cells)
    sleeps = emulation_keys.sleeps(study.first_config(cells))
    study = dataclasses.replace(study, sleeps=sleeps)
  return study, cells, tuning


def _models(
  flags, overrides: dict[str, str], strategies: Iterable[named_strategies.NamedStrategy]
) -> list[axes.Varied]:
  """What differs in each model, where a strategy of the study trains many; [] otherwise."""
  for entry in strategies:
    strategy = strategy_lib.by_name(entry.name)
    if strategy.keeps_models_apart:
      for flag in ('simulate', 'emulate', 'tune'):
        if getattr(flags, flag) not in (None, []):
          raise config_lib.ConfigError(
            f'--{flag}: not with {entry.label}, which trains many models'
          )
      chosen = command_line.applying(flags.config, overrides | {'strategy.name': entry.name})
      config = command_line.load(flags.config, chosen)
      texts = strategy.alternatives({'strategy.models': config.strategy.models})
      return [tuple((key, text) for key, text in model.items() if key) for model in texts]
  return []


def _check_flags(flags, overrides):
  """Refuses flags that are missing, and values that no study takes."""
  for flag in ('config', 'workdir'):
    if not getattr(flags, flag):
      raise config_lib.ConfigError(f'--{flag} is missing')
  outputs.check_folder('--workdir', flags.workdir)
  for key, flag in (grid.AXES | emulate.reserved(False)).items():
    if key in overrides:
      raise config_lib.ConfigError(
        f'--config.{key}={overrides[key]}: the study sets it; use {flag}'
      )
  _targets(flags.target_accuracy)
  try:
    shlex.split(flags.slurm or '')
  except ValueError as e:
    raise config_lib.ConfigError(f'--slurm={flags.slurm!r}: expected options of sbatch: {e}') from e


def _targets(text) -> tuple[float, ...]:
  """The accuracies of --target_accuracy; ConfigError for what is none."""
  try:
    targets = tuple(map(float, text.split(','))) if text else ()
  except ValueError:
    targets = (0.0,)
  if not all(0 < target <= 1 for target in targets):
    raise config_lib.ConfigError(
      f'--target_accuracy={text}: expected numbers above 0, at most 1, such as 0.9,0.98'
    )
  return targets


def _check_keys(study, cells, varied):
  """Refuses keys that no run of the study has, and a strategy without a valid cell."""
  refusals: dict[str, config_lib.ConfigError] = {}
  possible = set()
  unused = set(study.overrides) | {axis.key for axis in varied}
  tuned = tuple((a.key, a.values[0]) for a in varied if a.flag == tune.FLAG)
  for cell in {dataclasses.replace(c, seed=0): c for c in cells}.values():
    keys = study.keys(dataclasses.replace(cell, tuned=tuned))
    for key, text in cell.settings:
      if key not in keys:
        raise config_lib.ConfigError(
          f'--strategies: {cell.label} sets {key}={text}, which its runs do not have'
        )
    unused -= keys
    if cell.label not in possible:
      try:
        study.config(cell)
        possible.add(cell.label)
      except config_lib.ConfigError as e:
        refusals.setdefault(cell.label, e)
  for key in unused & set(study.overrides):
    command_line.load(study.spec, {key: study.overrides[key]})
  for axis in varied:
    if axis.key in unused:
      raise config_lib.ConfigError(
        f'{axis.flag}={axis.key}={",".join(axis.values)}: no run of the study has this key'
      )
  for label, refusal in refusals.items():
    if label not in possible:
      raise refusal


def _train(study, cells, options, progress) -> dict[grid.Cell, str]:
  """Runs the cells that are not finished; returns the reason of each that failed."""
  failures: dict[grid.Cell, str] = {}
  waiting = []
  cores = len(os.sched_getaffinity(0)) if options is None else None

  def ended(cell, error):
    if error:
      failures[cell] = error
    progress.ended(cell, error)

  for cell in cells:
    try:
      study.config(cell)
    except config_lib.ConfigError as e:
      ended(cell, study_runner.Refusal(e))
      continue
    study_runner.check_same(study, cell)
    study_runner.note_result(study, cell, cores)
    if not study_runner.is_finished(study, cell):
      waiting.append(cell)
    elif error := study_runner.record(study, cell).get('error'):
      failures[cell] = error
  progress.begin(cells, len(waiting))
  if options is None:
    local.run(study, waiting, progress.began, ended)
  else:
    slurm.run(study, waiting, progress.began, ended, shlex.split(options))
  return failures


def _write_page(study, cells, outcome, flags, arguments) -> str:
  """Writes the page of runs, failures and tuning; returns the table for people."""
  from anp_jax.tools.study import study_page  # matplotlib, once there is something to draw

  os.makedirs(study.folder, exist_ok=True)  # where nothing could be trained
  runs, failures, tuning, contests = outcome
  cores = [study_runner.record(study, c)['cores'] for c in runs]
  how = 'emulated, ' * study.emulated + 'simulated, ' * study.simulated
  emulated = emulation.describe(study.first_config(cells).emulate) if study.emulated else ''
  simulated = ''
  if study.simulated:
    times = study.first_config([c for c in cells if c.simulated]).strategy.simulate
    simulated = ', '.join(emulation.describe_pass(times, 'worker'))
  return study_page.write(
    study.folder,
    f'Strategies, {how}{flags.config}',
    shlex.join(['python', '-m', 'anp_jax.tools.study', *arguments]),
    study_page.Outcome(
      cells,
      runs,
      failures,
      min((n for n in cores if n), default=None),
      emulated,
      simulated,
      tuning,
      contests,
    ),
    _targets(flags.target_accuracy),
  )


def _runs(study, cells, failures):
  """The numbers of each finished run; one without numbers is added to the failures."""
  runs: dict[grid.Cell, study_results.Run] = {}
  for cell in cells:
    if cell in failures:
      continue
    record = study_runner.record(study, cell)
    oversubscribed = (
      bool(record['cores']) and cell.processes * cell.devices > record['cores'] and not study.sleeps
    )
    try:
      runs[cell] = study_results.read(study.workdir(cell), oversubscribed, study.simulated)
    except config_lib.ConfigError as e:
      failures[cell] = str(e)
  return runs


def command() -> None:
  """Runs as a program: python -m anp_jax.tools.study, anp-study."""
  signal.signal(signal.SIGTERM, signal.default_int_handler)
  sys.exit(main(sys.argv[1:]))


if __name__ == '__main__':
  command()
