"""Figures of an evaluation: confusion, calibration, class sizes."""

from typing import Any

import numpy as np

from anp_jax.reporting.analysis import analysis_results as results_lib
from anp_jax.system import drawing

MOST = 40  # names of a matrix that can be read
_NUMBERED = 16  # names of one in which numbers can be read
_NAME = 24  # letters of a name next to an axis
_FAR = 5  # from the smallest class to the largest; beyond it the axis is log


def confusion(path: str, part: results_lib.Part) -> None:
  """Draws shares of true names (rows) by predicted name (columns).

  Rows add up to 100 % with what is not shown. Of more than MOST names those
  with the most wrong examples are shown, and names that are confused with each
  other stand side by side.

  Args:
    path: path of the PNG.
    part: answers, with at least one example.
  """
  chosen = shown(part)
  counts = part.matrix(chosen)
  totals = part.counts[chosen][:, None]
  shares = counts / np.maximum(totals, 1)
  k = len(chosen)
  names = [drawing.shortened(part.names[i], _NAME) for i in chosen]
  side = 0.24 * k if k > _NUMBERED else 0.4 * k
  longest = 0.075 * max(map(len, names))
  with drawing.figure(
    path, max(side, 3) + longest + 1.6, max(side, 3) + longest + 0.9, 110
  ) as figure:
    axis = figure.subplots()
    title = f'{part.plural.capitalize()}: true and predicted'
    if k < len(part.names):
      title += (
        f'\nthe {k} of {len(part.names)} with the most errors, those that are confused side by side'
      )
    axis.set_title(title)
    drawn = axis.imshow(shares, 'Blues', vmin=0, vmax=1)
    places = np.arange(k)
    small: dict[str, Any] = {'fontsize': 8 if k > _NUMBERED else 9}
    axis.set_xticks(places, names, rotation=90, **small)
    axis.set_yticks(places, names, **small)
    axis.tick_params(length=0)
    axis.grid(False)
    axis.set_xlabel('predicted')
    axis.set_ylabel('true')
    if k <= _NUMBERED:
      for row, column in np.argwhere(counts > 0):
        share = shares[row, column]
        axis.text(
          column,
          row,
          f'{100 * share:.0f}',
          ha='center',
          va='center',
          fontsize=8,
          color='white' if share > 0.55 else drawing.INK,
        )
    bar = figure.colorbar(drawn, shrink=0.6, aspect=30)
    drawing.percent(bar.ax.yaxis)
    bar.set_label(f"share of the {part.name}'s examples")
    bar.outline.set_visible(False)


def shown(part: results_lib.Part) -> np.ndarray:
  """Returns the names of a matrix in order, (k,) int64.

  At most MOST names with examples are in their own order; of more, those with
  the most errors, as true or predicted name, each next to one that it is
  confused with.
  """
  everything = np.flatnonzero(part.counts + np.bincount(part.predicted, minlength=len(part.names)))
  if len(everything) <= MOST:
    return everything
  errors = np.zeros(len(part.names), np.int64)
  wrong = ~part.hits
  np.add.at(errors, part.labels[wrong], 1)
  np.add.at(errors, part.predicted[wrong], 1)
  worst = everything[np.argsort(-errors[everything], kind='stable')][:MOST]
  return worst[_chain(part.matrix(worst))]


def _chain(counts):
  """Returns an order in which each follows the one it is most confused with."""
  links = (counts + counts.T).astype(float)
  np.fill_diagonal(links, -1)
  order, left = [0], set(range(1, len(links)))
  while left:
    # Ties go to the one with the most errors, which comes first.
    following = max(sorted(left), key=lambda i: links[order[-1], i])
    order.append(following)
    left.remove(following)
  return np.array(order)


def calibration(path: str, parts: tuple[results_lib.Part, ...]) -> None:
  """Draws accuracy over confidence, with the number of examples."""
  count = len(parts)
  with drawing.figure(path, 4.3 * count, 5.2) as figure:
    axes = figure.subplots(2, count, squeeze=False, sharex=True, height_ratios=(3.2, 1))
    for column, part in zip(axes.T, parts):
      _draw_calibration(column[0], column[1], part)
    axes[0, 0].set_ylabel('accuracy')
    axes[1, 0].set_ylabel('examples')
    # Within a panel it would lie over the bars.
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc='outside lower center', ncols=2)


def _draw_calibration(axis, below, part):
  bars = part.calibration
  bins = len(bars.counts)
  places, width = (np.arange(bins) + 0.5) / bins, 0.92 / bins
  axis.set_title(f'{part.plural.capitalize()}: ECE {100 * bars.error:.1f}%')
  axis.bar(places, np.nan_to_num(bars.accuracies), width, color=drawing.BLUE, label='accuracy')
  axis.plot((0, 1), (0, 1), color=drawing.GREY, linewidth=1, linestyle='--')
  filled = bars.counts > 0
  axis.plot(
    places[filled],
    bars.confidences[filled],
    'o',
    color=drawing.ORANGE,
    markersize=4,
    label='mean confidence',
  )
  axis.set_xlim(0, 1)
  axis.set_ylim(0, 1.02)
  below.bar(places, bars.counts, width, color=drawing.GREY)
  below.set_xlabel('confidence')
  for each in (axis.xaxis, axis.yaxis, below.xaxis):
    drawing.percent(each)
  drawing.counts(below.yaxis, 4)


def sizes(path: str, part: results_lib.Part, training: np.ndarray) -> None:
  """Draws the accuracy of classes over the images they were trained on.

  Args:
    path: path of the PNG.
    part: answers about the classes.
    training: (classes,) int, training images of each class, of more than one size.
  """
  has_examples = part.counts > 0
  # 0 has no place on a log axis: half an image stands for it.
  images, recalls = np.maximum(training[has_examples], 0.5), part.recalls[has_examples]
  with drawing.figure(path, 7.5, 4.2) as figure:
    axis = figure.subplots()
    axis.set_title('Accuracy by size of the class')
    drawing.percent(axis.yaxis)
    axis.plot(
      images, recalls, 'o', color=drawing.BLUE, alpha=0.5, label='a class', markeredgewidth=0
    )
    axis.plot(
      *_means(images, recalls), 's-', color=drawing.ORANGE, label='mean of the classes of like size'
    )
    _size_axis(axis, images)
    axis.set_xlabel('training images of the class')
    axis.legend()
    axis.set_ylabel('accuracy')
    axis.set_ylim(-0.03, 1.03)


def _size_axis(axis, sizes):
  """Scales an axis of sizes: logarithmic where they are far apart."""
  low, high = sizes.min(), sizes.max()
  if low >= 1 and high < _FAR * low:
    drawing.counts(axis.xaxis, 6)
    return
  axis.set_xscale('log')
  # Their labels are markup, which STYLE leaves as it is for names with dollars.
  axis.minorticks_off()
  powers = 10 ** np.arange(np.ceil(np.log10(high)) + 1)
  # Between two powers there may be a single tick or none.
  ticks = powers if high > 1000 * low else np.outer(powers, (1, 2, 5)).ravel()
  ticks = [0.5, *ticks] if low < 1 else ticks
  axis.set_xticks(ticks, [f'{int(v):,}' for v in ticks])
  axis.set_xlim(0.8 * low, 1.25 * high)


def _means(sizes, recalls):
  """Returns mean size (geometric) and mean recall of classes between powers of 2."""
  octave = np.floor(np.log2(sizes)).astype(int)
  groups = [octave == value for value in np.unique(octave)]
  return (
    [np.exp(np.log(sizes[group]).mean()) for group in groups],
    [recalls[group].mean() for group in groups],
  )
