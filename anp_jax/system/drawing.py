"""How figures look: colours, type, and a figure without a window system."""

import contextlib
import os
import warnings

# Okabe and Ito's colours, told apart with any kind of colour vision.
BLUE, ORANGE, GREEN, PURPLE, GREY = (
  '#0072b2', '#d55e00', '#009e73', '#cc79a7', '#8c8c8c',
)  # fmt: skip
COLOURS = BLUE, ORANGE, GREEN, PURPLE, '#e69f00', '#56b4e9'
INK, FAINT = '#222222', '#e4e4e4'

# Settings of matplotlib's.
STYLE = {
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
  path: str, width: float, height: float, dpi: int = 130, style=None
):  # fmt: skip
  """A figure to draw on, written to `path` at the end.

  Args:
    path: of a PNG file.
    width: inches.
    height: inches.
    dpi: pixels an inch.
    style: settings that differ from STYLE.
  """
  # Here, because loading it takes longer than a mistyped flag should.
  import matplotlib
  import matplotlib.figure

  with matplotlib.rc_context(STYLE | (style or {})), warnings.catch_warnings():
    # A name in a script that the type lacks is drawn as boxes.
    warnings.filterwarnings('ignore', 'Glyph .* missing')
    # Without pyplot: no window system, no state left behind.
    made = matplotlib.figure.Figure(
      figsize=(width, height), layout='constrained'
    )
    yield made
    made.get_layout_engine().set(w_pad=0.12, h_pad=0.08)
    made.savefig(path, dpi=dpi, metadata={'Software': None})


def typeface(name: str, size: int):
  """The figures' type, for what Pillow draws.

  Args:
    name: of a file that matplotlib has, such as 'DejaVuSans'.
    size: pixels.

  Returns:
    PIL.ImageFont.FreeTypeFont.
  """
  import matplotlib
  from PIL import ImageFont

  folder = os.path.join(matplotlib.get_data_path(), 'fonts', 'ttf')
  return ImageFont.truetype(os.path.join(folder, f'{name}.ttf'), size)


def percent(axis) -> None:
  """Makes ticks of an axis percents."""
  axis.set_major_formatter(lambda x, _: f'{100 * x:.3g}%')


def counts(axis, most: int = 7) -> None:
  """Makes ticks of a linear axis whole numbers, thousands apart by commas."""
  import matplotlib.ticker

  axis.set_major_locator(
    matplotlib.ticker.MaxNLocator(
      most, steps=(1, 2, 5, 10), integer=True, min_n_ticks=1
    )
  )
  axis.set_major_formatter(lambda x, _: f'{x:,.0f}')


def shortened(text: str, most: int) -> str:
  """A name of at most `most` letters that prints on one line."""
  text = ''.join(
    c if c.isprintable() else c.encode('unicode_escape').decode() for c in text
  )
  # Half of what a file name's bytes are where they are no text.
  text = text.encode('utf-8', 'replace').decode()
  if len(text) <= most:
    return text
  keep = most - 1
  return text[: (keep + 1) // 2] + '…' + text[len(text) - keep // 2 :]
