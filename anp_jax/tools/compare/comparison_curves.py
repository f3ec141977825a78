"""The curves of several runs as one figure, and the look of each run."""

import dataclasses
import io
import itertools
import math

from anp_jax.reporting.run_page import curves
from anp_jax.system import drawing
from anp_jax.tools.compare import comparison_tables, runs as runs_lib

# A run is told from the others without its colour too: four kinds of lines,
# and another marker for each four runs.
_DASHES = (), (5, 2), (1, 1.5), (5, 1.5, 1, 1.5)
_MARKERS = {'o': '●', 's': '■', '^': '▲', 'D': '◆', 'v': '▼', 'P': '✚'}
_POINTS, _MARKED = 100, 8  # of a curve of training, and with a marker
_LETTERS = 40  # of a run's name
_LOGARITHMIC = 50  # the largest loss over the smallest, from which on
_UNITS = (3600, 'hours'), (60, 'minutes'), (1, 'seconds')


@dataclasses.dataclass(frozen=True)
class Look:
  """The look of a run's curves.

  Attributes:
    color: colour for matplotlib and CSS.
    dashes: lengths of dashes and gaps in line widths; (): solid.
    marker: marker for matplotlib.
    glyph: marker as a character.
  """

  color: str
  dashes: tuple[float, ...]
  marker: str
  glyph: str

  @property
  def style(self) -> dict:
    """Arguments of a line for matplotlib."""
    linestyle = (0, self.dashes) if self.dashes else '-'
    look = {'color': self.color, 'marker': self.marker, 'linestyle': linestyle}
    return look | {'linewidth': 1.5, 'markersize': 4}


def look(index: int) -> Look:
  """Returns the look of a run; 24 of them differ without their colours."""
  marker = list(_MARKERS)[index // len(_DASHES) % len(_MARKERS)]
  color = drawing.COLOURS[index % len(drawing.COLOURS)]
  return Look(color, _DASHES[index % len(_DASHES)], marker, _MARKERS[marker])


def draw(runs: list[runs_lib.Run]) -> bytes:
  """Draws losses and validation scores over steps, images and time.

  Args:
    runs: runs from `runs.find`.

  Returns:
    A PNG file; b'' if no run has recorded anything.
  """
  panels = _panels(runs)
  if not panels:
    return b''
  # Loading it takes longer than a mistyped path should.
  from matplotlib import lines

  columns = _columns(runs)
  file = io.BytesIO()
  rows = math.ceil(len(runs) / 3)  # of the legend
  height = 2.8 * len(panels) + 0.25 * rows + 0.6
  with drawing.figure(file, 12, height) as figure:
    grid = figure.subplots(len(panels), len(columns), sharex='col', sharey='row', squeeze=False)
    for axes, (title, kind, name, label) in zip(grid, panels):
      axes[0].set_title(title)
      for axis, (over, _, scale) in zip(axes, columns):
        for index, run in enumerate(runs):
          if run.labels.get(name) == label:
            points = _POINTS if kind == 'train' else None
            x, y = curves.curve(name, getattr(run, kind), points, over)
            if x:
              every = math.ceil(len(x) / _MARKED)
              axis.plot([v / scale for v in x], y, markevery=every, **look(index).style)
      _scale(axes, name)
    for axes in grid:
      for axis, (_, label, _) in zip(axes, columns):
        axis.set_xlabel(label)
        axis.tick_params(labelbottom=True)
        axis.set_xlim(left=0)
        drawing.counts(axis.xaxis, 5)
    figure.legend(
      [lines.Line2D([], [], **look(i).style) for i in range(len(runs))],
      _names(runs),
      loc='outside upper left',
      ncols=3,
      handlelength=4,
      fontsize=10,
    )
  return file.getvalue()


def _panels(runs):
  """Title, kind of lines, metric and label of each row of the figure."""
  panels = []
  for name, label in comparison_tables.metrics(runs):
    kinds = (('train', 'training'),) if name == 'loss' else ()
    for kind, what in (*kinds, ('validation', 'validation')):
      if any(name in line for run in runs for line in getattr(run, kind)):
        title = f'{label}, {what}'
        panels.append((title[0].upper() + title[1:], kind, name, label))
  return panels


def _columns(runs):
  """Key, label and unit of each column's horizontal axis."""
  most = max((line.get('trained_seconds', 0) for run in runs for line in run.train), default=0)
  scale, unit = next((u for u in _UNITS if most >= 2 * u[0]), _UNITS[-1])
  return (
    ('step', 'steps', 1),
    ('images', 'images trained on', 1),
    ('trained_seconds', f'{unit} of training, without pauses', scale),
  )


def _names(runs):
  """Names of the runs for the legend; with numbers if they are alike there."""
  names = [drawing.shortened(run.name, _LETTERS) for run in runs]
  if len(set(names)) < len(names):
    names = [f'{i}  {name}' for i, name in enumerate(names, 1)]
  return names


def _scale(axes, name):
  """Sets the vertical axis, which the panels of a row share."""
  if name != 'loss':
    drawing.percent(axes[0].yaxis)
    return
  values = itertools.chain(*(line.get_ydata() for axis in axes for line in axis.lines))
  losses = list(filter(math.isfinite, values))
  if losses and min(losses) > 0 and max(losses) > _LOGARITHMIC * min(losses):
    axes[0].set_yscale('log')
    axes[0].yaxis.set_major_formatter(lambda value, _: f'{value:g}')
