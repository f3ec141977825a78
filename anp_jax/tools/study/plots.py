"""The figures of a study."""

import collections
from collections.abc import Sequence
import functools
from typing import Any

import matplotlib
import matplotlib.figure
import numpy as np

from anp_jax.system import drawing
from anp_jax.tools.study import study_results

_MODEL = 110  # letters of a model's name below a chart
_SERIES = 30  # letters of a name that a panel has room for
_LETTERS = 12  # of a legend's names, in an inch
_AT_THE_END = 'Accuracy at the end'
# matplotlib declares the type of each setting.
_STYLE: Any = drawing.STYLE | {'axes.grid.axis': 'both'}


@matplotlib.rc_context(_STYLE)
def speed(points: list[study_results.Point]) -> matplotlib.figure.Figure:
  """Draws images/s, and the speed-up at the two levels of the grid.

  Within a node: devices of one node over one device. Across nodes: nodes with
  all their devices over one of them. Hollow: more devices than cores.
  """
  most = max(p.devices for p in points)
  plural = 's' if most > 1 else ''
  hollow = ' (hollow: more than cores)' if any(p.oversubscribed for p in points) else ''
  within = [p for p in points if p.nodes == 1]
  across = [p for p in points if p.devices == most]
  # A level of one size has nothing to compare.
  has_within = len({p.devices for p in within}) > 1
  has_across = len({p.nodes for p in across}) > 1
  figure, axes = _figure(1 + has_within + has_across)
  axes[0].set(title='Images/s', xlabel=f'devices in all{hollow}')
  _series(axes[0], _both_levels(points), lambda p: p.workers, lambda p: p.rate)
  if has_within:
    axes[1].set(title='Within a node: speed-up', xlabel='devices of one node, over one device')
    _speed_up(axes[1], within, lambda p: p.devices, lambda p: p.over_device)
  if has_across:
    axes[-1].set(
      title='Across nodes: speed-up', xlabel=f'nodes of {most} device{plural}, over one node'
    )
    _speed_up(axes[-1], across, lambda p: p.nodes, lambda p: p.over_node)
  _add_legends(figure, axes)
  return figure


@matplotlib.rc_context(_STYLE)
def accuracy(
  points: list[study_results.Point], targets: Sequence[float]
) -> matplotlib.figure.Figure:
  """Draws accuracy against samples and time, and the time to each target accuracy.

  With simulated workers, time is theirs, and a panel shows the accuracy by their
  number. Curves are those of each series' largest cell, and of the smallest cell
  in grey; bands reach from the lowest seed to the highest.
  """
  simulated = any(p.simulated for p in points)
  time = 'simulated seconds' if simulated else 'seconds of training'
  done = [p for p in points if p.runs]
  largest = {p.series: p for p in sorted(done, key=lambda p: p.workers)}
  first = min(done, key=lambda p: p.workers)
  panels = _size_panels(points, targets, simulated)
  figure, axes = _figure(2 + len(panels))
  axes[0].set(title='Accuracy against samples', xlabel='images trained on')
  axes[1].set(title='Accuracy against time', xlabel=time)
  looks = _looks(points)
  curves = [(p, looks[p.series] | {'marker': ''}) for p in largest.values()]
  curves += [(first, {'color': drawing.GREY})] * (first not in largest.values())
  for x, axis in enumerate(axes[:2]):
    drawing.percent(axis.yaxis)
    for p, look in curves:
      _curve(axis, p, x, label=p.label, **look)
  for axis, (title, value) in zip(axes[2:], panels):
    axis.set(title=title, xlabel='workers' if simulated else 'devices in all')
    _series(axis, _both_levels(points), lambda p: p.workers, value)
    if title == _AT_THE_END:
      drawing.percent(axis.yaxis)
  _add_legends(figure, axes)
  return figure


def _curve(axis, point, x, **look):
  """Mean accuracy against samples (x=0) or seconds (x=1), with a band of all seeds."""
  *xs, scores = study_results.curve(point)
  axis.plot(xs[x], scores.mean(0), **look)
  axis.fill_between(
    xs[x], scores.min(0), scores.max(0), color=look['color'], alpha=0.15, linewidth=0
  )


def _size_panels(points, targets, simulated):
  """(title, value of a point) of the panels against the number of workers."""
  panels = []
  if simulated and len({p.workers for p in points}) > 1:
    panels.append((_AT_THE_END, lambda p: p.accuracy))
  panels += [(f'Seconds to {100 * t:g} %', functools.partial(_seconds_to, t)) for t in targets]
  return panels


def _seconds_to(target, point):
  """The time to an accuracy, where all seeds reach it: those that do are the quick ones."""
  summary = point.summarize(lambda run: run.spent_to(target, 'seconds'))
  return summary if summary and summary.count == len(point.runs) else None


@matplotlib.rc_context(_STYLE)
def staleness(points: list[study_results.Point]) -> matplotlib.figure.Figure | None:
  """Draws the share of updates by staleness for each cell that has any; None if none has."""
  series = []
  for p in points:
    counts = sum((collections.Counter(r.staleness) for r in p.runs.values()), collections.Counter())
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
      color=looks[p.series]['color'],
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
def gantt(spans: list[dict], names: list[str]) -> matplotlib.figure.Figure:
  """Draws what the stations of a ring did and when, a line per station.

  Args:
    spans: spans of training and scoring, see `anp_jax.runtimes.model_ring.spans`.
    names: names of the models.
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


def save(figure: matplotlib.figure.Figure, path: str) -> None:
  """Writes a PNG file."""
  figure.savefig(path, dpi=130, metadata={'Software': None})


def _figure(panels):
  # Without pyplot: no window system, no state left behind.
  figure = matplotlib.figure.Figure(figsize=(4.6 * max(panels, 1.3), 3.8), layout='constrained')
  return figure, figure.subplots(1, panels, squeeze=False)[0]


def _both_levels(points):
  """One node's devices, and whole nodes: so much is on one line a strategy."""
  most = max(p.devices for p in points)
  return [p for p in points if p.nodes == 1 or p.devices == most]


def _looks(points):
  """The look of each strategy with its varied keys that ran."""
  return drawing.looks(p.series for p in points if p.runs)


def _speed_up(axis, points, size, value):
  """Speed-ups next to the ideal line."""
  drawing.ideal(axis, [1, *map(size, points)])
  _series(axis, points, size, value)


def _series(axis, points, size, value):
  """One line a strategy, with the 95 % interval of its mean; if of one size, side by side."""
  looks, is_single = _looks(points), len(set(map(size, points))) == 1
  for i, (series, look) in enumerate(looks.items()):
    chosen_points = [p for p in points if p.series == series and value(p)]
    if not chosen_points:
      continue
    chosen_points.sort(key=size)
    sizes = [i if is_single else size(p) for p in chosen_points]
    axis.errorbar(
      sizes,
      [value(p).mean for p in chosen_points],
      [value(p).interval or 0 for p in chosen_points],
      capsize=3,
      label=series,
      **look | {'marker': ''},
    )
    for p, x in zip(chosen_points, sizes):
      fill = 'white' if p.oversubscribed else look['color']
      axis.plot(x, value(p).mean, markerfacecolor=fill, **look)
  drawing.label_sizes(axis, map(size, points))
  if is_single:
    axis.set_xticks([(len(looks) - 1) / 2], [str(size(points[0]))])
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
