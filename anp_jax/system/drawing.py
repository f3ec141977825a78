"""The style of figures: colours, typefaces, and figures without a window system."""

from collections.abc import Callable, Iterable, Iterator, Sequence
import contextlib
import itertools
import os
from typing import IO, TYPE_CHECKING, Any
import warnings

import numpy as np

from anp_jax.config import errors
from anp_jax.system import files

if TYPE_CHECKING:
  from matplotlib.axes import Axes
  from matplotlib.axis import Axis
  from matplotlib.figure import Figure
  from PIL.ImageFont import FreeTypeFont

# Okabe and Ito's colours, told apart with any kind of colour vision.
BLUE, ORANGE, GREEN, PURPLE, GREY = ('#0072b2', '#d55e00', '#009e73', '#cc79a7', '#8c8c8c')
COLOURS = BLUE, ORANGE, GREEN, PURPLE, '#e69f00', '#56b4e9'
INK, FAINT, SOFT = '#222222', '#e4e4e4', '#666666'
_LINES, _MARKERS = ('-', '--', ':', '-.'), 'osD^vP'

# Settings of matplotlib's.
STYLE: dict[Any, Any] = {
  'font.size': 10,
  'axes.titlesize': 11,
  'axes.titlelocation': 'left',
  'axes.titleweight': 'bold',
  'axes.spines.top': False,
  'axes.spines.right': False,
  'axes.edgecolor': '#555555',
  'axes.grid': True,
  'axes.grid.axis': 'y',
  'axes.axisbelow': True,
  'grid.color': FAINT,
  'legend.frameon': False,
  'legend.fontsize': 9,
  'lines.linewidth': 1.8,
  'lines.markersize': 5,
  'axes.xmargin': 0.02,
  'axes.ymargin': 0.08,
  'text.parse_math': False,  # a name may hold dollars
}


@contextlib.contextmanager
def figure(
  file: str | IO[bytes],
  width: float,
  height: float,
  dpi: int = 130,
  style: dict[Any, Any] | None = None,
) -> 'Iterator[Figure]':
  """Yields a figure to draw on, and writes it to `file` at the end.

  Args:
    file: path of a PNG file, or an open file.
    width: width in inches.
    height: height in inches.
    dpi: pixels per inch.
    style: settings that differ from STYLE.
  """
  # Here, because loading it takes longer than a mistyped flag should.
  import matplotlib
  import matplotlib.figure
  import matplotlib.layout_engine

  with matplotlib.rc_context(STYLE | (style or {})), warnings.catch_warnings():
    # A name in a script that the type lacks is drawn as boxes.
    warnings.filterwarnings('ignore', 'Glyph .* missing')
    layout = matplotlib.layout_engine.ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08)
    # Without pyplot: no window system, no state left behind.
    canvas = matplotlib.figure.Figure(figsize=(width, height), layout=layout)
    yield canvas
    with (
      files.atomic_path(file) if isinstance(file, str) else contextlib.nullcontext(file) as draft
    ):
      canvas.savefig(draft, format='png', dpi=dpi, metadata={'Software': None})


def typeface(name: str, size: int) -> 'FreeTypeFont':
  """Returns the typeface of figures for Pillow.

  Args:
    name: name of a font file of matplotlib, such as 'DejaVuSans'.
    size: size in pixels.
  """
  import matplotlib
  from PIL import ImageFont

  folder = os.path.join(matplotlib.get_data_path(), 'fonts', 'ttf')
  return ImageFont.truetype(os.path.join(folder, f'{name}.ttf'), size)


def percent(axis: 'Axis') -> None:
  """Labels the ticks of an axis in percent."""
  axis.set_major_formatter(lambda x, _: f'{100 * x:.3g}%')


def counts(axis: 'Axis', most: int = 7) -> None:
  """Labels the ticks of a linear axis with whole numbers, with thousands separators."""
  import matplotlib.ticker

  axis.set_major_locator(
    matplotlib.ticker.MaxNLocator(most, steps=(1, 2, 5, 10), integer=True, min_n_ticks=1)
  )
  axis.set_major_formatter(lambda x, _: f'{x:,.0f}')


def looks(names: Iterable[str]) -> dict[str, dict[str, Any]]:
  """Returns colour, marker and line style of each name's curve; 24 differ without colours."""
  styles = itertools.product(_LINES, zip(COLOURS, _MARKERS))
  every = ({'color': c, 'marker': m, 'linestyle': line} for line, (c, m) in styles)
  return dict(zip(dict.fromkeys(names), itertools.cycle(every)))


def ideal(axes: 'Axes', sizes: Iterable[float], rate: float = 1.0, label: str = 'ideal') -> None:
  """Draws the line of what as many devices as `sizes` reach if none waits.

  Args:
    axes: panel of rates or speed-ups by size.
    sizes: sizes of its points.
    rate: rate of one device.
    label: name in the legend.
  """
  ends = np.array(sorted(sizes))[[0, -1]]
  axes.plot(ends, rate * ends, '--', color=GREY, label=label, linewidth=1.2)


