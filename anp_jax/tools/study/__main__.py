"""Compares ways of spreading a training over devices and nodes.

`python -m anp_jax.tools.study model_ring --help` describes the study of many models in a
ring, `channel_split --help` that of convolutions split over devices, `papers
--help` the page of published figures and ours; here is that of strategies:

  python -m anp_jax.tools.study strategies --config=configs/lenet.py
    --workdir=runs/study --nodes=1,2,4 --devices_per_node=1,2
    --strategies=sync,local_sgd --seeds=0,1,2 --target_accuracy=0.95
    --learning_rates=0.01,0.02,0.04

trains every combination, as processes of this machine (a core for each device)
or, with --slurm, as jobs; then writes a table, figures and CSV files to the
workdir. The same command goes on where it was stopped; what is finished is not
run again. --config.KEY=VALUE is for all runs; --vary=KEY=V1,V2 makes any other
key an axis of the grid; --tune=KEY=V1,V2 finds the best value of one for each
cell; with --simulate one process computes for all of --workers=1,8,64.
docs/study.md tells more.

Status 0: all runs that can be came to their end; 1: one did not; 2: bad input.
"""

import dataclasses
import functools
import os
import shlex
import signal
import sys

from anp_jax import config as config_lib
from anp_jax.config import argument_parser, command_line, emulation_keys, exits, outputs
from anp_jax.system import emulation
from anp_jax.tools.study import (
  axes,
  channel_split_study,
  emulate,
  grid,
  local,
  model_ring_study,
  scaling,
  simulate,
  slurm,
  study_progress as progress_lib,
  study_results,
  study_runner,
  traffic,
  tune,
)
from anp_jax.tools.study.papers import papers_command as papers

_NODES = '1,2'
_STRATEGIES = 'sync,invariant,local_sgd,parameter_server'  # those that divide the batch
_OTHER_STUDIES = {
  'model_ring': model_ring_study,
  'channel_split': channel_split_study,
  'papers': papers,
}


@exits.with_status('interrupted; run the same command to resume')
def main(arguments: list[str]) -> int:
  """Returns the process's exit status."""
  if arguments and arguments[0] in _OTHER_STUDIES:
    return _OTHER_STUDIES[arguments[0]].main(arguments[1:])
  overrides, rest = command_line.split_overrides(arguments)
  flags = _flags(rest)
  study, cells, plan = _study(flags, overrides)
  progress = progress_lib.Progress(study)
  lost, contests = {}, []
  if plan:
    train = functools.partial(_train, study, options=flags.slurm, progress=progress)
    cells, lost, contests = tune.run(study, cells, plan, train)
    progress.log(*tune.notes(plan, contests))
  left = [cell for cell in cells if cell not in lost]
  failures = _train(study, left, flags.slurm, progress) | lost
  runs = _runs(study, cells, failures)
  tuned = plan, contests
  table = _written(study, cells, (runs, failures, tuned), flags, arguments)
  left_out = all(isinstance(e, study_runner.Refusal) for e in failures.values())
  print(f'\n{table}')
  print(f'\nstudy: {os.path.join(study.folder, "study.md")}')
  return 0 if runs and left_out else 1


def _flags(arguments):
  parser = argument_parser.Parser(prog='python -m anp_jax.tools.study', description=__doc__)
  parser.add_argument(
    'what', choices=['strategies', 'model_ring', 'channel_split', 'papers'], help='kind of study'
  )
  parser.add_argument('--config', help='recipe, FILE[:VARIANT], with any --config.KEY=VALUE')
  parser.add_argument('--workdir', help='study folder')
  parser.add_argument('--nodes', help='process counts, such as 1,2,4 (default: 1,2)')
  parser.add_argument('--devices_per_node', default='1', help='devices per process, such as 1,2')
  parser.add_argument(
    '--strategies',
    help=f'strategies (default: {_STRATEGIES}; with --simulate {simulate.STRATEGIES})',
  )
  parser.add_argument('--seeds', default='0', help='seeds, such as 0,1,2')
  parser.add_argument(
    '--learning_rates',
    help="learning rates, such as 0.01,0.02; the best is shown (default: the config's)",
  )
  _add_keys(parser)
  parser.add_argument('--target_accuracy', type=float, help='accuracy (0 to 1) to time')
  parser.add_argument(
    '--emulate',
    nargs='?',
    const='',
    metavar='KEY=VALUE,...',
    help='keys of config.emulate, for nodes whose computation is a sleep, such as '
    '--emulate=step_seconds=0.1,spread=0.05,megabytes=10,bandwidth=1gbit',
  )
  parser.add_argument(
    '--simulate',
    nargs='?',
    const='',
    metavar='KEY=VALUE,...',
    help='simulation of all --workers by one process per run, in simulated time, by '
    'keys of config.strategy.simulate, such as '
    '--simulate=step_seconds=0.2,spread=0.3',
  )
  parser.add_argument(
    '--workers', metavar='N,...', help=f'simulated worker counts (default: {simulate.NODES})'
  )
  parser.add_argument(
    '--scaling',
    default='strong',
    metavar='KIND,...',
    help='strong: batch_size is global; weak: batch_size is per node',
  )
  slurm.add_flag(parser)
  return parser.parse(arguments)


