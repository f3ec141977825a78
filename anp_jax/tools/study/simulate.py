"""The flag --simulate of a study: one process computes for all workers.

The flag's keys are those of config.strategy.simulate, the times of a worker. A
run is one process of this machine with any number of workers.
"""

import argparse
from collections.abc import Iterable
import dataclasses

from anp_jax import config as config_lib
from anp_jax.config import resolve
from anp_jax.tools.study import grid, settings, study_runner

_GROUP = 'strategy.simulate.'
STRATEGIES = 'sync,local_sgd,parameter_server'  # the default: those that have workers
NODES = '1,2,4,8'  # the default of --workers


def overrides(text: str | None, typed: dict[str, str], strategies: Iterable[str]) -> dict[str, str]:
  """Returns the config's overrides of a study, with those of its simulation.

  Args:
    text: text of --simulate, such as 'step_seconds=0.1,spread=0.05'; None: nothing is simulated.
    typed: texts of --config.KEY=VALUE by dotted key.
    strategies: strategies of the study.

  Raises:
    ConfigError: for an unknown key, with the nearest, and for one that is set twice.
  """
  if text is None:
    return typed
  names = [
    key.removeprefix(_GROUP)
    for key in resolve.known_keys(*strategies)
    if key.startswith(_GROUP) and key != grid.WORKERS
  ]
  return typed | settings.parse('--simulate', text, _GROUP, names, typed)


def check(flags: argparse.Namespace) -> None:
  """Raises ConfigError for flags of a study that do not go together."""
  if flags.simulate is None:
    if flags.workers is not None:
      raise config_lib.ConfigError(
        f'--workers={flags.workers}: expected --simulate with it, or --nodes'
      )
    return
  if flags.nodes is not None:
    raise config_lib.ConfigError(
      f'--nodes={flags.nodes}: expected --workers with --simulate: a run is one process'
    )
  if flags.emulate is not None:
    raise config_lib.ConfigError(
      '--emulate: expected without --simulate: times are those of strategy.simulate'
    )


def cells(study: study_runner.Study, of_workers: Iterable[grid.Cell]) -> list[grid.Cell]:
  """Returns the cells of a study whose nodes are simulated workers, each once.

  A strategy that simulates no workers trains alike for any number: with one process.

  Args:
    study: the study.
    of_workers: cells that are not marked as simulated yet.

  Raises:
    ConfigError: if no strategy of the study simulates workers.
  """
  simulated_cells = {}
  for cell in of_workers:
    simulated = dataclasses.replace(cell, simulated=True)
    if grid.WORKERS not in study.keys(simulated):
      simulated = dataclasses.replace(cell, nodes=1)
    simulated_cells[simulated] = True
  if not any(cell.simulated for cell in simulated_cells):
    raise config_lib.ConfigError(
      '--simulate: no strategy of the study simulates workers; expected '
      'sync, local_sgd or parameter_server in --strategies'
    )
  return list(simulated_cells)
