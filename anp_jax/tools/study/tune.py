"""The flag --tune of a study: each cell finds the best value of a key.

Successive halving of a grid (Jamieson and Talwalkar 2016, arXiv 1502.07943):
all values train for a short time, the better half of them for longer, until one
is left, with which the cell's seeds are trained. Each rung costs the same: with n
values left, a run trains for an n-th of the rung's budget.

A run of a longer rung starts from scratch and does not resume the shorter one:
schedules end with a run, so values are compared after a whole schedule; a resumed
run of workers differs from one that was not stopped; and a run stays a function
of its config. This costs at most as many epochs again.
"""

import argparse
from collections.abc import Callable, Iterable, Mapping
import dataclasses
import math

from anp_jax import config as config_lib
from anp_jax.config import command_line, durations as durations_lib, resolve
from anp_jax.tools.study import axes, grid, study_results, study_runner

FLAG = '--tune'
# Of all runs that only tune, unless it is that of a scored run.
_SEED = 1000


@dataclasses.dataclass(frozen=True)
class Tuning:
  """The keys that a study tunes, and the budget.

  Attributes:
    axes: keys with their values, numbers in ascending order.
    budget: training of one cell's tuning, in `unit`; None: config.duration for each rung.
    unit: unit of config.duration: epochs, steps or examples.
    duration: config.duration in `unit`.
    seed: seed of the runs that tune.
  """

  axes: tuple[axes.Axis, ...]
  budget: float | None
  unit: str
  duration: float
  seed: int


@dataclasses.dataclass
class Tuned:
  """The results of one cell's values.

  Attributes:
    name: name of the cell, without its seed.
    values: values that were tried, in the grid's order.
    scores: accuracy from 0 to 1 and duration of each value's longest run; the accuracy of a
      run that failed is None.
    best: best value; None if all failed.
    rungs: number of rungs that were trained.
    spent: training of all runs, in the tuning's unit.
    error: reason of the last run that failed; a `study_runner.Refusal` if the configs of all
      of those are refused.
  """

  name: str
  values: list[axes.Varied]
  scores: dict[axes.Varied, tuple[float | None, str]]
  best: axes.Varied | None = None
  rungs: int = 0
  spent: float = 0.0
  error: str = ''


def parse(
  flags: argparse.Namespace,
  strategies: Iterable[str],
  overrides: Mapping[str, str],
  of_flags: Mapping[str, str],
  seeds: Iterable[int],
) -> Tuning | None:
  """Returns what --tune asks for; None without the flag.

  Args:
    flags: flags of the study: tune, tune_budget, vary, config.
    strategies: strategies of the study.
    overrides: overrides of its config and its varied keys, by dotted key.
    of_flags: other flags that set a key, by dotted key.
    seeds: seeds of the scored runs.

  Raises:
    ConfigError: naming the flag, its value and what was expected.
  """
  if not flags.tune:
    return None
  if any(text.partition('=')[0].strip() == 'duration' for text in flags.vary):
    raise config_lib.ConfigError(
      f'--vary={flags.vary[0]} with {FLAG}={flags.tune[0]}: expected one '
      'duration for all cells, since the budget is given in it'
    )
  of_flags = {**of_flags, 'duration': '--config.duration'}
  parsed = axes.parse(flags.tune, strategies, overrides, of_flags, FLAG)
  duration = overrides.get('duration', command_line.recipe(flags.config).duration)
  resolve.known_keys()['duration'].validate('duration', duration)
  number, unit = durations_lib.amount(duration)
  budget = None
  if flags.tune_budget is not None:
    try:
      budget, budget_unit = durations_lib.amount(flags.tune_budget)
    except config_lib.ConfigError as e:
      raise config_lib.ConfigError(f'--tune_budget: {e}') from e
    if budget_unit != unit or not budget:
      raise config_lib.ConfigError(
        f'--tune_budget={flags.tune_budget}: expected an amount of training '
        f'like config.duration={duration!r}, above 0'
      )
  seed = _SEED if _SEED not in seeds else max(seeds) + 1
  return Tuning(tuple(map(_ascending, parsed)), budget, unit, number, seed)


def run(
  study: study_runner.Study,
  cells: list[grid.Cell],
  tuning: Tuning,
  train: Callable[[list[grid.Cell]], dict[grid.Cell, str]],
) -> tuple[list[grid.Cell], dict[grid.Cell, str], list[Tuned]]:
  """Finds the best values for the cells.

  Args:
    study: the study.
    cells: cells of all seeds, without tuned values.
    tuning: keys and budget.
    train: trains cells; returns the reason of each that failed.

  Returns:
    The cells with the best values; the reasons of the cells for which no value could be trained;
    the results of the values.
  """
  contests = {}
  for cell in cells:
    contest = dataclasses.replace(cell, seed=tuning.seed)
    values = candidates(study, cell, tuning)
    for value in values:  # before the time of tuning is spent
      study_runner.check_same(study, dataclasses.replace(cell, tuned=value))
    if contest not in contests:
      name = cell.name.removesuffix(f'-seed{cell.seed}')
      contests[contest] = Tuned(name, values, {})
  left = {contest: tuned.values for contest, tuned in contests.items()}
  while any(len(values) > 1 for values in left.values()):
    _climb(study, tuning, contests, left, train)
  for contest, tuned in contests.items():
    tuned.best = next(iter(left[contest]), None)
  chosen, failures = [], {}
  for cell in cells:
    tuned = contests[dataclasses.replace(cell, seed=tuning.seed)]
    chosen.append(dataclasses.replace(cell, tuned=tuned.best or ()))
    if tuned.best is None:
      failures[chosen[-1]] = tuned.error
  return chosen, failures, [t for t in contests.values() if len(t.values) > 1]