def _add_keys(parser):
  """Adds the flags that vary any key of the config."""
  parser.add_argument(
    '--vary',
    action='append',
    default=[],
    metavar='KEY=VALUE,...',
    help='further axis of the study: any config key, such as '
    '--vary=strategy.servers=1,25%% (of the nodes); repeatable',
  )
  parser.add_argument(
    '--tune',
    action='append',
    default=[],
    metavar='KEY=VALUE,...',
    help="grid from which each strategy's best value is found by successive halving: "
    'shorter runs first, with another seed',
  )
  parser.add_argument(
    '--tune_budget',
    metavar='DURATION',
    help="training per tuning, such as '60 epochs' (default: that of one run for each rung)",
  )


def _study(flags, overrides):
  """What the flags ask for; ConfigError for whatever is wrong with them.

  Returns:
    `study_runner.Study`, its cells, `tune.Plan` or None.
  """
  rates = grid.learning_rates(flags.learning_rates)
  _check_flags(flags, overrides, rates)
  emulated, simulated = flags.emulate is not None, flags.simulate is not None
  default = simulate.STRATEGIES if simulated else _STRATEGIES
  strategies = grid.strategies(flags.strategies or default)
  overrides = emulate.overrides(flags.emulate, overrides)
  overrides = simulate.overrides(flags.simulate, overrides, strategies)
  flag, nodes = '--nodes', flags.nodes or _NODES
  of_flags = dict(grid.AXES)
  if simulated:
    flag, nodes = '--workers', flags.workers or simulate.NODES
    of_flags[grid.WORKERS] = flag
  of_flags |= emulate.not_varied(emulated)
  varied = axes.parse(flags.vary, strategies, overrides, of_flags)
  seeds = grid.numbers('--seeds', flags.seeds, 0)
  used = overrides | {axis.key: axis.values[0] for axis in varied}
  plan = tune.parse(flags, strategies, used, of_flags, seeds)

  def combinations(strategy, nodes):
    chosen = overrides | {'strategy.name': strategy}
    if simulated:
      chosen[grid.WORKERS] = str(nodes)
    return axes.combinations(flags.config, chosen, varied, nodes)

  cells = grid.expand(
    strategies,
    grid.numbers(flag, nodes, 1),
    grid.numbers('--devices_per_node', flags.devices_per_node, 1),
    seeds,
    rates,
    combinations,
  )
  study = study_runner.Study(flags.config, overrides, flags.workdir, emulated, simulated=simulated)
  if simulated:
    cells = simulate.cells(study, cells)
  cells = scaling.cells(study, cells, scaling.parse(flags.scaling))
  _check_keys(study, cells, varied + (plan.axes if plan else ()))
  if emulated:
    emulate.check(study, cells)
    sleeps = emulation_keys.sleeps(study.first_config(cells))
    study = dataclasses.replace(study, sleeps=sleeps)
  return study, cells, plan


def _check_flags(flags, overrides, rates):
  """Refuses flags that are missing, or do not go together."""
  for flag in ('config', 'workdir'):
    if not getattr(flags, flag):
      raise config_lib.ConfigError(f'--{flag} is missing')
  outputs.check_folder('--workdir', flags.workdir)
  for key, flag in grid.AXES.items():
    if key in overrides and (key != grid.RATE or rates != (None,)):
      raise config_lib.ConfigError(
        f'--config.{key}={overrides[key]}: the study sets it; use {flag}'
      )
  target = flags.target_accuracy
  if target is not None and not 0 < target <= 1:
    raise config_lib.ConfigError(
      f'--target_accuracy={target}: expected a number above 0, at most 1'
    )
  if target is not None and flags.emulate is not None:
    raise config_lib.ConfigError(f'--target_accuracy={target}: nothing is learnt with --emulate')
  simulate.check(flags)


