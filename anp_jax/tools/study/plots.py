"""The figures of a study."""

import itertools

import matplotlib
import matplotlib.figure
import matplotlib.ticker
import numpy as np

from anp_jax.system import drawing
from anp_jax.tools.study import study_results

_MARKERS = 'osD^vP'
_MODEL = 110  # letters of a model's name below a chart
_SERIES = 30  # letters of a name that a panel has room for
_LETTERS = 12  # of a legend's names, in an inch
_AT_THE_END = 'Accuracy at the end'
_STYLE = drawing.STYLE | {'axes.grid.axis': 'both'}


@matplotlib.rc_context(_STYLE)
def speed(points: list[study_results.Point]) -> matplotlib.figure.Figure:
  """Images/s, and the speed-up at the two levels of the grid.

  Within a node: devices of one node over one device. Across nodes: nodes with
  all their devices over one of them. Hollow: more devices than cores.
  """
  most = max(p.devices for p in points)
  plural = 's' if most > 1 else ''
  levels = (
    (
      'Within a node',
      'devices of one node, over one device',
      [p for p in points if p.nodes == 1],
      lambda p: p.devices,
      lambda p: p.over_device,
    ),
    (
      'Across nodes',
      f'nodes of {most} device{plural}, over one node',
      [p for p in points if p.devices == most],
      lambda p: p.nodes,
      lambda p: p.over_node,
    ),
  )
  # A level of one size has nothing to compare.
  levels = [level for level in levels if len(set(map(level[3], level[2]))) > 1]
  figure, axes = _figure(1 + len(levels))
  hollow = any(p.crowded for p in points)
  more = ' (hollow: more than cores)' if hollow else ''
  axes[0].set(title='Images/s', xlabel=f'devices in all{more}')
  _series(axes[0], _both_levels(points), _workers, lambda p: p.rate)
  for axis, (title, label, chosen, size, over) in zip(axes[1:], levels):
    axis.set(title=f'{title}: speed-up', xlabel=label)
    ideal = [1, max(map(size, chosen))]
    axis.plot(ideal, ideal, '--', color=drawing.GREY, label='ideal')
    _series(axis, chosen, size, over)
  _add_legends(figure, axes)
  return figure


@matplotlib.rc_context(_STYLE)
def accuracy(points: list[study_results.Point], target: float | None) -> matplotlib.figure.Figure:
  """Accuracy against samples and time, and the time to a target accuracy.

  Of simulated workers, time is theirs, and a panel has the accuracy by their
  number.

  Curves are of each series' largest cell, and of the smallest cell of all in
  grey; bands reach from the lowest seed to the highest.
  """
  simulated = any(p.simulated for p in points)
  panels = _size_panels(points, target, simulated)
  figure, axes = _figure(2 + len(panels))
  done = [p for p in points if p.runs]
  largest = {p.series: p for p in sorted(done, key=lambda p: p.workers)}
  first = min(done, key=lambda p: p.workers)
  looks = _looks(points)
  chosen = [(p, looks[p.series][0]) for p in largest.values()]
  if first not in largest.values():
    chosen.append((first, drawing.GREY))
  time = 'simulated seconds' if simulated else 'seconds of training'
  for axis, title, label in (
    (axes[0], 'Accuracy against samples', 'images trained on'),
    (axes[1], 'Accuracy against time', time),
  ):
    axis.set(title=title, xlabel=label)
    drawing.percent(axis.yaxis)
  for point, colour in chosen:
    samples, seconds, scores = study_results.curve(point)
    for axis, x in zip(axes, (samples, seconds)):
      axis.plot(x, scores.mean(0), color=colour, label=point.label)
      axis.fill_between(x, scores.min(0), scores.max(0), color=colour, alpha=0.15, linewidth=0)
  for axis, (title, value) in zip(axes[2:], panels):
    axis.set(title=title, xlabel=_size(simulated))
    _series(axis, _both_levels(points), _workers, value)
    if title == _AT_THE_END:
      drawing.percent(axis.yaxis)
  _add_legends(figure, axes)
  return figure


def _size_panels(points, target, simulated):
  """(title, value of a point) of the panels against the number of workers."""
  panels = []
  if simulated and len({p.workers for p in points}) > 1:
    panels.append((_AT_THE_END, lambda p: p.accuracy))
  if target is not None:
    panels.append((f'Seconds to {100 * target:g} %', lambda p: p.seconds_to(target)))
  return panels


def _size(simulated):
  return 'workers' if simulated else 'devices in all'


