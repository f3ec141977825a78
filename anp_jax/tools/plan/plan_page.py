"""A plan as tables and a figure."""

from collections.abc import Callable, Mapping, Sequence
import itertools

from anp_jax.costs import goodput as goodput_lib
from anp_jax.reporting import report_kit
from anp_jax.system import drawing, progress
from anp_jax.tools.plan import intervals, points as points_lib

# Columns: their heads and the texts of a point.
_COLUMNS: dict[str, Callable[[points_lib.Point], str]] = {
  'strategy': lambda p: p.strategy,
  'nodes': lambda p: f'{p.cluster.nodes}',
  'devices': lambda p: f'{p.cluster.size:,}',
  'batch': lambda p: f'{p.batch:,.0f}',
  'a device': lambda p: f'{p.images:,}',
  'images/s': lambda p: f'{p.rate:,.0f}',
  '90 % interval (rates)': lambda p: p.interval.text(p.rate) if p.interval else '-',
  'step': lambda p: f'{1e3 * sum(p.seconds.values()):,.4g} ms',
  'compute': lambda p: f'{1e3 * p.seconds["compute"]:,.3g}',
  'sent, late': lambda p: f'{1e3 * p.seconds["communication"]:,.3g}',
  'input': lambda p: f'{1e3 * p.seconds["input"]:,.3g}',
  'fixed': lambda p: f'{1e3 * p.seconds["fixed"]:,.3g}',
  'efficiency': lambda p: f'{100 * p.efficiency:.0f} %',
  'GB a device': lambda p: _gigabytes(p.memory),
  'epoch': lambda p: progress.duration(p.epoch_seconds),
  'run': lambda p: progress.duration(p.run_seconds),
  'device-hours': lambda p: f'{p.device_hours:,.3g}',
}

_GOODPUT: dict[str, Callable[[goodput_lib.Goodput], str]] = {
  'a loss every': lambda g: progress.duration(g.loss_period),
  'save': lambda g: f'{1e3 * g.save.cost:,.3g} ms',
  'every': lambda g: progress.duration(g.save_period),
  'best': lambda g: progress.duration(g.save.period),
  'mirror': lambda g: f'{1e3 * g.mirror.cost:,.3g} ms' if g.mirror else '-',
  'best every': lambda g: progress.duration(g.mirror.period) if g.mirror else '-',
  'after a loss': lambda g: '-' if g.nodes_after_loss is None else f'{g.nodes_after_loss}',
  'requeued': lambda g: _share(g.requeued),
  'elastic': lambda g: _share(g.elastic),
  'requeued, Daly': lambda g: _share(g.requeued_daly),
  'elastic, Daly': lambda g: _share(g.elastic_daly),
}


def lines(plans: Mapping[str, Sequence[points_lib.Point]]) -> str:
  """Returns all points as a table, and below it a line for each strategy."""
  rows: list[tuple[str, ...]] = [tuple(_COLUMNS)]
  notes = []
  for name, points in plans.items():
    rows += [_row(p) for p in points if p.memory is not None]
    notes.append(_summary(name, points))
    for reason in dict.fromkeys(p.why_not for p in points if p.why_not):
      nodes = _nodes(p for p in points if p.why_not == reason)
      notes.append(f'{name}: cannot run with {nodes}: {reason}')
    if waiting := [p for p in points if p.runs and p.seconds['input']]:
      notes.append(f'{name}: input binds with {_nodes(waiting)}: {_wanted(waiting)}')
    if missing := [p for p in points if p.runs and not p.interval]:
      notes.append(f'{name}: {intervals.NONE} with {_nodes(missing)}, so no interval')
  notes[:0] = _caution(itertools.chain.from_iterable(plans.values()))
  return report_kit.plain([report_kit.Table(rows), '\n'.join(notes)])


def _nodes(points) -> str:
  return f'nodes={",".join(str(p.cluster.nodes) for p in points)}'


def _wanted(waiting) -> str:
  """What the host of a node would have to decode, so that no device waits."""
  shares = [1 - p.seconds['input'] / sum(p.seconds.values()) for p in waiting]
  rate, share = max((p.rate / s / p.cluster.nodes, s) for p, s in zip(waiting, shares))
  return f'its host would have to decode {rate:,.0f} images/s, {1 / share:.3g} times as many'


def _caution(points) -> list[str]:
  """A line if the largest batch of the points is larger than an epoch."""
  largest = max(points, key=lambda p: p.batch)
  if not largest.repeats:
    return []
  return [
    f'caution  a batch of {largest.batch:,.0f} images is drawn from {largest.epoch_images:,}: '
    'images repeat within it; expected at most as many, or --examples=N of your data'
  ]