def _check_keys(study, cells, varied):
  """Refuses keys that no run of the study has, and a strategy without a run.

  Of a strategy's cells that cannot be, others may be; the first is looked for.
  """
  refusals, possible = {}, set()
  unused = set(study.overrides) | {axis.key for axis in varied}
  tuned = tuple((a.key, a.values[0]) for a in varied if a.flag == tune.FLAG)
  for cell in {dataclasses.replace(c, seed=0): c for c in cells}.values():
    unused -= study.keys(dataclasses.replace(cell, tuned=tuned))
    if cell.strategy not in possible:
      try:
        study.config(cell)
        possible.add(cell.strategy)
      except config_lib.ConfigError as e:
        refusals.setdefault(cell.strategy, e)
  for key in unused:
    if key in study.overrides:
      command_line.load(study.spec, {key: study.overrides[key]})
  for axis in varied:
    if axis.key in unused:
      raise config_lib.ConfigError(
        f'{axis.flag}={axis.key}={",".join(axis.values)}: no run of the study has this key'
      )
  for strategy, refusal in refusals.items():
    if strategy not in possible:
      raise refusal


def _train(study, cells, options, progress) -> dict[grid.Cell, str]:
  """Runs what is not finished; the line that says why, for each that failed."""
  failures, waiting = {}, []
  cores = len(os.sched_getaffinity(0)) if options is None else None

  def ended(cell, error):
    if error:
      failures[cell] = error
    progress.ended(cell, error)

  for cell in cells:
    try:
      study_runner.note_result(study, cell, cores)
      if not study_runner.is_finished(study, cell):
        waiting.append(cell)
      elif error := study_runner.record(study, cell).get('error'):
        failures[cell] = error
    except config_lib.ConfigError as e:
      ended(cell, study_runner.Refusal(e))
  progress.begin(cells, len(waiting))
  if options is None:
    local.run(study, waiting, progress.began, ended)
  else:
    slurm.run(study, waiting, progress.began, ended, shlex.split(options))
  return failures


def _written(study, cells, outcome, flags, arguments) -> str:
  """Writes the page of runs, failures and tuning; the table for people."""
  from anp_jax.tools.study import study_page  # matplotlib, once there is something to draw

  runs, failures, (plan, contests) = outcome
  cores = [study_runner.record(study, c)['cores'] for c in runs]
  how = 'emulated, ' * study.emulated + 'simulated, ' * study.simulated
  return study_page.write(
    study.folder,
    f'Strategies, {how}{flags.config}',
    shlex.join(['python', '-m', 'anp_jax.tools.study', *arguments]),
    study_page.Outcome(
      cells,
      runs,
      failures,
      min((n for n in cores if n), default=None),
      _emulation(study, cells),
      simulate.describe(study.overrides) if study.simulated else '',
      plan,
      contests,
    ),
    flags.target_accuracy,
  )


def _emulation(study, cells):
  """What a study emulates, in a line; '' of one that computes."""
  if not study.emulated:
    return ''
  return emulation.describe(study.first_config(cells).emulate)


def _runs(study, cells, failures):
  """The numbers of each finished run; one that has none is a failure, too."""
  runs, counted = {}, {}
  for cell in cells:
    if cell in failures:
      continue
    record = study_runner.record(study, cell)
    crowded = (
      bool(record['cores']) and cell.processes * cell.devices > record['cores'] and not study.sleeps
    )
    try:
      run = study_results.read(study.workdir(cell), crowded, study.simulated)
    except config_lib.ConfigError as e:
      failures[cell] = str(e)
      continue
    if run.megabytes is None and not cell.simulated:
      if 'megabytes' not in record:
        # It takes seconds: once for all seeds, and kept.
        key = cell.strategy, cell.workers, cell.varied, cell.tuned
        if key not in counted:
          counted[key] = traffic.megabytes(study, cell)
        record['megabytes'] = counted[key]
        study_runner.write_record(study, cell, record)
      run = dataclasses.replace(run, megabytes=record['megabytes'])
    runs[cell] = run
  return runs


def command() -> None:
  """Runs as a program: python -m anp_jax.tools.study, anp-study."""
  signal.signal(signal.SIGTERM, signal.default_int_handler)
  sys.exit(main(sys.argv[1:]))


if __name__ == '__main__':
  command()
