"""Every figure, read back: no markup, no labels that meet, nothing cut off."""

import matplotlib
import matplotlib.figure
import numpy as np
from PIL import Image
import pytest

from anp_jax.data import vocabulary as vocabulary_lib
from anp_jax.data.show import draw
from anp_jax.predict import sheet
from anp_jax.reporting.analysis import analysis_results as results_lib, figures, pictures
from anp_jax.reporting.run_page import curves
from anp_jax.system import drawing
from anp_jax.tools.study import grid, named_strategies, plots, study_results
from tests import figure_text


@pytest.fixture(scope='module', autouse=True)
def quick_compiles():
  """Figures are drawn."""


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
  """Each picture is a file, though it may be empty."""
  monkeypatch.chdir(tmp_path)


_LONG = 'an extraordinarily long name_of a class that no figure has room for'


def _faults(function, *arguments):
  """What is wrong with the text of each picture that a function writes."""
  lines, count = [], 0
  with figure_text.matplotlib_figures() as drawn, figure_text.pillow_sheets() as sheets:
    function(*arguments)
  for figure in drawn:
    texts = figure_text.of_figure(figure)
    lines += figure_text.faults(figure.bbox.size, texts)
    lines += figure_text.repeated_ticks(figure)
    count += len(texts)
  for sheet_text in sheets:
    lines += figure_text.faults(*sheet_text)
    count += len(sheet_text[1])
  assert count  # else nothing was read back
  return lines


def _part(classes, examples, name='class', long=False):
  random = np.random.default_rng(0)
  names = tuple(f'{_LONG if long else "c"}{i:03}' for i in range(classes))
  labels = random.integers(0, classes, examples)
  labels[:classes] = np.arange(classes)[:examples]
  wrong = random.random(examples) < 0.3
  predicted = np.where(wrong, random.integers(0, classes, examples), labels)
  confidence = random.uniform(0.2, 1, examples)
  plural = vocabulary_lib.plural(name)
  return results_lib.Part(name, plural, names, labels, predicted, confidence)


def test_what_is_wrong_with_a_figure_is_told():
  """The figure has matplotlib's own formatter, whose labels are not read."""
  with matplotlib.rc_context(drawing.STYLE), figure_text.matplotlib_figures() as drawn:
    figure = matplotlib.figure.Figure(figsize=(3, 2))
    axis = figure.subplots()
    axis.set_xscale('log')
    axis.set_xlim(80, 200)
    axis.text(1.2, 0.5, 'far away', transform=axis.transAxes)
    axis.set_yticks((0.1, 0.9), ('1', '1'))
    figure.savefig('unused.png')
  lines = figure_text.faults(drawn[0].bbox.size, figure_text.of_figure(drawn[0]))
  for word in ('markup', 'overlap', 'cut off'):
    assert any(line.startswith(f'{word}: ') for line in lines)
  assert figure_text.repeated_ticks(drawn[0]) == ["repeated: ['1', '1']"]
  box = 'over', (5, 0, 15, 9)
  lines_told = ["over the edge of a bar: 'over'"]
  assert figure_text.faults((99, 99), [box], [(0, 0, 10, 9)]) == lines_told
  assert not figure_text.faults((99, 99), [box], [(0, 0, 20, 9)])


@pytest.mark.parametrize('sizes', [[0, 0, 1], [0, 1, 50, 5000, 1_300_000], [10**6, 1_009_000]])
def test_accuracy_by_class_size(sizes):
  part = _part(len(sizes), 40)
  assert _faults(figures.sizes, 'a.png', part, np.array(sizes)) == []


def test_sizes_that_are_far_apart_are_on_a_log_axis():
  part = _part(4, 40)
  for sizes, scale, labels in (
    ((100, 120, 140, 160), 'linear', ['100', '120', '140', '160']),
    ((0, 3, 10, 90), 'log', ['0', '1', '2', '5', '10', '20', '50', '100']),
    ((1, 10, 500, 2000), 'log', ['1', '10', '100', '1,000']),
  ):
    with figure_text.matplotlib_figures() as drawn:
      figures.sizes('a.png', part, np.array(sizes))
    (axis,) = drawn[0].axes
    assert axis.get_xscale() == scale
    low, high = axis.get_xlim()
    labels_shown = [
      tick.label1.get_text()
      for tick in axis.xaxis.get_major_ticks()
      if low <= tick.get_loc() <= high
    ]
    assert labels_shown == labels
    assert low < max(sizes[0], 0.5) and max(sizes) < high


@pytest.mark.parametrize('classes, examples', [(1, 1), (41, 900)])
def test_confusion(classes, examples):
  part = _part(classes, examples, long=True)
  assert _faults(figures.confusion, 'a.png', part) == []


@pytest.mark.parametrize('parts, examples', [(1, 1), (3, 10**5)])
def test_calibration(parts, examples):
  chosen = [
    _part(1 + i, examples, name) for i, name in enumerate(('class', 'adjective', 'noun')[:parts])
  ]
  assert _faults(figures.calibration, 'a.png', tuple(chosen)) == []


def _lines(kind, steps, **values):
  return [
    {'kind': kind, 'step': s, 'epoch': s / 20}
    | {name: float(value(s)) for name, value in values.items()}
    for s in steps
  ]