def _row(point) -> tuple[str, ...]:
  return tuple(cell(point) for cell in _COLUMNS.values())


def _gigabytes(memory) -> str:
  return f'{memory.total / 1e9:.1f}' + '!' * (not memory.fits)


def _summary(name, points) -> str:
  last, reason = points_lib.last_that_pays(points)
  if last is None:
    word, end = ('pays', f'; {reason} binds') if reason else ('runs', '')
    return f'{name}: {word} on none of these sizes{end}'
  nodes, devices = last.cluster.nodes, last.cluster.size
  where = f'{nodes} node{"s" * (nodes > 1)} ({devices:,} devices)'
  end = f'{where}; then {reason} binds' if reason else f'the largest size, {where}'
  return f'{name}: pays up to {end}'


def goodput(plans: Mapping[str, Sequence[points_lib.Point]], mtbf: float, repair: float) -> str:
  """Returns a table of what each point keeps of its images/s when nodes fail.

  Args:
    plans: points by strategy.
    mtbf: mean hours between failures of a node.
    repair: mean hours until a node is back; 0: never.
  """
  rows = [('strategy', 'nodes', *_GOODPUT)]
  for point in itertools.chain.from_iterable(plans.values()):
    if point.goodput is not None:
      cells = (cell(point.goodput) for cell in _GOODPUT.values())
      rows.append((point.strategy, f'{point.cluster.nodes}', *cells))
  back = f'is back after {repair:g} h' if repair else 'never returns'
  caption = f'share of the images/s that is kept if a node fails every {mtbf:,g} h and {back}'
  return report_kit.Table(rows, 'lr', caption).plain()


def _share(share):
  return '-' if share is None else f'{100 * share:.1f} %'


def ranking(ranked: Sequence[points_lib.Point], most: int = 12) -> str:
  """Returns a table of the points of a target, the cheapest first."""
  rows = [(f'{i}', *_row(point)) for i, point in enumerate(ranked[:most], 1)]
  table = report_kit.Table([('rank', *_COLUMNS), *rows], 'rlr')
  return report_kit.plain([table, *_caution(ranked[:most])])


def draw(
  path: str,
  title: str,
  plans: Mapping[str, Sequence[points_lib.Point]],
  published: Sequence[tuple[str, int, float]] = (),
) -> None:
  """Draws images/s and their intervals against devices, with the ideal line.

  Args:
    path: path of a PNG file.
    title: title of the figure.
    plans: points by strategy.
    published: (name, devices, images/s) of rates that others measured.
  """
  with drawing.figure(path, 7, 3.9, style={'axes.grid.axis': 'both'}) as figure:
    figure.suptitle(drawing.shortened(title, 70), fontsize=10)
    _draw_rates(figure.subplots(), plans, published)


def _draw_rates(axis, plans, published):
  sizes = [p.cluster.size for ps in plans.values() for p in ps if p.runs]
  for name, look in drawing.looks(plans).items():
    running = [p for p in plans[name] if p.runs]
    x, y = [p.cluster.size for p in running], [p.rate for p in running]
    axis.plot(x, y, label=name, markersize=4, **look)
    ends = [(p.interval.low, p.interval.high) if p.interval else (1, 1) for p in running]
    low, high = ([r * e[i] for r, e in zip(y, ends)] for i in (0, 1))
    axis.fill_between(x, low, high, color=look['color'], alpha=0.18, linewidth=0)
  has_interval = any(p.interval for ps in plans.values() for p in ps)
  firsts = {}  # of each device, whose name stands before that of a strategy
  for name, points in plans.items():
    firsts.setdefault(name.rpartition(' ')[0], next(p for p in points if p.runs))
  for device, first in firsts.items():
    single = first.rate / first.cluster.size / first.efficiency
    drawing.ideal(axis, sizes, single, f'{device} ideal'.lstrip())
  rates = [(n, r) for _, n, r in published if min(sizes) <= n <= max(sizes)]
  if rates:
    axis.plot(
      *zip(*rates), 'D', color=drawing.INK, markersize=6, label='published', markerfacecolor='none'
    )
  axis.set(
    title='images/s (band: 90 % interval)' if has_interval else f'images/s ({intervals.NONE})',
    xscale='log',
    yscale='log',
    xlabel='devices',
  )
  axis.yaxis.set_major_formatter(lambda y, _: f'{y:,.0f}')
  axis.legend()
  _ticks(axis, sizes)


def _ticks(axis, sizes):
  """Labels at most eight of the sizes."""
  ordered = sorted(set(sizes))
  step = -(-len(ordered) // 8)
  labels = {n: f'{n:,}' for n in ordered[::step]}
  axis.set_xticks(list(labels), list(labels.values()))
  axis.minorticks_off()
