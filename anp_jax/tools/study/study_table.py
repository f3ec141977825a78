"""The numbers of a study as tables: for people, and as CSV files."""

from collections.abc import Callable, Sequence
import csv
import dataclasses
import functools

from anp_jax.reporting import summaries
from anp_jax.tools.study import grid, study_results, study_runner

_OVERSUBSCRIBED = '*'
_HOUR = 3600  # seconds
_LEARNT = 'accuracy', 'best_accuracy', *study_results.SCORES
_SPENT = 'seconds', 'samples'
# A column: its head, and the text of a point; '-' for none.
Column = tuple[str, Callable[[study_results.Point], str]]


def speed(
  points: list[study_results.Point], targets: Sequence[float], emulated: bool = False
) -> list[tuple[str, ...]]:
  """Returns how fast each point is: a head, then a row per point.

  Args:
    points: points of the study.
    targets: accuracies from 0 to 1 to which time and images are shown.
    emulated: whether computing is emulated, so that nothing is learnt.
  """

  def marked(summary, point):
    return text(summary, '.2f', _OVERSUBSCRIBED if point.oversubscribed else '')

  columns: list[Column] = [
    ('images/s, emulated' if emulated else 'images/s', lambda p: text(p.rate, '.0f')),
    ('predicted', lambda p: text(p.summarize(lambda r: r.predicted), '.0f')),
    ('over one device', lambda p: marked(p.over_device, p)),
    ('ideal', lambda p: text(p.summarize(lambda r: r.ideal), '.2f')),
    ('over one node', lambda p: marked(p.over_node, p)),
    ('learning rate', lambda p: number(p.learning_rate)),
  ]
  columns += [*reaching(targets, 'time'), ('seeds', seeds)]
  return rows(points, columns)


def reaching(targets: Sequence[float], time: str) -> list[Column]:
  """Returns the columns of what each accuracy takes: the time, by its name, and the images."""
  return [
    (f'{name} to {100 * target:g} %', functools.partial(_reached, target, what, form))
    for target in targets
    for name, what, form in ((time, 'seconds', duration), ('images', 'samples', _images))
  ]


def rows(points: list[study_results.Point], columns: Sequence[Column]) -> list[tuple[str, ...]]:
  """Returns a table of points; columns that no point fills are left out.

  The first columns are the place of a point: strategy, varied keys, nodes and devices.
  """
  names = tuple(dict.fromkeys(name for p in points for name in p.varied))
  simulated = any(p.simulated for p in points)
  heads = ['strategy', *names, 'workers' if simulated else 'nodes']
  if not simulated or any(p.devices > 1 for p in points):
    heads.append('devices a node')
  filled = []
  for head, cell in columns:
    cells = [cell(p) for p in points]
    if any(c != '-' for c in cells):
      filled.append((head, *cells))
  table = [(*heads, *(column[0] for column in filled))]
  for i, p in enumerate(points, 1):
    varied = (p.varied.get(name, '-') for name in names)
    place = (p.strategy, *varied, str(p.nodes), str(p.devices))[: len(heads)]
    table.append((*place, *(column[i] for column in filled)))
  return table


def all_models(points: list[study_results.Point]) -> list[tuple[str, ...]]:
  """Returns what all models of a ring took, in a ring and one after another; [] without a ring.

  A row of a strategy that trains one model at a time is the sum over its runs of one size.
  """
  if not any(run.ring for p in points for run in p.runs.values()):
    return []
  head = ('strategy', 'nodes', 'devices a node', 'models', 'seconds', 'stations in use')
  table: list[tuple[str, ...]] = [(*head, 'of the schedule', 'over the ideal', 'hand-over')]
  alone: dict[tuple[str, int, int, int], list[float]] = {}
  for p in points:
    size = str(p.nodes), str(p.devices)
    for seed, run in p.runs.items():
      if run.ring:
        t = run.ring
        shares = (t.use, t.use / t.occupancy, t.over_ideal, t.hand_over)
        texts = [f'{share:.3f}' for share in shares]
        table.append((p.series, *size, f'{len(t.models)}', f'{t.seconds:.1f}', *texts))
      elif run.end is not None:
        alone.setdefault((p.strategy, p.nodes, p.devices, seed), []).append(run.end)
  for (strategy, nodes, devices, _), ends in alone.items():
    cells = f'{nodes}', f'{devices}', f'{len(ends)}', f'{sum(ends):.1f}'
    table.append((f'{strategy}, one after another', *cells, '-', '-', '-', '-'))
  return table