def label_sizes(axes: 'Axes', sizes: Iterable[float]) -> None:
  """Labels the sizes on the horizontal axis whose labels do not meet, from the largest down."""
  *rest, largest = sorted(set(sizes))
  ticks, room = [largest], 0.1 * (largest - min(rest, default=largest))
  for size in reversed(rest):
    if ticks[-1] - size >= room:
      ticks.append(size)
  axes.set_xticks(ticks)


def fitted(text: str, width: float, measure: Callable[[str], float]) -> str:
  """Returns the text, or the parts of its two ends that fit into a width.

  Args:
    text: name of any length.
    width: largest width.
    measure: function that returns the width of a text.

  Returns:
    The text, or a shorter one with '…' in the middle.
  """
  result = text
  keep = len(text)
  while measure(result) > width and keep:
    keep -= 1
    result = text[: (keep + 1) // 2] + '…' + text[len(text) - keep // 2 :]
  return result


def shortened(text: str, most: int) -> str:
  """Returns a name of at most `most` letters that prints on one line."""
  # Half of what a file name's bytes are where they are no text.
  text = errors.printable(text).encode('utf-8', 'replace').decode()
  return fitted(text, most, len)


class ContactSheet:
  """Pictures in rows and columns below a title, one per cell.

  Attributes:
    plain: PIL.ImageFont.FreeTypeFont of captions.
    pen: PIL.ImageDraw.ImageDraw for everything except pictures.
  """

  MARGIN, GAP, LINE = 16, 10, 19  # pixels: around all, between cells, of a line
  _NARROWEST = 640  # that a title fits in

  def __init__(
    self, title: Sequence[str | tuple[str, str]], count: int, columns: int, cell: tuple[int, int]
  ):
    """Creates a white sheet with its title.

    Args:
      title: lines, or (line, colour) pairs; the first line is bold.
      count: number of cells.
      columns: cells per row.
      cell: width and height of a cell in pixels.
    """
    from PIL import Image, ImageDraw

    self.plain = typeface('DejaVuSans', 12)
    self._columns = columns
    self._pitch = cell[0] + self.GAP, cell[1] + self.GAP
    self._top = self.MARGIN + self.LINE * len(title) + self.GAP
    rows = -(-count // columns)
    width = max(columns * self._pitch[0] - self.GAP, self._NARROWEST)
    height = self._top + rows * self._pitch[1] - self.GAP + self.MARGIN
    size = width + 2 * self.MARGIN, height
    self._canvas = Image.new('RGB', size, 'white')
    self.pen = ImageDraw.Draw(self._canvas)
    bold = typeface('DejaVuSans-Bold', 15)
    for i, line in enumerate(title):
      text, color = (line, INK) if isinstance(line, str) else line
      place = self.MARGIN, self.MARGIN + self.LINE * i
      self.text(place, text, width, color, font=self.plain if i else bold)

  def corner(self, index: int) -> tuple[int, int]:
    """Returns the upper left corner (x, y) of a cell."""
    row, column = divmod(index, self._columns)
    return (self.MARGIN + column * self._pitch[0], self._top + row * self._pitch[1])

  def picture(
    self, place: tuple[int, int], image: np.ndarray, side: int, frame: str | None = None
  ) -> None:
    """Draws an image.

    Args:
      place: upper left corner.
      image: (size, size, 3) uint8; an enlarged image shows its pixels.
      side: side of the drawn image in pixels.
      frame: colour of a frame around the image.
    """
    from PIL import Image

    if frame:
      low, high = (tuple(c + d for c in place) for d in (-4, side + 3))
      self.pen.rectangle((*low, *high), frame)
    methods = Image.Resampling
    method = methods.LANCZOS if side < len(image) else methods.NEAREST
    picture = Image.fromarray(image).resize((side, side), method)
    self._canvas.paste(picture, place)

  def text(
    self,
    place: tuple[int, int],
    text: str,
    width: float,
    color: str = INK,
    anchor: str | None = None,
    font: 'FreeTypeFont | None' = None,
  ) -> None:
    """Writes a line, shortened in its middle to a width.

    Args:
      place: position of the anchor.
      text: line of any characters.
      width: largest width in pixels.
      color: text colour.
      anchor: anchor in Pillow's notation, such as 'mm'; None: upper left corner.
      font: font; None: `plain`.
    """
    font = font or self.plain
    line = fitted(errors.printable(text), width, font.getlength)
    self.pen.text(place, line, color, font, anchor=anchor)

  def save(self, path: str) -> None:
    """Writes the sheet as a PNG."""
    with files.atomic_path(path) as draft:
      self._canvas.save(draft, 'PNG', optimize=True)
