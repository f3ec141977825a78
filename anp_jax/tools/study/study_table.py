"""The numbers of a study as tables: for people, and as CSV files."""

import csv
import dataclasses

from anp_jax.tools.study import grid, study_results, study_runner

_CROWDED = '*'
_BEST = ' best'
_HOUR = 3600  # seconds
_CELL_COLUMNS = (
  'strategy',
  'nodes',
  'devices_per_node',
  'seed',
  'learning_rate',
  'state',
  'images_per_second',
  'accuracy',
  'best_accuracy',
  'seconds',
  'seconds_to_target',
  'megabytes_per_step',
  'crowded',
  'error',
  'simulated',
  'weak',
  'mean_staleness',
  'max_staleness',
  *study_results.SCORES,
)


def rows(
  points: list[study_results.Point], target: float | None, emulated: bool = False
) -> list[tuple[str, ...]]:
  """How fast each point is, a row each after a head; see `filled`.

  Args:
    points: of the study.
    target: accuracy from 0 to 1 to which the time is shown; None: none is.
    emulated: whether computing was, and so nothing was learnt.
  """
  rate = 'images/s, emulated' if emulated else 'images/s'
  heads = places(points)
  head = [*heads[0], rate, 'over one device', 'over one node', 'learning rate']
  if target is not None:
    head.append(f'time to {100 * target:g} %')
  table = [(*head, 'MB sent a step', 'seeds')]
  for p, place in zip(points, heads[1:]):
    mark = _CROWDED if p.crowded else ''
    row = [
      *place,
      text(p.rate, '.0f'),
      text(p.over_device, '.2f', mark),
      text(p.over_node, '.2f', mark),
      number(p.learning_rate),
    ]
    if target is not None:
      row.append(reached(p, target))
    table.append((*row, text(p.megabytes, '.2f'), seeds(p)))
  return filled(table, len(heads[0]))


def filled(table: list[tuple[str, ...]], first: int) -> list[tuple[str, ...]]:
  """Returns a table without the columns that no row but the head fills.

  Args:
    table: rows after a head.
    first: columns that stay, from the left.
  """
  columns = [
    i for i in range(len(table[0])) if i < first or any(row[i] != '-' for row in table[1:])
  ]
  return [tuple(row[i] for i in columns) for row in table]


def by_learning_rate(points: list[study_results.Point]) -> list[tuple[str, ...]]:
  """Accuracy of each learning rate, one point a row, after a head.

  Args:
    points: of the study.

  Returns:
    [] where there is one learning rate only.
  """
  rates = sorted({r for p in points for r in p.tried if r is not None})
  if len(rates) < 2:
    return []
  heads = places(points)
  table = [(*heads[0], *map(number, rates))]
  for p, place in zip(points, heads[1:]):
    texts = [text(p.tried.get(r), '.1f', ' %' + _BEST * (r == p.learning_rate), 100) for r in rates]
    table.append((*place, *texts))
  return table


def notes(
  points: list[study_results.Point],
  cores: int | None,
  emulation: str = '',
  left_out: dict[grid.Cell, str] | None = None,
  simulation: str = '',
) -> list[str]:
  """The notes below the table, one line each.

  Args:
    points: of the study.
    cores: of the one machine where all ran; None: of hosts of their own.
    emulation: what was emulated, in a line; '': nothing was.
    left_out: cells that cannot be, with the line that says why.
    simulation: the times of simulated workers, in a line; '': none were.
  """
  notes = []
  if emulation:
    shared = '' if cores is None else f', on {cores} cores in all'
    notes.append(
      f'Emulated: {emulation}. Processes, collectives, requests and updates are real{shared}.'
    )
  elif simulation:
    notes.append(
      f'Simulated workers, {simulation}: one process of this machine computed '
      'for all of a run, and times are theirs.'
    )
  elif cores is not None:
    notes.append(
      f'All nodes are processes of one machine with {cores} cores, a core for each device.'
    )
  if any(p.crowded for p in points):
    notes.append(
      f'{_CROWDED} more devices than cores: they shared them, so these speed-ups mean nothing.'
    )
  if any(len(p.tried) > 1 for p in points):
    notes.append('Of several learning rates the one with the best mean accuracy.')
  if any(len(p.runs) > 1 for p in points):
    notes.append(
      'Mean and standard deviation over seeds; in the table of scores, the '
      '95 % interval of the mean (Student t). Differences are paired by seed.'
    )
  for p in points:
    notes += [f'failed: {name}: {error}' for name, error in p.failures.items()]
  # A line for all seeds and learning rates that are refused for one reason.
  refused = {}
  for cell, error in (left_out or {}).items():
    kind = dataclasses.replace(cell, seed=0, learning_rate=None), error
    refused.setdefault(kind, cell.name)
  notes += [f'left out: {name}: {e}' for (_, e), name in refused.items()]
  return notes


