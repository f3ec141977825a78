"""The numbers of a study as tables: for people, and as CSV files."""

import csv

from anp_jax.system import markdown as markdown_lib
from scripts.study import grid
from scripts.study import results

_CROWDED = '*'
_BEST = ' best'
_CELL_COLUMNS = (
  'strategy', 'nodes', 'devices_per_node', 'seed', 'learning_rate', 'state',
  'images_per_second', 'accuracy', 'best_accuracy', 'seconds',
  'seconds_to_target', 'megabytes_per_step', 'crowded', 'planned', 'error',
)  # fmt: skip


def rows(
  points: list[results.Point], target: float | None, emulated: bool = False
) -> list[tuple[str, ...]]:
  """One point a row, after a head; columns that no point fills are left out.

  Args:
    points: of the study.
    target: accuracy from 0 to 1 to which the time is shown; None: none is.
    emulated: whether computing was, and so nothing was learnt.
  """
  rate = 'images/s, emulated' if emulated else 'images/s'
  head = ['strategy', 'nodes', 'devices a node', rate, 'planned', 'error',
          'over one device', 'over one node', 'learning rate',
          'accuracy']  # fmt: skip
  if target is not None:
    head.append(f'time to {100 * target:g} %')
  head += ['MB sent a step', 'seeds']
  table = []
  for p in points:
    mark = _CROWDED if p.crowded else ''
    accuracy = None if emulated else p.accuracy
    row = [p.strategy, str(p.nodes), str(p.devices), _text(p.rate, '.0f'),
           _text(p.planned, '.0f'), _text(p.plan_error, '+.1f', ' %', 100),
           _text(p.over_device, '.2f', mark), _text(p.over_node, '.2f', mark),
           _number(p.learning_rate),
           _text(accuracy, '.1f', ' %', 100)]  # fmt: skip
    if target is not None:
      row.append(_reached(p, target))
    row.append(_text(p.megabytes, '.2f'))
    failed = f', {len(p.failures)} failed' if p.failures else ''
    table.append((*row, f'{len(p.runs)}{failed}'))
  columns = [
    i for i, name in enumerate(head)
    if name in head[:3] or any(row[i] != '-' for row in table)
  ]  # fmt: skip
  return [tuple(row[i] for i in columns) for row in (head, *table)]


def by_learning_rate(points: list[results.Point]) -> list[tuple[str, ...]]:
  """Accuracy of each learning rate, one point a row, after a head.

  Args:
    points: of the study.

  Returns:
    [] where there is one learning rate only.
  """
  rates = sorted({r for p in points for r in p.tried if r is not None})
  if len(rates) < 2:
    return []
  table = [('strategy', 'nodes', 'devices a node', *map(_number, rates))]
  for p in points:
    texts = [
      _text(p.tried[r], '.1f', ' %' + _BEST * (r == p.learning_rate), 100)
      for r in rates
    ]
    table.append((p.strategy, str(p.nodes), str(p.devices), *texts))
  return table


def notes(
  points: list[results.Point], cores: int | None, emulation: str = ''
) -> list[str]:
  """The notes below the table, one line each.

  Args:
    points: of the study.
    cores: of the one machine where all ran; None: of hosts of their own.
    emulation: what was emulated, in a line; '': nothing was.
  """
  notes = []
  if emulation:
    shared = '' if cores is None else f', on {cores} cores in all'
    notes.append(
      f'Emulated: {emulation}. Processes, collectives, requests and updates '
      f'are real{shared}.'
    )
  elif cores is not None:
    notes.append(
      f'All nodes are processes of one machine with {cores} cores, a core for '
      'each device.'
    )
  if any(p.crowded for p in points):
    notes.append(
      f'{_CROWDED} more devices than cores: they shared them, so these '
      'speed-ups mean nothing.'
    )
  if any(len(p.tried) > 1 for p in points):
    notes.append(
      'Of several learning rates the one with the best mean accuracy.'
    )
  if any(len(p.runs) > 1 for p in points):
    notes.append('Mean and standard deviation over seeds.')
  for p in points:
    notes += [f'failed: {name}: {error}' for name, error in p.failures.items()]
  return notes


def lines(table: list[tuple[str, ...]]) -> list[str]:
  """Rows as aligned text."""
  return markdown_lib.plain(table, 'lr').splitlines()


def markdown(table: list[tuple[str, ...]]) -> list[str]:
  """Rows as the lines of a Markdown table."""
  return markdown_lib.table(table, 'lr').splitlines()


def write_cells(
  path: str,
  cells: list[grid.Cell],
  runs: dict[grid.Cell, results.Run],
  failures: dict[grid.Cell, str],
  target: float | None,
) -> None:
  """Writes a CSV file with one cell a row; empty where there is no number."""
  with open(path, 'w', newline='') as f:
    writer = csv.DictWriter(f, _CELL_COLUMNS)
    writer.writeheader()
    for c in cells:
      row = {
        'strategy': c.strategy,
        'nodes': c.nodes,
        'devices_per_node': c.devices,
        'seed': c.seed,
        'learning_rate': c.learning_rate,
        'state': 'finished' if c in runs else 'failed',
        'error': failures.get(c, ''),
      }
      if c in runs:
        r = runs[c]
        row |= {
          'images_per_second': r.images_per_second,
          'accuracy': r.accuracy[-1],
          'best_accuracy': r.accuracy.max(),
          'seconds': r.seconds[-1],
          'seconds_to_target': target and r.seconds_to(target),
          'megabytes_per_step': r.megabytes,
          'crowded': r.crowded,
          'planned': r.planned,
        }
      writer.writerow(row)


def write_curves(path: str, runs: dict[grid.Cell, results.Run]) -> None:
  """Writes a CSV file with one evaluation a row."""
  with open(path, 'w', newline='') as f:
    writer = csv.writer(f)
    writer.writerow(
      ('strategy', 'nodes', 'devices_per_node', 'seed', 'step', 'samples',
       'seconds', 'accuracy', 'learning_rate')
    )  # fmt: skip
    for c, r in runs.items():
      for values in zip(r.steps, r.samples, r.seconds, r.accuracy):
        writer.writerow((
          c.strategy, c.nodes, c.devices, c.seed, *values, c.learning_rate
        ))  # fmt: skip


def _text(spread, form, unit='', scale=1):
  """'mean ± deviation' with its unit; '-' for no number."""
  if spread is None:
    return '-'
  text = f'{scale * spread.mean:{form}}'
  if spread.count > 1:
    text += f' ± {scale * spread.deviation:{form}}'
  return text + unit


def _number(value):
  return '-' if value is None else repr(value)


def _reached(point, target):
  spread = point.seconds_to(target)
  if spread is None:
    return 'not reached' if point.runs else '-'
  text = _text(spread, '.1f', ' s')
  missed = len(point.runs) - spread.count
  return text + (f' ({missed} not)' if missed else '')
