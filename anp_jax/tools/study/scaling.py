"""The flag --scaling of a study: config.batch_size is that of all nodes or of each.

Strong scaling divides one batch over the workers. Weak scaling gives each worker
a batch: if a strategy divides the batch over n workers, it is n times as large. A
gradient of an asynchronous worker is one of a whole batch already.
"""

from collections.abc import Callable, Iterable
import dataclasses

import ml_collections

from anp_jax import config as config_lib
from anp_jax.config import command_line, durations, errors, resolve, strategy as strategy_lib
from anp_jax.tools.study import grid

_KINDS = ('strong', 'weak')
_BATCH = 'batch_size'


def parse(text: str) -> tuple[str, ...]:
  """Returns the kinds of scaling in a text, each once; ConfigError for an unknown one."""
  kinds = tuple(dict.fromkeys(part.strip() for part in text.split(',')))
  for kind in kinds:
    errors.check_choice(f'--scaling={text}', kind, _KINDS)
  return kinds


def batch_overrides(spec: str, overrides: dict[str, str], workers: int) -> dict[str, str]:
  """Returns the override of the batch size in weak scaling.

  Args:
    spec: FILE[:VARIANT] of the config.
    overrides: overrides of the run that apply, by dotted key.
    workers: workers of the run.

  Raises:
    ConfigError: if the run's config is not valid, and if it counts steps: a larger batch needs
      fewer of them for as many samples.
  """
  size = command_line.recipe(spec).batch_size
  if _BATCH in overrides:
    declared = resolve.known_keys()[_BATCH]
    size = declared.parse(_BATCH, overrides[_BATCH])
  config = command_line.load(spec, overrides | {_BATCH: repr(size * workers)})
  if durations.amount(config.duration)[1] == 'steps':
    raise config_lib.ConfigError(
      f'--scaling=weak: config.duration={config.duration!r}: expected epochs '
      'or examples, so that all runs have as many samples'
    )
  parts = strategy_lib.find(config).update_shards(config, workers)
  return {_BATCH: repr(size * parts)}


def cells(
  config: Callable[[grid.Cell], ml_collections.ConfigDict],
  of_study: Iterable[grid.Cell],
  kinds: tuple[str, ...],
) -> list[grid.Cell]:
  """Returns the cells of each kind of scaling; equal cells are one.

  Args:
    config: function from a cell to its config, `study_runner.Study.config`.
    of_study: cells without a kind of scaling.
    kinds: kinds from `parse`.
  """
  every: dict[grid.Cell, bool] = {}
  for cell in of_study:
    for kind in kinds:
      scaled = dataclasses.replace(cell, weak=kind == 'weak')
      if scaled.weak and _is_alike(config, cell, scaled):
        scaled = cell
      every[scaled] = True
  return list(every)


def _is_alike(config, cell, weak):
  """Whether both cells are valid, with the same batch size."""
  try:
    return config(weak).batch_size == config(cell).batch_size
  except config_lib.ConfigError:
    return False
