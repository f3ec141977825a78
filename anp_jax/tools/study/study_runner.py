"""What all launchers of a study's cells share: a cell's command, and its end.

A cell's folder is the workdir of its run, and holds two more files: `study.log`,
the output of the launcher and the processes, and `study.json`, the config with which
the run began and, once it has finished, its cores.
"""

import dataclasses
import functools
import json
import os
import pathlib
import re
import sys

import ml_collections

from anp_jax import config as config_lib
from anp_jax.checkpoint import run_dir as workdir_lib
from anp_jax.config import command_line, strategy as strategy_lib
from anp_jax.reporting import telemetry
from anp_jax.system import files
from anp_jax.tools.study import grid, scaling

LOG = 'study.log'
_RECORD = 'study.json'
_REFUSED = 2  # status of main.py for bad input
# Begins the line of a config that it cannot run.
_OF_CONFIG = re.compile(r'(rank \d+ on \S+: )?config\.')
_NOT_FINITE = 'not finite'  # in the line of a run that diverged
# Keys that change no number of a run.
_FREE = 'cluster.', 'compile_cache.', 'data.dir', 'log.', 'profile.'
_LABEL = re.compile(r'^\[\d+\] ')


class Refusal(str):
  """The line that says why a config cannot be run."""


@dataclasses.dataclass(frozen=True)
class Study:
  """What all cells of a study have in common.

  Attributes:
    spec: FILE[:VARIANT] of the config.
    overrides: texts of the config's overrides, by dotted key.
    folder: folder of the study.
    emulated: whether the processes emulate nodes; see `emulate`.
    sleeps: whether a sleep takes the place of computing.
    simulated: whether one process computes for all workers of a run, in simulated time.
  """

  spec: str
  overrides: dict[str, str]
  folder: str
  emulated: bool = False
  sleeps: bool = False
  simulated: bool = False

  def workdir(self, cell: grid.Cell) -> str:
    """The workdir of a cell's run."""
    return os.path.join(self.folder, 'runs', cell.name)

  def config(self, cell: grid.Cell) -> ml_collections.ConfigDict:
    """A cell's resolved config; ConfigError if it is not valid."""
    return command_line.load(self.spec, self._overrides(cell))

  def first_config(self, cells: list[grid.Cell]) -> ml_collections.ConfigDict:
    """The resolved config of the first cell that has a valid one.

    Raises:
      ConfigError: that of the first cell, if no config is valid.
    """
    refusals = []
    for cell in cells:
      try:
        return self.config(cell)
      except config_lib.ConfigError as e:
        refusals.append(e)
    raise refusals[0]

  def arguments(self, cell: grid.Cell) -> list[str]:
    """The arguments of main.py for a cell."""
    return [f'--config={self.spec}', f'--workdir={self.workdir(cell)}', *self.overridden(cell)]

  def overridden(self, cell: grid.Cell) -> list[str]:
    """The part of `arguments` that sets keys of the config."""
    return command_line.typed(self._overrides(cell))

  def keys(self, cell: grid.Cell) -> set[str]:
    """The keys that the study and the cell set, as far as its strategy has them."""
    return set(self._applying(cell))

  def defaults(self, cell: grid.Cell) -> dict[str, str]:
    """The overrides of a cell that the study's replace, and a recipe's of the same strategy."""
    is_own = _recipe(self.spec).strategy.name == cell.strategy and not cell.simulated
    return {} if is_own else cell.defaults

  def _overrides(self, cell):
    """The overrides of a cell, with the batch size of weak scaling."""
    overrides = self._applying(cell)
    if not cell.weak:
      return overrides
    return overrides | scaling.batch_overrides(self.spec, overrides, cell.nodes)

  def _applying(self, cell):
    """The overrides of the study and the cell that the cell's strategy has."""
    mesh = _mesh(self.spec, cell.strategy)
    overrides = mesh | self.defaults(cell) | self.overrides | cell.overrides
    return command_line.applying(self.spec, overrides)


@functools.cache
def _recipe(spec):
  """The config of a recipe, which is Python that runs."""
  return command_line.recipe(spec)


def _mesh(spec, strategy):
  """The mesh that a strategy needs, where the recipe's strategy has another."""
  planned = strategy_lib.by_name(strategy).planned_mesh
  recipe = strategy_lib.find(_recipe(spec))
  return {} if planned == recipe.planned_mesh else planned


