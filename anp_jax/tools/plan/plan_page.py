"""A plan as tables for people, as JSON, and drawn."""

from collections.abc import Mapping, Sequence
import io
import itertools

from anp_jax.system import drawing, files, markdown, progress
from anp_jax.tools.plan import points as points_lib

_HEAD = (
  'strategy',
  'nodes',
  'devices',
  'batch',
  'a device',
  'images/s',
  'step',
  'compute',
  'sent',
  'input',
  'fixed',
  'efficiency',
  'GB a device',
  'epoch',
  'run',
  'device-hours',
)
_PARTS = ('compute', 'communication', 'input', 'fixed')


def lines(plans: Mapping[str, Sequence[points_lib.Point]]) -> str:
  """All points as a table, and a line for each strategy below."""
  rows = [_HEAD]
  notes = []
  for name, points in plans.items():
    rows += [_row(p) for p in points if p.memory is not None]
    notes.append(_summary(name, points))
    reasons = {}
    for p in points:
      if p.why_not:
        reasons.setdefault(p.why_not, []).append(p.cluster.nodes)
    for reason, nodes in reasons.items():
      where = ', '.join(map(str, nodes))
      notes.append(f'{name}: cannot run on {where} nodes: {reason}')
  return '\n'.join([markdown.plain(rows, 'lr'), '', *notes])


def _row(point) -> tuple[str, ...]:
  total = sum(point.seconds.values())
  memory = f'{point.memory.total / 1e9:.1f}' + '!' * (not point.memory.fits)
  return (
    point.strategy,
    f'{point.cluster.nodes}',
    f'{point.cluster.size:,}',
    f'{point.batch:,.0f}',
    f'{point.images:,}',
    f'{point.rate:,.0f}',
    f'{1e3 * total:,.4g} ms',
    *(f'{1e3 * point.seconds[part]:,.3g}' for part in _PARTS),
    f'{100 * point.efficiency:.0f} %',
    memory,
    progress.duration(point.epoch_seconds),
    progress.duration(point.run_seconds),
    f'{point.device_hours:,.3g}',
  )


def _summary(name, points) -> str:
  last, reason = points_lib.last_that_pays(points)
  if last is None:
    return f'{name}: runs on none of these sizes'
  plural = 's' if last.cluster.nodes > 1 else ''
  where = f'{last.cluster.nodes} node{plural} ({last.cluster.size:,} devices)'
  if not reason:
    return f'{name}: pays up to the largest size, {where}'
  return f'{name}: pays up to {where}; then {reason} binds'


def ranking(ranked: Sequence[points_lib.Point], most: int = 12) -> str:
  """The cheapest ways to a target, the first one first."""
  rows = [('rank', *_HEAD)]
  for i, point in enumerate(ranked[:most], 1):
    rows.append((f'{i}', *_row(point)))
  return markdown.plain(rows, 'rlr')


def draw(
  path: str,
  title: str,
  plans: Mapping[str, Sequence[points_lib.Point]],
  error: float,
  published: Sequence[tuple[str, int, float]] = (),
) -> None:
  """Draws images/s and efficiency against devices, with the ideal line.

  Args:
    path: of a PNG file.
    title: of the figure.
    plans: points by strategy.
    error: mean relative error of predictions, the half-width of the band.
    published: (name, devices, images/s) of rates that others measured.
  """
  image = io.BytesIO()
  style = {'axes.grid.axis': 'both'}
  with drawing.figure(image, 9, 3.9, style=style) as figure:
    figure.suptitle(drawing.shortened(title, 90), fontsize=10)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_rates(left, plans, error, published)
    _draw_parts(right, plans)
  files.write_atomic(path, image.getvalue())


def _draw_rates(axis, plans, error, published):
  sizes = [p.cluster.size for ps in plans.values() for p in ps if p.runs]
  for (name, points), (colour, line) in zip(plans.items(), _styles()):
    running = [p for p in points if p.runs]
    x, y = [p.cluster.size for p in running], [p.rate for p in running]
    axis.plot(x, y, f'o{line}', color=colour, label=name, markersize=4)
    low, high = ([r * (1 + s * error) for r in y] for s in (-1, 1))
    axis.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)
  first = next(p for ps in plans.values() for p in ps if p.runs)
  single = first.rate / first.cluster.size / first.efficiency
  ends = [min(sizes), max(sizes)]
  axis.plot(
    ends, [single * n for n in ends], '--', color=drawing.GREY, label='ideal', linewidth=1.2
  )
  if published:
    axis.plot(
      [n for _, n, _ in published],
      [r for *_, r in published],
      'D',
      color=drawing.INK,
      markersize=6,
      label='published',
      markerfacecolor='none',
    )
  axis.set(
    title=f'images/s (band: mean error, {100 * error:.0f} %)',
    xscale='log',
    yscale='log',
    xlabel='devices',
  )
  axis.yaxis.set_major_formatter(lambda y, _: f'{y:,.0f}')
  axis.legend()
  _ticks(axis, sizes)


def _styles():
  """Colours and lines of curves: all colours, then again with another line."""
  pairs = itertools.product(('-', ':', '-.'), drawing.COLOURS)
  return itertools.cycle((colour, line) for line, colour in pairs)


def _draw_parts(axis, plans):
  """Where the time of a step goes, of the first strategy."""
  name, points = next(iter(plans.items()))
  running = [p for p in points if p.runs]
  x = [p.cluster.size for p in running]
  shares = [[p.seconds[part] / sum(p.seconds.values()) for p in running] for part in _PARTS]
  colours = (drawing.BLUE, drawing.ORANGE, drawing.PURPLE, drawing.GREY)
  axis.stackplot(x, shares, colors=colours, labels=_PARTS, alpha=0.85)
  axis.set(title=f'Share of a step, {name}', xscale='log', xlabel='devices', ylim=(0, 1))
  drawing.percent(axis.yaxis)
  axis.legend(loc='lower left', fontsize=8)
  _ticks(axis, x)


def _ticks(axis, sizes):
  """Marks at most eight of the sizes."""
  ordered = sorted(set(sizes))
  step = -(-len(ordered) // 8)
  labels = {n: f'{n:,}' for n in ordered[::step]}
  axis.set_xticks(list(labels), list(labels.values()))
  axis.minorticks_off()