@pytest.mark.parametrize(
  'steps, loss, rate',
  [
    ([1], lambda s: 3, lambda s: 1e-5),
    (range(1, 99), lambda s: np.nan, lambda s: 0),
    (range(10**4, 10**6, 10**4), lambda s: 1e9 if s < 10**5 else 1e-3, lambda s: 10.0 ** (s % 7)),
  ],
)
def test_curves(steps, loss, rate):
  train = _lines('train', steps, loss=loss, learning_rate=rate, images_per_second=rate)
  tops = {'anp_top1': 0.5, 'anp_top5': 0.51, 'adjective_top1': 1, 'noun_top1': 0}
  scores = {name: lambda s, value=value: value for name, value in tops.items()}
  validation = _lines('validation', steps, loss=loss, **scores)
  assert _faults(curves.plot, 'a.png', train, validation) == []
  with figure_text.matplotlib_figures() as drawn:
    curves.plot('a.png', train, [])
  # A line without markers through one point would leave no ink.
  (line,) = drawn[0].axes[0].lines
  assert (line.get_marker() == 'o') == (len(steps) == 1)


def test_sheets(tmp_path):
  path, count = str(tmp_path / 'a.png'), 2
  images = np.zeros((count, 8, 8, 3), np.uint8)
  names, title = [_LONG] * count, [_LONG * 4, 'a']
  assert _faults(draw.sheet, path, images, names, np.ones(count, bool), title) == []
  bars = [sheet.Bar(_LONG, p, 'anp') for p in (1.0, 0.999, 0.5, 0.001, 0.0)]
  assert _faults(sheet.write, path, list(images), names, [bars] * count, title) == []


def _results(names, labels, predicted):
  names = tuple(names)
  saved = {
    'label': np.int32(labels),
    'weight': np.ones(len(labels)),
    'logits': np.eye(len(names))[predicted],
  }
  return results_lib.Results(vocabulary_lib.Vocabulary(names, (), ()), saved)


def test_confused_pairs(tmp_path):
  results = _results((_LONG + ' a', _LONG + ' b'), [0] * 90 + [1] * 9, [1] * 99)
  choice = pictures.choose(results)
  images = {i: np.zeros((8, 8, 3), np.uint8) for i in range(99)}
  path = str(tmp_path / 'a.png')
  assert _faults(pictures.pairs, path, results, choice, images) == []
  assert _faults(pictures.sheet, path, results, choice, images) == []


def test_the_sheet_of_examples_has_the_wrong_ones_in_rows_of_their_own(tmp_path):
  """Eight right ones take two rows of six; images are of one colour each."""
  labels = np.arange(11)
  results = _results(map(str, labels), labels, np.where(labels < 8, labels, 0))
  images = {i: np.full((112, 112, 3), (0, 9 * i, 255), np.uint8) for i in range(11)}
  path = str(tmp_path / 'a.png')
  with figure_text.pillow_sheets() as sheets:
    pictures.sheet(path, results, pictures.choose(results), images)
  ((_, texts, _),) = sheets
  captions = [text for text, _ in texts[2:]]  # after the title
  assert captions[:8] == [f'✓ {i}' for i in range(8)]
  # Each wrong one has its name, and the name that was predicted.
  names = dict(zip(captions[8::2], captions[9::2]))
  assert names == {str(i): '✗ predicted 0' for i in (8, 9, 10)}
  pixels = np.asarray(Image.open(path))
  corners = {i: np.argwhere((pixels == image[0, 0]).all(-1))[0] for i, image in images.items()}
  ordered = sorted(corners, key=lambda i: tuple(corners[i]))
  assert ordered[:8] == list(range(8)) and set(ordered[8:]) == {8, 9, 10}
  rows = [corners[i][0] for i in ordered]
  assert len(set(rows[:6])) == len(set(rows[6:8])) == len(set(rows[8:])) == 1
  assert len(set(rows)) == 3


# Those of a study.


def _points(strategies, nodes, devices, rate, **more):
  entries = [named_strategies.NamedStrategy(name, name) for name in strategies]
  cells = grid.expand(entries, nodes, devices, (0, 1))
  steps = np.arange(1, 4)
  runs = {
    c: study_results.Run(
      rate * (c.nodes * c.devices) ** 0.9, steps, 1e6 * steps, steps / rate, 0.3 * steps, **more
    )
    for c in cells
  }
  return study_results.points(cells, runs, {})


@pytest.mark.parametrize(
  'sizes, rate, staleness',
  [
    ((('sync',), (1,), (1,)), 1e-6, {0: 1}),
    (
      (('sync', 'parameter_server'), (1, 64, 256), (1, 2, 4, 8)),
      1e6,
      {i: 1 for i in range(0, 200, 9)},
    ),
  ],
)
def test_figures_of_a_study(sizes, rate, staleness):
  points = _points(*sizes, rate, staleness=staleness)
  for figure in (plots.speed(points), plots.accuracy(points, [0.5]), plots.staleness(points)):
    assert _faults(plots.save, figure, 'a.png') == []


@pytest.mark.parametrize(
  'stations, names, unit',
  [(1, ['as the config'], 1e-3), (8, [f'seed={i}, {_LONG} {_LONG}' for i in range(12)], 1e5)],
)
def test_a_ring(stations, names, unit):
  spans = [
    {'station': s, 'what': what, 'model': m, 'start': unit * start, 'end': unit * (start + 0.4)}
    for s in range(stations)
    for m in range(len(names))
    for what, start in (('train', s + m), ('score', s + m + 0.5))
  ]
  assert _faults(plots.save, plots.gantt(spans, names), 'a.png') == []