def record(study: Study, cell: grid.Cell) -> dict:
  """Returns what is known of a run that has begun; {} for any other.

  Returns:
    `config`, with which it began; once it has finished, `cores` of the machine where all
    its processes ran, or None if they had hosts of their own; `error` of a run that tunes
    and diverged, which counts as finished.
  """
  return files.read_json(os.path.join(study.workdir(cell), _RECORD)) or {}


def begin(study: Study, cell: grid.Cell) -> None:
  """Makes a cell's workdir, and notes there the config with which its run begins."""
  os.makedirs(study.workdir(cell), exist_ok=True)
  if not record(study, cell):
    _write_record(study, cell)


def check_same(study: Study, cell: grid.Cell) -> None:
  """Refuses a run that has begun with other keys, whose numbers are not those of the cell.

  Raises:
    ConfigError: naming the key and both values; also if the cell's config is not valid.
  """
  if not (saved := record(study, cell)):
    return
  before, now = config_lib.completed(saved['config']), _as_saved(study.config(cell))
  for key in before | now:
    if before.get(key) != now.get(key) and not key.startswith(_FREE):
      raise config_lib.ConfigError(
        f'config.{key}={now.get(key)!r}: the run in {study.workdir(cell)} has '
        f'{before.get(key)!r}; choose another --workdir'
      )


def is_finished(study: Study, cell: grid.Cell) -> bool:
  """Returns whether the run of a cell has finished."""
  return 'cores' in record(study, cell)


def note_result(study: Study, cell: grid.Cell, cores: int | None) -> None:
  """Notes the end of a run that finished while no study waited for it.

  A study that Ctrl-C ended leaves its jobs running. The last line of a job's
  metrics.jsonl says that it has finished.

  Args:
    study: the study.
    cell: cell of the run.
    cores: see `record`.
  """
  has_begun = record(study, cell) and not is_finished(study, cell)
  if has_begun and telemetry.result(study.workdir(cell)):
    _write_record(study, cell, cores=cores)


def ended(study: Study, cell: grid.Cell, status: int, cores: int | None) -> str:
  """Records the end of a cell's run.

  Args:
    study: the study.
    cell: cell of the run.
    status: exit status of its launcher or job.
    cores: see `record`.

  Returns:
    The one line that says why the run has not finished, a `Refusal` if it never
    can; '' if it has finished.
  """
  workdir = study.workdir(cell)
  if status:
    error = first_error(os.path.join(workdir, LOG))
    error = error or f'ended with status {status}'
    if cell.duration and _NOT_FINITE in error:
      _write_record(study, cell, cores=cores, error=error)
    if status != _REFUSED or not _OF_CONFIG.match(error):
      return error
    # A run that has begun was valid: now something else is wrong.
    has_begun = os.path.exists(os.path.join(workdir, telemetry.METRICS))
    if has_begun:
      return error
    # It may be tried with other keys.
    pathlib.Path(workdir, _RECORD).unlink(missing_ok=True)
    return Refusal(error)
  if stopped := workdir_lib.stopped_line(workdir):
    return stopped
  _write_record(study, cell, cores=cores)
  return ''


def _write_record(study, cell, **end):
  """Writes the `record` of a run; `end` is that of one that has finished."""
  values = {'config': _as_saved(study.config(cell)), **end}
  files.write_json(os.path.join(study.workdir(cell), _RECORD), values)


def first_error(log: str) -> str:
  """Returns the first line of a log that is an error, else the last.

  Args:
    log: path of the file; '' is returned if it is missing or empty.
  """
  if not os.path.exists(log):
    return ''
  with open(log, errors='replace') as f:
    lines = [_LABEL.sub('', line).strip() for line in f]
  lines = [line for line in lines if line]
  errors = [line for line in lines if line.startswith('error: ')]
  return (errors or lines[-1:] or [''])[0].removeprefix('error: ')


def environment(cell: grid.Cell) -> dict[str, str]:
  """The environment of a cell's launcher: this Python, its CPU devices."""
  return {**os.environ, 'PYTHON': sys.executable, 'JAX_NUM_CPU_DEVICES': str(cell.devices)}


def _as_saved(config):
  return json.loads(config_lib.to_json(config))
