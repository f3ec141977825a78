"""The curves that the papers' figures share."""

from collections.abc import Mapping, Sequence
import itertools

from anp_jax.system import drawing

STYLE = {'axes.grid.axis': 'both'}
_MARKERS = 'osD^vP'


def speed_ups(
  axis,
  title: str,
  label: str,
  published: Mapping[int, float],
  curves: Mapping[str, Mapping[int, float]],
  measured: Mapping[str, Mapping[int, float]],
) -> None:
  """Draws speed-ups by devices, with the ideal line.

  Args:
    axis: of matplotlib's.
    title: of the panel.
    label: of its x axis.
    published: speed-up by size.
    curves: predicted, by name and size: lines.
    measured: by name and size: filled markers.
  """
  everything = [published, *curves.values(), *measured.values()]
  sizes = sorted({1, *(size for curve in everything for size in curve)})
  axis.plot(sizes, sizes, '--', color=drawing.GREY, label='ideal', linewidth=1.2)
  colours = itertools.cycle(drawing.COLOURS)
  for (name, curve), marker in zip(curves.items(), itertools.cycle(_MARKERS)):
    if curve:
      axis.plot(
        list(curve),
        list(curve.values()),
        marker,
        linestyle='-',
        color=next(colours),
        label=name,
        markersize=4,
        markerfacecolor='none',
      )
  for (name, points), marker in zip(measured.items(), itertools.cycle('Xsd*')):
    if points:
      axis.plot(
        list(points), list(points.values()), marker, label=name, color=drawing.INK, markersize=8
      )
  axis.plot(
    list(published),
    list(published.values()),
    'D',
    markersize=7,
    color=drawing.INK,
    markerfacecolor='none',
    label='published',
  )
  axis.set(title=title, xlabel=label, ylim=(0, None))
  ticks(axis, sizes)
  axis.legend(fontsize=8)


def ticks(axis, sizes: Sequence[int]) -> None:
  """Marks the sizes on the x axis, those of the large end if they are close."""
  room, chosen = 0.05 * (sizes[-1] - sizes[0]), []
  for size in reversed(sizes):
    if not chosen or chosen[-1] - size >= room:
      chosen.append(size)
  axis.set_xticks(chosen)
