"""Cells of a study that are members of one ensemble: their groups, and their process.

Cells whose speed is not measured, and that differ in numbers alone, share a start, a
program and the data. The process reads from standard input which cells it trains.
"""

from collections.abc import Iterable
import json
import subprocess
import sys
from typing import Any

from anp_jax import config as config_lib
from anp_jax.config import command_line, members, simulation_keys, strategy as strategy_lib, trust
from anp_jax.reporting import telemetry
from anp_jax.tools.study import grid, study_runner

_COMMAND = [sys.executable, '-m', 'anp_jax.tools.study.together']


def groups(
  study: study_runner.Study, cells: Iterable[grid.Cell], processes: int
) -> list[tuple[grid.Cell, ...]]:
  """Returns the cells in groups that each have a process, in the order of their first cells.

  Args:
    study: the study.
    cells: cells to run.
    processes: processes that run at the same time.
  """
  by_program: dict[object, list[grid.Cell]] = {}
  for cell in cells:
    by_program.setdefault(_program(study, cell), []).append(cell)
  return [
    tuple(group)
    for cells in by_program.values()
    for i in range(processes)
    if (group := cells[i::processes])
  ]


def _program(study, cell):
  """A text that is equal for cells that can share a program; the cell itself if none can."""
  is_timed = not (cell.simulated or cell.duration)
  if is_timed or study.emulated or cell.processes * cell.devices > 1:
    return cell
  try:
    config = study.config(cell)
  except config_lib.ConfigError:  # its own command says so
    return cell
  # As `ensemble` takes them; one that is refused there runs alone.
  is_moved = config.data.augment in ('none', 'pad', 'strong_pad')
  values = config_lib.flat(config)
  if not is_moved or not simulation_keys.has_one_loop(strategy_lib.find(config), values):
    return cell
  return members.program_key(config)


def unfinished(study: study_runner.Study, cells: Iterable[grid.Cell]) -> list[grid.Cell]:
  """Returns the cells whose runs have no result."""
  return [cell for cell in cells if not telemetry.result(study.workdir(cell))]


def start(
  study: study_runner.Study, cells: Iterable[grid.Cell], prefix: list[str], **options: Any
) -> subprocess.Popen:
  """Starts the process of a group.

  Args:
    study: the study.
    cells: cells of the group.
    prefix: words before its command.
    **options: arguments of Popen.
  """
  process = subprocess.Popen([*prefix, *_COMMAND], stdin=subprocess.PIPE, text=True, **options)
  request = {study.workdir(cell): study.overridden(cell) for cell in cells}
  assert process.stdin
  with process.stdin as stream:
    json.dump([study.spec, request], stream)
  return process


def main() -> None:
  """Trains the cells of the request."""
  spec, request = json.load(sys.stdin)
  configs = {
    workdir: command_line.load(spec, command_line.split_overrides(arguments)[0])
    for workdir, arguments in request.items()
  }
  from anp_jax import cluster
  from anp_jax.system import compute_dtype, xla_flags

  first = next(iter(configs.values()))
  trust.allow(config_lib.flat(first))  # as typed for the study
  xla_flags.enable_for(first)
  configs = {w: compute_dtype.decide(config, w) for w, config in configs.items()}
  import jax

  from anp_jax.ensemble import ensemble_run

  with cluster.Processes(first) as processes:
    ensemble = ensemble_run.Ensemble(configs, processes, jax.local_devices())
    scores, vote = ensemble.train()
  sys.exit(vote or not all(scores.values()))


if __name__ == '__main__':
  try:
    main()
  except config_lib.ConfigError as e:
    sys.exit(f'error: {e}')
