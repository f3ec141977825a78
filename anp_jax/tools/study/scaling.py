"""The flag --scaling of a study: whose batch config.batch_size is.

Strong scaling divides one batch over the workers. Weak scaling gives each
worker a batch: where a strategy divides the batch, it is as many times as
large. A gradient of an asynchronous worker is of a whole batch already.
"""

from collections.abc import Iterable
import dataclasses

from anp_jax import config as config_lib
from anp_jax.config import command_line, resolve, strategy as strategy_lib
from anp_jax.tools.study import grid

_KINDS = ('strong', 'weak')
_BATCH = 'batch_size'
_STEPS = ('step', 'steps')


def parse(text: str) -> tuple[str, ...]:
  """Returns the kinds that --scaling asks for, each once.

  Raises:
    ConfigError: for one that there is not, with the nearest.
  """
  kinds = tuple(dict.fromkeys(part.strip() for part in text.split(',')))
  for kind in kinds:
    if kind not in _KINDS:
      raise config_lib.ConfigError(
        f'--scaling={text}: expected strong, weak, or both with a comma'
        f'{config_lib.nearest(kind, _KINDS)}'
      )
  return kinds


def batch_overrides(spec: str, overrides: dict[str, str], workers: int) -> dict[str, str]:
  """Returns the override of the batch size in weak scaling.

  Args:
    spec: FILE[:VARIANT] of the config.
    overrides: of the run, by dotted key, without those that do not apply.
    workers: of the run.

  Raises:
    ConfigError: if the run's config is not valid, and if it counts steps, of
      which a larger batch needs fewer for as many samples.
  """
  size = command_line.load(spec, {}).batch_size
  if _BATCH in overrides:
    declared = resolve.known_keys()[_BATCH]
    size = declared.parse(_BATCH, overrides[_BATCH])
  config = command_line.load(spec, overrides | {_BATCH: repr(size * workers)})
  if config.duration.split()[-1] in _STEPS:
    raise config_lib.ConfigError(
      f'--scaling=weak: config.duration={config.duration!r}: expected epochs '
      'or examples, so that all runs have as many samples'
    )
  parts = strategy_lib.find(config).update_shards(config, workers)
  return {_BATCH: repr(size * parts)}


def cells(study, of_study: Iterable[grid.Cell], kinds: tuple[str, ...]) -> list[grid.Cell]:
  """Returns the cells of each kind of scaling; those that agree are one.

  Args:
    study: `study_runner.Study`.
    of_study: cells that do not say yet how they scale.
    kinds: see `parse`.
  """
  every = {}
  for cell in of_study:
    for kind in kinds:
      scaled = dataclasses.replace(cell, weak=kind == 'weak')
      if scaled.weak and _is_alike(study, cell, scaled):
        scaled = cell
      every[scaled] = True
  return list(every)


def _is_alike(study, cell, weak):
  """Whether both cells have one batch size; not where one cannot be."""
  try:
    batch_size = study.config(weak).batch_size
    return batch_size == study.config(cell).batch_size
  except config_lib.ConfigError:
    return False