def candidates(study: study_runner.Study, cell: grid.Cell, tuning: Tuning) -> list[axes.Varied]:
  """Returns the values that a cell tries; one without keys if it has none."""
  overrides = study.defaults(cell) | study.overrides | cell.overrides
  return axes.combinations(study.spec, overrides, tuning.axes)


def durations(values: int, tuning: Tuning) -> list[float]:
  """Returns the training of a run of each rung, in the tuning's unit.

  The tuning's budget is spread evenly over the rungs. No run is longer than a scored one.

  Args:
    values: number of values that are tried.
    tuning: keys and budget.
  """
  counts = []
  while values > 1:
    counts.append(values)
    values = math.ceil(values / 2)
  budget = tuning.duration if tuning.budget is None else tuning.budget / len(counts)
  return [min(budget / count, tuning.duration) for count in counts]


def rows(tuning: Tuning, contests: list[Tuned]) -> list[tuple[str, ...]]:
  """Returns the accuracy of each value of each cell, after a head.

  Cells whose config is refused with each value are left out.
  """
  contests = [t for t in contests if t.spent]
  every = list(dict.fromkeys(v for t in contests for v in t.values))
  table = [('tuned', *map(_text, every), f'{tuning.unit} spent')]
  for tuned in contests:
    texts = []
    for value in every:
      accuracy, duration = tuned.scores.get(value, (None, ''))
      text = 'failed' if duration else '-'
      if accuracy is not None:
        text = f'{100 * accuracy:.1f} % ({duration})'
      texts.append(text + ' best' * (value == tuned.best))
    table.append((tuned.name, *texts, f'{tuned.spent:.4g}'))
  return table if contests else []


def notes(tuning: Tuning, contests: list[Tuned]) -> list[str]:
  """Returns notes on the cost of the tuning, and on where the grid should be wider."""
  keys = ', '.join(axis.key for axis in tuning.axes)
  lines = [
    f'Tuned by successive halving: {keys}, with seed {tuning.seed}, which is not '
    f'scored; {sum(t.spent for t in contests):.4g} {tuning.unit} spent in all.'
  ]
  for tuned in contests:
    for axis in tuning.axes:
      best = dict(tuned.best or ()).get(axis.key)
      values = list(dict.fromkeys(dict(v)[axis.key] for v in tuned.values if axis.key in dict(v)))
      if len(values) > 1 and all(map(_is_number, values)) and best in (values[0], values[-1]):
        place = 'first' if best == values[0] else 'last'
        lines.append(
          f"{tuned.name}: the best value of {axis.key}, {best}, is the grid's {place}: widen it"
        )
  return lines


def _climb(study, tuning, contests, left, train):
  """Trains the values that are left for one rung, and halves them."""
  runs = {}
  for contest, values in left.items():
    if len(values) > 1:
      tuned = contests[contest]
      amount = durations(len(tuned.values), tuning)[tuned.rungs]
      tuned.rungs += 1
      for value in values:
        run = dataclasses.replace(contest, tuned=value, duration=_duration(amount, tuning.unit))
        runs[run] = contest
  failures = train(list(runs))
  for run, contest in runs.items():
    tuned, error = contests[contest], failures.get(run)
    accuracy = None if error else study_results.accuracy(study.workdir(run))
    _, earlier = tuned.scores.get(run.tuned, (None, ''))
    tuned.scores[run.tuned] = accuracy, run.duration
    if isinstance(error, study_runner.Refusal):
      tuned.error = tuned.error or error
    else:
      if run.duration != earlier:  # otherwise the rung before has trained it
        tuned.spent += durations_lib.amount(run.duration)[0]
      tuned.error = error or tuned.error
  for contest, values in left.items():
    if len(values) > 1:
      scores = {v: contests[contest].scores[v][0] for v in values}
      trained = [v for v in values if scores[v] is not None]
      trained.sort(key=scores.get, reverse=True)
      left[contest] = trained[: math.ceil(len(values) / 2)]


def _duration(amount, unit):
  """An amount of training as a text for config.duration; steps are whole."""
  if unit == 'epochs':
    return f'{max(amount, 1e-4):.4f}'.rstrip('0').rstrip('.') + ' epochs'
  return f'{math.ceil(round(amount, 6))} {unit}'


def _ascending(axis):
  """An axis whose values, if they are numbers, are in ascending order."""
  if not all(map(_is_number, axis.values)):
    return axis
  return dataclasses.replace(axis, values=tuple(sorted(axis.values, key=float)))


def _is_number(text):
  try:
    return math.isfinite(float(text))
  except ValueError:
    return False


def _text(value):
  """Values of the tuned keys, for people; a single key has no name."""
  names = axes.short_names(key for key, _ in value)
  if len(value) == 1:
    return value[0][1]
  return ', '.join(f'{names[key]}={text}' for key, text in value)
