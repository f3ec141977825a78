"""Pictures of a data set: sheets of examples, charts of class balance."""

import math

import matplotlib.ticker
import numpy as np

from anp_jax.data import vocabulary
from anp_jax.data.show import stats
from anp_jax.system import drawing

_COLORS = drawing.BLUE, drawing.ORANGE  # of the splits
_RED, _INK = '#cc0000', drawing.INK

# Of a sheet, in pixels.
_SMALL, _ENLARGED = 96, 128  # sides below the first are drawn at least so large

# Of a chart.
_BARS = 60  # names that can be read one below the other
_WIDE_RANGE = 50  # from the smallest to the largest; beyond it the axis is log
_LOWEST = 0.5  # where a log axis begins, so that one image is seen
_NAME = 26  # letters of a name at an axis


def sheet(
  path: str, images: np.ndarray, names: list[str], replaced: np.ndarray, title: list[str]
) -> None:
  """Writes images in rows, each above the name of its class.

  Args:
    path: of the PNG.
    images: (n, side, side, 3) uint8, shown pixel by pixel; small ones are
      enlarged a whole number of times.
    names: n, of classes.
    replaced: (n,) bool, those to be framed in red.
    title: lines above, the first one bold.
  """
  side, title = images.shape[1], list(title)
  if side < _SMALL:
    times = -(-_ENLARGED // side)
    side *= times
    title.append((f'drawn {times} times as large', drawing.SOFT))
  if replaced.any():
    text = f'red: {replaced.sum()} damaged; another is shown, with weight 0'
    title.append((text, _RED))
  columns = math.ceil(math.sqrt(len(images)))
  line = drawing.ContactSheet.LINE
  contacts = drawing.ContactSheet(title, len(images), columns, (side, side + line))
  for i, image in enumerate(images):
    left, upper = contacts.corner(i)
    color = _RED if replaced[i] else None
    contacts.picture((left, upper), image, side, color)
    contacts.text(
      (left + side // 2, upper + side + line // 2 + 2), names[i], side, color or _INK, 'mm'
    )
  contacts.save(path)


def balance(path: str, counts: list[stats.Counts]) -> None:
  """Writes a chart of how many images classes, adjectives and nouns have.

  Args:
    path: of the PNG.
    counts: of training and of evaluation.
  """
  parts = [p for p in stats.PARTS if len(getattr(counts[0], p))]
  heights = [_height(len(counts[0].words(part))) for part in parts]
  style = {'font.size': 9, 'axes.titlesize': 10, 'axes.grid': False}
  with drawing.figure(path, 11, sum(heights), 120, style) as figure:
    axes = figure.subplots(len(parts), 2, squeeze=False, height_ratios=heights)
    for part, row in zip(parts, axes):
      words = [drawing.printable(w) for w in counts[0].words(part)]
      numbers = [getattr(c, part) for c in counts]
      for axis, split, images in zip(row, stats.SPLITS, numbers):
        total = vocabulary.counted(int(images.sum()), 'image')
        names = vocabulary.counted(len(images), stats.PARTS[part])
        axis.set_title(f'{split}: {total} of {names}')
      (_bars if len(words) <= _BARS else _ranks)(row, words, numbers)


def _height(names):
  """The height of a row of panels in inches."""
  return 0.8 + 0.17 * max(names, 4) if names <= _BARS else 3.2


def _bars(row, words, numbers):
  """Every name with its bar, in the order of training for both panels."""
  ranked = np.lexsort([-n for n in reversed(numbers)])
  places = np.arange(len(words))
  for axis, color, images in zip(row, _COLORS, numbers):
    left = _scale(axis, 'x', images)
    images = images[ranked]
    axis.barh(places, np.maximum(images - left, 0), 0.72, left, color=color)
    for place, n in zip(places, images):
      axis.annotate(
        f'{n:,}',
        (max(n, left), place),
        (3, 0),
        textcoords='offset points',
        va='center',
        fontsize=7,
        color=_INK if n else _RED,
      )
    axis.set_ylim(len(words) - 0.4, -0.6)
    axis.set_yticks(places, [''] * len(words))
    axis.tick_params('y', length=0, labelsize=8)
    axis.grid(axis='x')
  names = [drawing.fitted(words[i], _NAME, len) for i in ranked]
  row[0].set_yticks(places, names)


def _ranks(row, words, numbers):
  """Images over ranks, with the names at both ends."""
  names = [drawing.fitted(word, _NAME, len) for word in words]
  for axis, color, images in zip(row, _COLORS, numbers):
    lowest = _scale(axis, 'y', images)
    curve = np.maximum(np.sort(images)[::-1], lowest)
    ranks = np.arange(1, len(images) + 1)
    axis.fill_between(ranks, curve, lowest, step='mid', color=color, lw=0)
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


def _scale(axis, name, numbers):
  """Makes the x or y axis one of counts; returns where it begins."""
  ticks = {'x': axis.xaxis, 'y': axis.yaxis}[name]
  positive = numbers[numbers > 0]
  wide = positive.size and positive.max() > _WIDE_RANGE * positive.min()
  lowest = _LOWEST if wide else 0
  if wide:
    getattr(axis, f'set_{name}scale')('log')
    ticks.set_major_locator(matplotlib.ticker.LogLocator(numticks=6))
    ticks.set_minor_formatter(matplotlib.ticker.NullFormatter())
    ticks.set_major_formatter(lambda value, _: f'{value:,.0f}')
  else:
    drawing.counts(ticks, 6)
  # Room for the number after the longest bar.
  most = max(numbers.max(initial=0), 1)
  limit = most * (most / lowest) ** 0.12 if wide else most * 1.12
  getattr(axis, f'set_{name}lim')(lowest, limit)
  return lowest
