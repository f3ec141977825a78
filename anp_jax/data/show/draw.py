"""Pictures of a data set: sheets of examples, charts of class balance."""

from collections.abc import Callable
import math

import matplotlib.ticker
import numpy as np
from PIL import Image
from PIL import ImageDraw

from anp_jax.data import vocabulary
from anp_jax.data.show import stats
from anp_jax.system import drawing

_COLORS = drawing.BLUE, drawing.ORANGE  # of the splits
_RED, _INK, _GREY = '#cc0000', drawing.INK, '#666666'

# Of a sheet, in pixels.
_MARGIN, _GAP, _FRAME, _LINE = 16, 10, 4, 19
_SMALL, _ENLARGED = 96, 128  # sides below the first are drawn at least so large
_NARROWEST = 640  # that a title fits in

# Of a chart.
_BARS = 60  # names that can be read one below the other
_WIDE_RANGE = 50  # from the smallest to the largest; beyond it the axis is log
_LOWEST = 0.5  # where a log axis begins, so that one image is seen
_NAME = 26  # letters of a name beside an axis


def fitted(text: str, width: float, measure: Callable[[str], float]) -> str:
  """The text, or as much of its two ends as the width has room for.

  Args:
    text: a name.
    width: that it may have.
    measure: the width of a text.

  Returns:
    The text, or one with '…' in the middle, which is at least that.
  """
  result = text
  keep = len(text)
  while measure(result) > width and keep:
    keep -= 1
    result = text[: (keep + 1) // 2] + '…' + text[len(text) - keep // 2 :]
  return result


def sheet(
  path: str,
  images: np.ndarray,
  names: list[str],
  replaced: np.ndarray,
  title: list[str],
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
  side, times = images.shape[1], 1
  title = [(line, _INK) for line in title]
  if side < _SMALL:
    times = -(-_ENLARGED // side)
    title.append((f'drawn {times} times as large', _GREY))
  if replaced.any():
    text = f'red: {replaced.sum()} damaged; another is shown, with weight 0'
    title.append((text, _RED))
  columns = math.ceil(math.sqrt(len(images)))
  side *= times
  width = max(columns * (side + _GAP) - _GAP, _NARROWEST)
  top = _MARGIN + _LINE * len(title) + _GAP
  pitch = side + _LINE + _GAP
  height = top + -(-len(images) // columns) * pitch - _GAP + _MARGIN
  canvas = Image.new('RGB', (width + 2 * _MARGIN, height), 'white')
  draw = ImageDraw.Draw(canvas)
  fonts = (
    drawing.typeface('DejaVuSans-Bold', 16),
    drawing.typeface('DejaVuSans', 12),
  )
  for i, (line, color) in enumerate(title):
    font = fonts[i > 0]
    line = fitted(stats.printable(line), width, font.getlength)
    draw.text((_MARGIN, _MARGIN + _LINE * i), line, color, font)
  for i, image in enumerate(images):
    left = _MARGIN + i % columns * (side + _GAP)
    upper = top + i // columns * pitch
    color = _INK
    if replaced[i]:
      color = _RED
      draw.rectangle(
        (left - _FRAME, upper - _FRAME,
         left + side + _FRAME - 1, upper + side + _FRAME - 1), _RED
      )  # fmt: skip
    picture = Image.fromarray(image).resize(
      (side, side), Image.Resampling.NEAREST
    )
    canvas.paste(picture, (left, upper))
    name = fitted(stats.printable(names[i]), side, fonts[1].getlength)
    draw.text(
      (left + side // 2, upper + side + _LINE // 2 + 2), name, color, fonts[1],
      anchor='mm',
    )  # fmt: skip
  canvas.save(path)


def balance(path: str, counts: list[stats.Counts]) -> None:
  """Writes how many images the classes, adjectives and nouns have.

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
      words = [stats.printable(w) for w in counts[0].words(part)]
      numbers = [getattr(c, part) for c in counts]
      for axis, split, own in zip(row, stats.SPLITS, numbers):
        images = vocabulary.counted(int(own.sum()), 'image')
        names = vocabulary.counted(len(own), stats.PARTS[part])
        axis.set_title(f'{split}: {images} of {names}')
      (_bars if len(words) <= _BARS else _ranks)(row, words, numbers)


def _height(names):
  """Of a row of panels, in inches."""
  return 0.8 + 0.17 * max(names, 4) if names <= _BARS else 3.2


def _bars(row, words, numbers):
  """Every name with its bar, in the order of training for both panels."""
  ranked = np.lexsort([-n for n in reversed(numbers)])
  places = np.arange(len(words))
  for axis, color, own in zip(row, _COLORS, numbers):
    left = _scale(axis, 'x', own)
    own = own[ranked]
    axis.barh(places, np.maximum(own - left, 0), 0.72, left, color=color)
    for place, n in zip(places, own):
      axis.annotate(
        f'{n:,}', (max(n, left), place), (3, 0), textcoords='offset points',
        va='center', fontsize=7, color=_INK if n else _RED,
      )  # fmt: skip
    axis.set_ylim(len(words) - 0.4, -0.6)
    axis.set_yticks(places, [''] * len(words))
    axis.tick_params('y', length=0, labelsize=8)
    axis.grid(axis='x')
  names = [fitted(words[i], _NAME, len) for i in ranked]
  row[0].set_yticks(places, names)


def _ranks(row, words, numbers):
  """Images over ranks, with the names at both ends."""
  names = [fitted(word, _NAME, len) for word in words]
  for axis, color, own in zip(row, _COLORS, numbers):
    lowest = _scale(axis, 'y', own)
    curve = np.maximum(np.sort(own)[::-1], lowest)
    ranks = np.arange(1, len(own) + 1)
    axis.fill_between(ranks, curve, lowest, step='mid', color=color, lw=0)
    smallest, middle, largest = stats.extremes(names, own)
    axis.text(
      0.98, 0.97,
      f'largest: {largest}\nmiddle: {middle}\nsmallest: {smallest}',
      transform=axis.transAxes, ha='right', va='top', linespacing=1.5,
      bbox={'facecolor': 'white', 'edgecolor': 'none', 'alpha': 0.8},
    )  # fmt: skip
    axis.set_xlim(0.5, len(own) + 0.5)
    axis.set_xlabel('rank')
    axis.grid(axis='y')


def _scale(axis, name, numbers):
  """Makes an axis of counts; where it begins."""
  both = {'x': axis.xaxis, 'y': axis.yaxis}[name]
  some = numbers[numbers > 0]
  wide = some.size and some.max() > _WIDE_RANGE * some.min()
  lowest = _LOWEST if wide else 0
  if wide:
    getattr(axis, f'set_{name}scale')('log')
    both.set_major_locator(matplotlib.ticker.LogLocator(numticks=6))
    both.set_minor_formatter(matplotlib.ticker.NullFormatter())
    both.set_major_formatter(lambda value, _: f'{value:,.0f}')
  else:
    drawing.counts(both, 6)
  # Room for the number beside the longest bar.
  most = max(numbers.max(initial=0), 1)
  limit = most * (most / lowest) ** 0.12 if wide else most * 1.12
  getattr(axis, f'set_{name}lim')(lowest, limit)
  return lowest