@matplotlib.rc_context(_STYLE)
def staleness(points: list[study_results.Point]) -> matplotlib.figure.Figure | None:
  """Share of updates by staleness, of each cell that has any; None if none."""
  series = []
  for p in points:
    counts = {}
    for run in p.runs.values():
      for key, count in run.staleness.items():
        counts[key] = counts.get(key, 0) + count
    if counts:
      series.append((p, counts))
  if not series:
    return None
  figure, (axis,) = _figure(1)
  axis.set(title='Staleness of updates', xlabel='updates between read and apply')
  drawing.percent(axis.yaxis)
  drawing.counts(axis.xaxis)
  width = 0.8 / len(series)
  looks = _looks(points)
  for i, (p, counts) in enumerate(series):
    keys = np.array(list(counts))
    shares = np.array(list(counts.values())) / sum(counts.values())
    axis.bar(
      keys + (i - (len(series) - 1) / 2) * width,
      shares,
      width,
      color=looks[p.series][0],
      alpha=(i + 1) / len(series),
      label=p.label,
    )
  if max(len(p.label) for p, _ in series) > _SERIES:
    _add_legends(figure, [axis])
    return figure
  # Of many cells the names are more than the panel has room for.
  columns = -(-len(series) // 12)
  figure.set_figwidth(figure.get_figwidth() + 1.9 * columns)
  figure.legend(loc='outside right upper', ncols=columns)
  return figure


@matplotlib.rc_context(_STYLE)
def traffic(points: list[study_results.Point]) -> matplotlib.figure.Figure | None:
  """MB that a step sends, against devices; None where it is not known."""
  if not any(p.megabytes for p in points):
    return None
  figure, (axis,) = _figure(1)
  simulated = any(p.simulated for p in points)
  axis.set(title='Traffic', xlabel=_size(simulated), ylabel='MB sent a step')
  _series(axis, _both_levels(points), _workers, lambda p: p.megabytes)
  _add_legends(figure, [axis])
  return figure


@matplotlib.rc_context(_STYLE)
def gantt(spans: list[dict], names: list[str]) -> matplotlib.figure.Figure:
  """Who did what when, a line a station.

  Args:
    spans: of a ring, see `anp_jax.runtimes.model_ring.spans`; what, station,
      model, start, end.
    names: of the models.
  """
  stations = max(s['station'] for s in spans) + 1
  names = [drawing.shortened(name, _MODEL) for name in names]
  columns = 1 if max(map(len, names)) > _MODEL // 2 else 2
  figure = matplotlib.figure.Figure(
    figsize=(11, 1.7 + 0.55 * stations + 0.2 * len(names) / columns), layout='constrained'
  )
  axis = figure.subplots()
  begin = min(s['start'] for s in spans if s['what'] == 'train')
  labels_shown = set()
  for s in spans:
    left, width = s['start'] - begin, s['end'] - s['start']
    if left + width < 0:
      continue
    colour = drawing.COLOURS[s['model'] % len(drawing.COLOURS)]
    label = names[s['model']] if s['what'] == 'train' else ''
    axis.barh(
      s['station'],
      width,
      left=left,
      height=0.8 if label else 0.45,
      color=colour if label else 'white',
      edgecolor=colour,
      linewidth=0.8,
      label=label if label not in labels_shown else None,
    )
    labels_shown.add(label)
  axis.set(
    title='The ring: training (full), scoring (hollow)',
    xlabel='seconds since the first step',
    ylabel='station',
    xlim=(0, None),
  )
  axis.set_yticks(range(stations))
  axis.invert_yaxis()
  axis.grid(visible=False, axis='y')
  figure.legend(loc='outside lower center', ncols=columns)
  return figure


@matplotlib.rc_context(_STYLE)
def split_steps(points: list[dict]) -> matplotlib.figure.Figure:
  """Predicted against measured steps; speed-up of each plan and its ideal.

  Args:
    points: of steps with split convolutions: config, devices, batch_size, name,
      predicted and measured seconds, speed_up, ideal.
  """
  figure, (left, right) = _figure(2)
  configs = list(dict.fromkeys(p['config'] for p in points))
  for config, colour, marker in zip(
    configs, itertools.cycle(drawing.COLOURS), itertools.cycle(_MARKERS)
  ):
    chosen_points = [p for p in points if p['config'] == config]
    left.plot(
      [p['measured'] for p in chosen_points],
      [p['predicted'] for p in chosen_points],
      marker,
      color=colour,
      label=config,
      markersize=4,
    )
  times = [t for p in points for t in (p['measured'], p['predicted'])]
  ends = np.array([min(times) / 1.2, max(times) * 1.2])
  left.plot(ends, ends, '--', color=drawing.GREY, label='as predicted')
  left.fill_between(ends, 0.85 * ends, 1.15 * ends, color=drawing.GREY, alpha=0.15)
  left.set(
    title='Seconds of a step',
    xlabel='measured',
    xscale='log',
    yscale='log',
    ylabel='predicted (band: 15 %)',
    xlim=ends,
  )
  subs = (1, 2, 5) if ends[1] < 100 * ends[0] else (1,)
  for axis in (left.xaxis, left.yaxis):
    axis.set_major_locator(matplotlib.ticker.LogLocator(subs=subs))
    axis.set_major_formatter(matplotlib.ticker.FormatStrFormatter('%g'))
    axis.set_minor_formatter(matplotlib.ticker.NullFormatter())
  left.legend()
  plans = [p for p in points if p['name'] == 'plan']
  upright = len(plans) > 3
  if upright:  # names of so many do not fit side by side
    figure.set_figheight(1.5 * figure.get_figheight())
  names = [
    (', ' if upright else '\n').join(
      (drawing.shortened(p['config'], 24), f'{p["devices"]} devices', f'{p["batch_size"]} images')
    )
    for p in plans
  ]
  places = np.arange(len(plans))
  right.bar(places, [p['speed_up'] for p in plans], 0.6, color=drawing.BLUE, label='measured')
  right.hlines(
    [p['ideal'] for p in plans],
    places - 0.4,
    places + 0.4,
    color=drawing.GREY,
    linestyles='--',
    label='ideal',
  )
  right.set(title='The plan over one device alone')
  right.set_xticks(places, names, fontsize=7, rotation=90 * upright)
  right.set_ylim(top=1.3 * max((p['ideal'] for p in plans), default=1))
  right.legend(loc='upper left', ncols=2)
  return figure


def save(figure: matplotlib.figure.Figure, path: str) -> None:
  """Writes a PNG file."""
  figure.savefig(path, dpi=130, metadata={'Software': None})


def apart(sizes):
  """The ascending sizes whose labels do not meet on an axis, the largest first."""
  room = 0.1 * (sizes[-1] - sizes[0])
  ticks = sizes[-1:]
  for size in reversed(sizes[:-1]):
    if ticks[-1] - size >= room:
      ticks.append(size)
  return ticks


def _figure(panels):
  # Without pyplot: no window system, no state left behind.
  figure = matplotlib.figure.Figure(figsize=(4.6 * max(panels, 1.3), 3.8), layout='constrained')
  return figure, figure.subplots(1, panels, squeeze=False)[0]


def _workers(point):
  return point.workers


def _both_levels(points):
  """One node's devices, and whole nodes: so much is on one line a strategy."""
  most = max(p.devices for p in points)
  return [p for p in points if p.nodes == 1 or p.devices == most]


def _looks(points):
  """Colour and marker of each strategy with its varied keys that ran."""
  names = dict.fromkeys(p.series for p in points if p.runs)
  return dict(zip(names, itertools.cycle(zip(drawing.COLOURS, _MARKERS))))


def _series(axis, points, size, value):
  """One line a strategy, with the deviation over seeds."""
  for series, (colour, marker) in _looks(points).items():
    chosen_points = [p for p in points if p.series == series and value(p)]
    if not chosen_points:
      continue
    chosen_points.sort(key=size)
    sizes = [size(p) for p in chosen_points]
    axis.errorbar(
      sizes,
      [value(p).mean for p in chosen_points],
      [value(p).deviation for p in chosen_points],
      color=colour,
      capsize=3,
      label=series,
    )
    for p, x in zip(chosen_points, sizes):
      fill = 'white' if p.crowded else colour
      axis.plot(x, value(p).mean, marker, color=colour, markerfacecolor=fill)
  axis.set_xticks(apart(sorted({size(p) for p in points})))
  axis.set_ylim(bottom=0)


def _add_legends(figure, axes):
  """A legend in each panel, or where names are long one below them all."""
  named = [(axis, *axis.get_legend_handles_labels()) for axis in axes]
  longest = max((len(x) for *_, labels in named for x in labels), default=0)
  if longest <= _SERIES:
    for axis, _, labels in named:
      if labels:
        axis.legend()
    return
  # The first panel has the names of all.
  _, handles, labels = named[0]
  room = _LETTERS * figure.get_figwidth()
  if longest > room:
    figure.set_figwidth(longest / _LETTERS)
  columns = max(1, int(room / longest))
  rows = -(-len(labels) // columns)
  figure.set_figheight(figure.get_figheight() + 0.2 * rows)
  figure.legend(handles, labels, loc='outside lower center', ncols=columns)