def write_cells(
  path: str,
  cells: list[grid.Cell],
  runs: dict[grid.Cell, study_results.Run],
  failures: dict[grid.Cell, str],
  target: float | None,
) -> None:
  """Writes a CSV file with one cell a row; empty where there is no number.

  Args:
    path: of the file.
    cells: of the study.
    runs: of the cells that are finished.
    failures: of the others; a `study_runner.Refusal` of one that cannot be.
    target: accuracy from 0 to 1 to which the time is written; None: none is.
  """
  keys = _keys(cells)
  with open(path, 'w', newline='') as f:
    columns = (*_CELL_COLUMNS, *keys)
    writer = csv.DictWriter(f, columns, extrasaction='ignore')
    writer.writeheader()
    for c in cells:
      error = failures.get(c, '')
      lost = 'left out' if isinstance(error, study_runner.Refusal) else 'failed'
      row = dict(c.varied + c.tuned) | {
        'strategy': c.strategy,
        'nodes': c.nodes,
        'devices_per_node': c.devices,
        'seed': c.seed,
        'learning_rate': c.rate,
        'state': 'finished' if c in runs else lost,
        'error': error,
        'simulated': c.simulated,
        'weak': c.weak,
      }
      if c in runs:
        r = runs[c]
        row |= {
          'images_per_second': r.images_per_second,
          'accuracy': r.accuracy[-1],
          'best_accuracy': r.accuracy.max(),
          'seconds': r.end,
          'seconds_to_target': target and r.seconds_to(target),
          'megabytes_per_step': r.megabytes,
          'crowded': r.crowded,
          'mean_staleness': r.mean_staleness,
          'max_staleness': r.max_staleness,
          **r.scores,
        }
      writer.writerow(row)


def write_curves(path: str, runs: dict[grid.Cell, study_results.Run]) -> None:
  """Writes a CSV file with one evaluation a row."""
  keys = _keys(runs)
  with open(path, 'w', newline='') as f:
    writer = csv.writer(f)
    writer.writerow(
      (
        'strategy',
        'nodes',
        'devices_per_node',
        'seed',
        'step',
        'samples',
        'seconds',
        'accuracy',
        'learning_rate',
        *keys,
        'simulated',
        'weak',
      )
    )
    for c, r in runs.items():
      varied = dict(c.varied + c.tuned)
      for values in zip(r.steps, r.samples, r.seconds, r.accuracy):
        writer.writerow(
          (
            c.strategy,
            c.nodes,
            c.devices,
            c.seed,
            *values,
            c.rate,
            *(varied.get(key) for key in keys),
            c.simulated,
            c.weak,
          )
        )


def _keys(cells):
  """The varied and tuned keys of any of the cells, in their order."""
  keys = dict.fromkeys(key for c in cells for key, _ in c.varied + c.tuned)
  return tuple(key for key in keys if key != grid.RATE)  # a column of its own


def places(points: list[study_results.Point]) -> list[tuple[str, ...]]:
  """A head, and a row a point: its strategy, varied keys, nodes, devices."""
  names = tuple(dict.fromkeys(name for p in points for name in p.varied))
  simulated = any(p.simulated for p in points)
  devices = not simulated or any(p.devices > 1 for p in points)
  sizes = ('workers' if simulated else 'nodes', 'devices a node')[: 1 + devices]
  table = [('strategy', *names, *sizes)]
  for p in points:
    varied = (p.varied.get(name, '-') for name in names)
    table.append((p.strategy, *varied, *map(str, (p.nodes, p.devices)[: len(sizes)])))
  return table


def text(spread: study_results.Spread | None, form: str, unit: str = '', scale: float = 1) -> str:
  """'mean ± deviation' with its unit; '-' for no number."""
  if spread is None:
    return '-'
  words = f'{scale * spread.mean:{form}}'
  if spread.count > 1:
    words += f' ± {scale * spread.deviation:{form}}'
  return words + unit


def duration(spread: study_results.Spread | None) -> str:
  """Seconds, or hours where they are many; '-' for no number."""
  if spread and spread.mean >= _HOUR:
    return text(spread, '.2f', ' h', 1 / _HOUR)
  return text(spread, '.1f', ' s')


def reached(point: study_results.Point, target: float) -> str:
  """The time to an accuracy, and how many runs did not come so far."""
  missed = sum(not r.reaches(target) for r in point.runs.values())
  if missed == len(point.runs):
    return 'not reached' if missed else '-'
  words = duration(point.seconds_to(target))
  return words + (f' ({missed} not)' if missed else '')


def number(value: float | None) -> str:
  """A number in its shortest form; '-' for none."""
  return '-' if value is None else repr(value)


def seeds(point: study_results.Point) -> str:
  """How many seeds came to their end, and how many runs did not."""
  failed = f', {len(point.failures)} failed' if point.failures else ''
  return f'{len(point.runs)}{failed}'