def notes(
  points: list[study_results.Point],
  cores: int | None,
  emulation: str = '',
  left_out: dict[grid.Cell, str] | None = None,
  simulation: str = '',
) -> list[str]:
  """Returns the notes below the table, one line each.

  Args:
    points: points of the study.
    cores: cores of the one machine where all ran; None: hosts of their own.
    emulation: what was emulated, in a line; '': nothing.
    left_out: reasons of the cells whose config is refused.
    simulation: times of simulated workers, in a line; '': none were.
  """
  runs = [run for p in points for run in p.runs.values()]
  shared = '' if cores is None else f', on {cores} cores in all'
  cases = (
    (
      emulation,
      f'Emulated: {emulation}. Processes, collectives, requests and updates are real{shared}.',
    ),
    (
      simulation,
      f'Simulated workers, {simulation}: one process of this machine computed '
      'for all of a run, and times are theirs.',
    ),
    (
      cores is not None and not emulation and not simulation,
      f'All nodes are processes of one machine with {cores} cores, a core for each device.',
    ),
    (
      any(p.oversubscribed for p in points),
      f'{_OVERSUBSCRIBED} more devices than cores: they shared them, so these speed-ups mean '
      'nothing.',
    ),
    (
      any(run.predicted for run in runs),
      'Predicted: images/s by the cost model of the channel split, from times of single layers '
      'and collectives. Ideal: speed-up over one device if communication took no time.',
    ),
    (
      any(run.ring for run in runs),
      'Of many models in one run, images/s is the rate of all, from the first step to the last '
      'score, and accuracy that of the best.',
    ),
    (
      any(len(p.runs) > 1 for p in points),
      'Mean over seeds and its 95 % interval (Student t), in figures as bars; the bands of '
      'curves reach from the lowest seed to the highest. Differences are paired by seed.',
    ),
  )
  lines = [text for applies, text in cases if applies]
  for p in points:
    lines += [f'failed: {name}: {error}' for name, error in p.failures.items()]
  # One line for all seeds that are refused for one reason.
  refused: dict[tuple[grid.Cell, str], str] = {}
  for cell, error in (left_out or {}).items():
    kind = dataclasses.replace(cell, seed=0), error
    refused.setdefault(kind, cell.name)
  lines += [f'left out: {name}: {e}' for (_, e), name in refused.items()]
  return lines


def write_cells(
  path: str,
  cells: list[grid.Cell],
  runs: dict[grid.Cell, study_results.Run],
  failures: dict[grid.Cell, str],
  targets: Sequence[float],
  emulated: bool = False,
) -> None:
  """Writes a CSV file with one row per cell; a field without a number is empty.

  Args:
    path: path of the file.
    cells: all cells of the study.
    runs: numbers of the finished cells.
    failures: reasons of the others; a `study_runner.Refusal` of a refused config.
    targets: accuracies from 0 to 1 to which time and images are written.
    emulated: whether computing is emulated, so that scores are left out.
  """
  records = []
  for c in cells:
    error, r = failures.get(c, ''), runs.get(c)
    lost = 'left out' if isinstance(error, study_runner.Refusal) else 'failed'
    records.append(_place(c) | {'state': 'finished' if r else lost, 'error': error})
    if r:
      records[-1] |= {
        'images_per_second': r.images_per_second,
        'accuracy': r.accuracy[-1],
        'best_accuracy': r.accuracy.max(),
        'seconds': r.ring.seconds if r.ring else r.end,
        **{f'{what}_to_{t:g}': r.spent_to(t, what) for t in targets for what in _SPENT},
        'oversubscribed': r.oversubscribed,
        'mean_staleness': r.mean_staleness,
        'max_staleness': r.max_staleness,
        **r.scores,
      }
  _write(path, records, emulated)


def write_curves(
  path: str, runs: dict[grid.Cell, study_results.Run], emulated: bool = False
) -> None:
  """Writes a CSV file with one row per evaluation, without scores where nothing is learnt."""
  names = ('step', 'samples', 'seconds', 'accuracy')
  _write(
    path,
    [
      _place(c) | dict(zip(names, values))
      for c, r in runs.items()
      for values in zip(r.steps, r.samples, r.seconds, r.accuracy)
    ],
    emulated,
  )


def _write(path, records, emulated):
  """Writes a CSV file with all columns that any record has, in their order."""
  left_out = _LEARNT if emulated else ()
  names = dict.fromkeys(key for r in records for key in r if key not in left_out)
  with open(path, 'w', newline='') as f:
    writer = csv.DictWriter(f, list(names), extrasaction='ignore')
    writer.writeheader()
    writer.writerows(records)


def _place(cell) -> dict:
  """The columns that say which run it is."""
  return {
    'strategy': cell.label,
    'nodes': cell.nodes,
    'devices_per_node': cell.devices,
    'seed': dict(cell.varied).get('seed', cell.seed),  # a model may have its own
    'learning_rate': cell.rate,
    'simulated': cell.simulated,
    'weak': cell.weak,
    **{k: v for k, v in cell.varied + cell.tuned if k not in (grid.RATE, 'seed')},
  }


def text(summary: summaries.Summary | None, form: str, unit: str = '', scale: float = 1) -> str:
  """Returns 'mean ± half of the 95 % interval' with its unit; '-' for no number."""
  if summary is None:
    return '-'
  words = f'{scale * summary.mean:{form}}'
  if summary.interval is not None:
    words += f' ± {scale * summary.interval:{form.removeprefix("+")}}'
  return words + unit


def score(summary: summaries.Summary | None, form: str = '.1f', unit: str = ' %') -> str:
  """Returns a share as `text` does, in percent."""
  return text(summary, form, unit, 100)


def duration(summary: summaries.Summary | None) -> str:
  """Returns seconds, or hours from one hour on; '-' for no number."""
  if summary and summary.mean >= _HOUR:
    return text(summary, '.2f', ' h', 1 / _HOUR)
  return text(summary, '.1f', ' s')


def _images(summary):
  return text(summary, ',.0f')


def _reached(target, what, form, point):
  """What an accuracy took, and the number of runs that did not reach it."""
  missed = sum(not (r.accuracy >= target).any() for r in point.runs.values())
  if missed == len(point.runs):
    return 'not reached' if missed else '-'
  words = form(point.summarize(lambda run: run.spent_to(target, what)))
  return words + (f' ({missed} not)' if missed else '')


def number(value: float | None) -> str:
  """Returns a number in its shortest form; '-' for none."""
  return '-' if value is None else repr(value)


def seeds(point: study_results.Point) -> str:
  """Returns the number of seeds that finished, and of runs that failed."""
  failed = f', {len(point.failures)} failed' if point.failures else ''
  return f'{len(point.runs)}{failed}'
