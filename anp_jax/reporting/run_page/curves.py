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

  Accuracy is that of validation; training's where there was no evaluation.

  Args:
    path: path of the PNG.
    train: lines of training, from `run_tables.load`.
    validation: lines of validation, likewise.
  """
  with drawing.figure(path, 11, 7) as figure:
    (loss, accuracy), (rate, speed) = figure.subplots(2, 2, sharex=True)
    loss.set_title('Loss')
    _line(loss, 'loss', train, color=drawing.GREY, label='training')
    _line(loss, 'loss', validation, 'o', color=drawing.BLUE, label='validation')
    accuracy.set_title('Accuracy, ' + ('validation' if validation else 'training'))
    drawing.percent(accuracy.yaxis)
    labels = metric_labels.labels(set().union(*train[-1:], *validation))
    for name, color, marker in _SCORES:
      lines, marker = (validation, marker) if validation else (train, '')
      _line(accuracy, name, lines, marker, color=color, label=labels.get(name))
    if validation:
      label = f'{labels.get("anp_top1")}, training'
      style = {'color': drawing.GREY, 'linewidth': 1, 'zorder': 1}
      _line(accuracy, 'anp_top1', train, label=label, **style)
    for axis, title, name in (
      (rate, 'Learning rate', 'learning_rate'),
      (speed, 'Images/s', 'images_per_second'),
    ):
      axis.set_title(title)
      _line(axis, name, train, color=drawing.BLUE)
      axis.set_xlabel('epoch')
    loss.set_xlim(left=0)  # the axes share it
    for axis in (accuracy, rate, speed):
      axis.set_ylim(0, 1.04 * axis.get_ylim()[1])
    for axis in (loss, accuracy):
      if axis.lines:
        axis.legend()


def curve(
  name: str, lines: list[dict], points: int | None = None, over: str = 'epoch'
) -> tuple[list[float], list[float]]:
  """Returns the coordinates of a metric's curve.

  Args:
    name: name of the metric.
    lines: lines of metrics.jsonl; those without both coordinates are left out.
    points: largest number of points, means of stretches of lines; None: no limit.
    over: name of the horizontal coordinate.
  """
  lines = [r for r in lines if name in r and over in r]
  size = math.ceil(len(lines) / points) if points and lines else 1
  stretches = [lines[i : i + size] for i in range(0, len(lines), size)]
  x, y = ([statistics.fmean(r[key] for r in s) for s in stretches] for key in (over, name))
  return x, y


def _line(axis, name, lines, marker='', **style):
  """Draws one metric; with a marker each value, else a thinned curve."""
  epochs, values = curve(name, lines, None if marker else _POINTS)
  if epochs:
    every = math.ceil(len(epochs) / _MARKERS)
    if len(epochs) == 1:
      marker = marker or 'o'  # a line through one point is nothing
    axis.plot(epochs, values, marker=marker, markevery=every, **style)
