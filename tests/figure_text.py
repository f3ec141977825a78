"""The text of figures and of sheets, read back from what is drawn."""

import contextlib
import itertools
from unittest import mock

from matplotlib.backends import backend_agg
import matplotlib.figure
import matplotlib.text
from PIL import Image, ImageDraw

_TOUCH = 1.0  # pixels by which boxes of text may meet: letters have bearings
_APART = 2.0  # pixels that text keeps from a bar that it does not lie in
_MARKUP = ('$', '\\math', 'mathdefault', '\\times')


@contextlib.contextmanager
def matplotlib_figures():
  """Collects the figures that are saved, laid out but not encoded.

  Yields:
    A list of matplotlib.figure.Figure, which grows.
  """
  figures = []

  def save(figure, *_, dpi=100, **__):
    figure.set_dpi(dpi)
    backend_agg.FigureCanvasAgg(figure).draw()
    figures.append(figure)

  with mock.patch.object(matplotlib.figure.Figure, 'savefig', save):
    yield figures


def of_figure(figure) -> list[tuple[str, tuple]]:
  """Visible texts of a figure that was drawn, with their boxes in pixels."""
  ticks, in_view = set(), set()
  for axes in figure.axes:
    for axis in (axes.xaxis, axes.yaxis):
      low, high = sorted(axis.get_view_interval())
      slack = 1e-9 * (high - low)
      for tick in [*axis.get_major_ticks(), *axis.get_minor_ticks()]:
        labels = {tick.label1, tick.label2}
        ticks |= labels
        if low - slack <= tick.get_loc() <= high + slack:
          in_view |= labels
  texts = []
  for text in figure.findobj(matplotlib.text.Text):
    if text in ticks - in_view or not text.get_visible():
      continue
    if text.get_text().strip():
      box = text.get_window_extent(figure.canvas.get_renderer())
      texts.append((text.get_text(), box.extents))
  return texts


def repeated_ticks(figure) -> list[str]:
  """Labels that stand twice on an axis: its ticks are finer than its format."""
  lines = []
  for axes in figure.axes:
    for axis in (axes.xaxis, axes.yaxis):
      low, high = sorted(axis.get_view_interval())
      labels = [
        tick.label1.get_text()
        for tick in axis.get_major_ticks()
        if low <= tick.get_loc() <= high and tick.label1.get_text()
      ]
      if len(set(labels)) < len(labels):
        lines.append(f'repeated: {labels}')
  return lines


@contextlib.contextmanager
def pillow_sheets():
  """Collects what Pillow writes into the sheets that are saved.

  Yields:
    A list of (size of the sheet, texts with their boxes, boxes of the bars that
    are drawn), which grows.
  """
  texts, bars, sheets = {}, {}, []
  draw, save = ImageDraw.ImageDraw.text, Image.Image.save
  rectangle = ImageDraw.ImageDraw.rectangle

  def write(pen, xy, text, fill=None, font=None, anchor=None):
    box = pen.textbbox(xy, text, font, anchor)
    texts.setdefault(id(pen.im), []).append((text, box))
    draw(pen, xy, text, fill, font, anchor)

  def fill(pen, xy, *arguments, **options):
    bars.setdefault(id(pen.im), []).append(xy)
    rectangle(pen, xy, *arguments, **options)

  def keep(image, *arguments, **options):
    key = id(image.im)
    if key in texts:
      sheets.append((image.size, texts.pop(key), bars.pop(key, [])))
    save(image, *arguments, **options)

  with (
    mock.patch.object(ImageDraw.ImageDraw, 'text', write),
    mock.patch.object(ImageDraw.ImageDraw, 'rectangle', fill),
    mock.patch.object(Image.Image, 'save', keep),
  ):
    yield sheets


def faults(size: tuple[float, float], texts: list[tuple[str, tuple]], bars=()) -> list[str]:
  """What a reader would stumble over, a line each.

  Args:
    size: width and height in pixels.
    texts: from `of_figure` or `pillow_sheets`.
    bars: boxes; a text may lie within one, but not half in all that it meets.
  """
  lines = []
  for text, (left, low, right, high) in texts:
    if any(mark in text for mark in _MARKUP):
      lines.append(f'markup: {text!r}')
    if min(left, low) < -_TOUCH or right > size[0] + _TOUCH or (high > size[1] + _TOUCH):
      lines.append(f'cut off: {text!r}')
  for (first, a), (second, b) in itertools.combinations(texts, 2):
    if min(_shared(a, b)) > _TOUCH:
      lines.append(f'overlap: {first!r} and {second!r}')
  for text, box in texts:
    close = [bar for bar in bars if min(_shared(box, bar)) > -_APART]
    if close and not any(bar[0] - _TOUCH <= box[0] and box[2] <= bar[2] + _TOUCH for bar in close):
      lines.append(f'over the edge of a bar: {text!r}')
  return lines


def _shared(a, b):
  """Width and height of what two boxes share; negative: their distance."""
  return min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
