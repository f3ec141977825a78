"""The flag --simulate of a study: one process computes for all workers.

The flag's keys are those of config.strategy.simulate, the times of a worker. A
run is one process of this machine, however many workers it has.
"""

from collections.abc import Iterable, Mapping
import dataclasses

from anp_jax import config as config_lib
from anp_jax.config import resolve
from anp_jax.tools.study import grid, settings, study_runner

_GROUP = 'strategy.simulate.'
STRATEGIES = 'sync,local_sgd,parameter_server'  # the default: those that have workers
NODES = '1,2,4,8'  # the default of --workers


def overrides(text: str | None, typed: dict[str, str], strategies: Iterable[str]) -> dict[str, str]:
  """The config's overrides of a study, with those of its simulation.

  Args:
    text: of --simulate, such as 'step_seconds=0.1,spread=0.05'; None: nothing
      is simulated.
    typed: text by dotted key, from --config.KEY=VALUE.
    strategies: of the study.

  Raises:
    ConfigError: for a key that there is not, with the nearest, and for one that
      is set twice.
  """
  if text is None:
    return typed
  if grid.WORKERS in typed:
    raise config_lib.ConfigError(
      f'--config.{grid.WORKERS}={typed[grid.WORKERS]}: the study sets it; use --workers'
    )
  names = [
    key.removeprefix(_GROUP)
    for key in resolve.known_keys(*strategies)
    if key.startswith(_GROUP) and key != grid.WORKERS
  ]
  return typed | settings.parse('--simulate', text, _GROUP, names, typed)


def check(flags) -> None:
  """Refuses flags that do not go together.

  Args:
    flags: of the study: simulate, workers, nodes, emulate, plan.

  Raises:
    ConfigError: naming them.
  """
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
  """The cells of a study whose nodes are workers to simulate, each once.

  A strategy that simulates none trains alike for any number: by one process.

  Args:
    study: the study.
    of_workers: cells that do not say yet that they are simulated.

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
      'sync, local_sgd or server in --strategies'
    )
  return list(simulated_cells)


def describe(study_overrides: Mapping[str, str]) -> str:
  """Returns the times that a study's overrides set, in a line."""
  times = ', '.join(
    f'{key.removeprefix(_GROUP)}={text}'
    for key, text in study_overrides.items()
    if key.startswith(_GROUP)
  )
  return times or 'the default times'
