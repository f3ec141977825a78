"""The flag --simulate of a study: one process computes for all workers.

The flag's keys are those of config.strategy.simulate, the times of a worker. A
run is one process of this machine with any number of workers.
"""

from collections.abc import Iterable
import dataclasses

from anp_jax import config as config_lib
from anp_jax.tools.study import grid, study_runner

GROUP = 'strategy.simulate.'
STRATEGIES = 'sync,local_sgd,parameter_server'  # the default: those that have workers
NODES = '1,2,4,8'  # the default of --workers


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
