"""Pictures of a data set: sheets of examples, charts of class balance."""

import math

import numpy as np

from anp_jax.data import vocabulary
from anp_jax.data.show import stats
from anp_jax.system import drawing

_COLORS = drawing.BLUE, drawing.ORANGE  # of the splits
_RED = '#cc0000'

_SMALL, _ENLARGED = 96, 128  # pixels: sides below the first are drawn at least so large
_WIDE_RANGE = 50  # from the smallest to the largest count; beyond it the axis is logarithmic
_NAME = 26  # letters of a name in a chart


def sheet(
  path: str, images: np.ndarray, names: list[str], replaced: np.ndarray, title: list[str]
) -> None:
  """Writes images in rows, each above the name of its class.

  Args:
    path: PNG file to write.
    images: (n, side, side, 3) uint8, shown pixel by pixel; small ones are
      enlarged a whole number of times.
    names: class names, n of them.
    replaced: (n,) bool, images to frame in red.
    title: lines above, the first one bold.
  """
  side = images.shape[1]
  lines: list[str | tuple[str, str]] = [*title]
  if side < _SMALL:
    times = -(-_ENLARGED // side)
    side *= times
    lines.append((f'drawn {times} times as large', drawing.SOFT))
  if replaced.any():
    text = f'red: {replaced.sum()} damaged; another is shown, with weight 0'
    lines.append((text, _RED))
  columns = math.ceil(math.sqrt(len(images)))
  line = drawing.ContactSheet.LINE
  contacts = drawing.ContactSheet(lines, len(images), columns, (side, side + line))
  for i, image in enumerate(images):
    left, upper = contacts.corner(i)
    color = _RED if replaced[i] else None
    contacts.picture((left, upper), image, side, color)
    contacts.text(
      (left + side // 2, upper + side + line // 2 + 2), names[i], side, color or drawing.INK, 'mm'
    )
  contacts.save(path)


def balance(path: str, counts: list[stats.Counts]) -> None:
  """Writes curves of the images of classes, adjectives and nouns over their rank.

  Args:
    path: PNG file to write.
    counts: counts of training and of evaluation.
  """
  parts = [p for p in stats.PARTS if len(getattr(counts[0], p))]
  style = {'font.size': 9, 'axes.titlesize': 10, 'axes.grid': False}
  with drawing.figure(path, 11, 3.2 * len(parts), 120, style) as figure:
    axes = figure.subplots(len(parts), 2, squeeze=False)
    for part, row in zip(parts, axes):
      names = [drawing.fitted(w, _NAME, len) for w in counts[0].words(part)]
      for axis, split, color, split_counts in zip(row, stats.SPLITS, _COLORS, counts):
        images = getattr(split_counts, part)
        total = vocabulary.counted(int(images.sum()), 'image')
        axis.set_title(f'{split}: {total} of {vocabulary.counted(len(images), stats.PARTS[part])}')
        _draw_ranks(axis, names, images, color)


def _draw_ranks(axis, names, images, color):
  """Draws images over ranks, with the names at both ends."""
  ranks = np.arange(1, len(images) + 1)
  axis.fill_between(ranks, np.sort(images)[::-1], step='mid', color=color, lw=0)
  smallest, middle, largest = stats.extremes(names, images)
  axis.text(
    0.98,
    0.97,
    f'largest: {largest}\nmiddle: {middle}\nsmallest: {smallest}',
    transform=axis.transAxes,
    ha='right',
    va='top',
    linespacing=1.5,
    bbox={'facecolor': 'white', 'edgecolor': 'none', 'alpha': 0.8},
  )
  axis.set_xlim(0.5, len(images) + 0.5)
  axis.set_xlabel('rank')
  axis.grid(axis='y')
  positive = images[images > 0]
  if positive.size and positive.max() > _WIDE_RANGE * positive.min():
    axis.set_yscale('symlog', linthresh=1)
    axis.yaxis.set_major_formatter(lambda value, _: f'{value:,.0f}')
  else:
    drawing.counts(axis.yaxis, 6)
  axis.set_ylim(0, 1.12 * max(images.max(initial=0), 1))
