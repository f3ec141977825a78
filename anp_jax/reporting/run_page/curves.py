"""The curves of a run as one figure."""

import math
import statistics

from anp_jax.system import drawing
from anp_jax.training import metric_labels

_SCORES = (
  ('anp_top5', drawing.ORANGE, 's'),
  ('noun_top1', drawing.PURPLE, 'D'),
  ('adjective_top1', drawing.GREEN, '^'),
  ('anp_top1', drawing.BLUE, 'o'),
)

# A curve with more points than the figure has room for hides its own course,
# and so do markers that touch.
_POINTS, _MARKERS = 400, 30


def plot(path: str, train: list[dict], validation: list[dict]) -> None:
  """Draws loss, accuracy, learning rate and speed over the epochs.

  Args:
    path: of the PNG.
    train: lines of training, from `run_tables.load`.
    validation: likewise.
  """
  with drawing.figure(path, 11, 7) as figure:
    axes = figure.subplots(2, 2, sharex=True)
    _plot_loss(axes[0, 0], train, validation)
    _plot_accuracy(axes[0, 1], train, validation)
    axes[1, 0].set_title('Learning rate')
    _line(axes[1, 0], 'learning_rate', train, color=drawing.BLUE)
    axes[1, 1].set_title('Images/s')
    _line(axes[1, 1], 'images_per_second', train, color=drawing.BLUE)
    for axis in axes[1]:
      axis.set_xlabel('epoch')
    axes[0, 0].set_xlim(left=0)  # the axes share it
    for axis in axes.flat[1:]:
      axis.set_ylim(0, 1.04 * axis.get_ylim()[1])
    for axis in axes[0]:
      if axis.lines:
        axis.legend()


def curve(
  name: str, lines: list[dict], points: int | None = None, over: str = 'epoch'
) -> tuple[list[float], list[float]]:
  """Returns the coordinates of a metric's curve.

  Args:
    name: of the metric.
    lines: those that lack it, or what it is drawn over, are left out.
    points: thins it to the means of at most so many stretches; None: does not.
    over: what it is drawn over.
  """
  lines = [r for r in lines if name in r and over in r]
  size = math.ceil(len(lines) / points) if points and lines else 1
  stretches = [lines[i : i + size] for i in range(0, len(lines), size)]
  return tuple(
    [statistics.fmean(r[key] for r in stretch) for stretch in stretches] for key in (over, name)
  )


def _plot_loss(axis, train, validation):
  axis.set_title('Loss')
  _line(axis, 'loss', train, color=drawing.GREY, label='training')
  _line(axis, 'loss', validation, 'o', color=drawing.BLUE, label='validation')


def _plot_accuracy(axis, train, validation):
  """Validation scores; training's where there was no evaluation."""
  axis.set_title('Accuracy, ' + ('validation' if validation else 'training'))
  drawing.percent(axis.yaxis)
  labels = metric_labels.labels(set().union(*train[-1:], *validation))
  for name, color, marker in _SCORES:
    label = labels.get(name)
    if validation:
      _line(axis, name, validation, marker, color=color, label=label)
    else:
      _line(axis, name, train, color=color, label=label)
  if validation:
    _line(
      axis,
      'anp_top1',
      train,
      color=drawing.GREY,
      linewidth=1,
      zorder=1,
      label=f'{labels.get("anp_top1")}, training',
    )


def _line(axis, name, lines, marker='', **style):
  """Draws one metric; with a marker each value, else a thinned curve."""
  epochs, values = curve(name, lines, None if marker else _POINTS)
  if epochs:
    every = math.ceil(len(epochs) / _MARKERS)
    if len(epochs) == 1:
      marker = marker or 'o'  # a line through one point is nothing
    axis.plot(epochs, values, marker=marker, markevery=every, **style)
