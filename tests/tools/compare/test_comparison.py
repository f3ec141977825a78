"""comparison: numbers of several runs, equal to those of their files."""

import json
import re

import numpy as np
import pytest

from anp_jax import config as config_lib
from anp_jax.reporting import telemetry
from anp_jax.tools.compare import (
  __main__ as compare,
  comparison_curves,
  comparison_page,
  comparison_tables,
  runs as runs_lib,
)
from anp_jax.tools.study import named_strategies
from tests import builders, figure_text, html_pages

_EVIL = '<script>alert("x")</script>'
_PAIRS = {'names': ['red_car', 'red_dog']}


@pytest.fixture
def no_figure(monkeypatch):
  """For tests of the numbers alone: drawing takes half a second."""
  monkeypatch.setattr(comparison_curves, 'draw', lambda runs: b'')


def _records(accuracy, losses=(2.0, 1.0, 1.5), step=10, pairs=False):
  """Three epochs of 5 s each, of 320 images."""
  records = []
  for i, (loss, value) in enumerate(zip(losses, accuracy), 1):
    line = {'step': step * i, 'epoch': float(i), 'time': 1e9, 'loss': loss, 'anp_top1': value}
    if pairs:
      line['noun_top1'] = value
    speed = {'seconds': 5.0, 'images_per_second': 64.0}
    records.append({'kind': 'train', **line, **speed})
    records.append({'kind': 'validation', **line, 'loss': loss + 0.25})
  return records


def _run(workdir, changes=(), records=(), classes=None, facts=()):
  """Writes what a run leaves in its workdir."""
  workdir.mkdir(parents=True)
  config = config_lib.flat(builders.config({'batch_size': 32}))
  config = json.loads(json.dumps(config)) | dict(changes)
  (workdir / 'config.json').write_text(json.dumps(config))
  (workdir / 'labels.json').write_text(json.dumps(classes or {'names': ['a']}))
  lines = ''.join(json.dumps(record) + '\n' for record in records)
  (workdir / 'metrics.jsonl').write_text(lines)
  if facts:
    (workdir / 'report').mkdir()
    telemetry.write_result(str(workdir), {'step': 30})
    page = {'config': '', 'summary': list(facts), 'hardware': []}
    (workdir / 'report' / 'run.json').write_text(json.dumps(page))
  return str(workdir)


def _cells(rows):
  return {row.label: row.cells for row in rows}


def test_results_are_those_of_the_files(tmp_path):
  facts = [('parameters', '1,234'), ('devices', '8 x cpu'), ('scores', 'of x')]
  paths = [
    _run(tmp_path / 'a', (), _records((0.1, 0.3, 0.2)), facts=facts),
    _run(tmp_path / 'b', (), _records((0.1, 0.2, 0.25), (3.0, 2.0, 0.5))),
  ]
  rows = comparison_tables.results(runs_lib.find(paths))
  assert _cells(rows) == {
    'loss, best validation': ('1.25', '0.75'),
    'loss, last validation': ('1.75', '0.75'),
    'loss, last training': ('1.5', '0.5'),
    'class top-1, best validation': ('30.0%', '25.0%'),
    'class top-1, last validation': ('20.0%', '25.0%'),
    'epochs': ('3', '3'),
    'steps': ('30', '30'),
    'finished': ('yes', 'no'),
    'training time': ('15.0 s', '15.0 s'),
    'images/s (median)': ('64', '64'),
    'parameters': ('1,234', '-'),
    'devices': ('8 x cpu', '-'),
  }
  # One that goes on after its end is not finished.
  with open(tmp_path / 'a' / 'metrics.jsonl', 'a') as f:
    for seconds in (4.25, 4.75):
      line = {'kind': 'restart', 'step': 30, 'lost': [], 'processes': 3, 'repeated': 1}
      f.write(json.dumps({**line, 'seconds': seconds}) + '\n')
    f.write('{"kind": "train", "step": 40, "epoch": 4.0, "loss": 1.0}\n')
  cells = _cells(comparison_tables.results(runs_lib.find(paths)))
  assert cells['steps'][0] == '40' and cells['finished'][0] == 'no'
  assert cells['losses and joins'] == ('2, 9 s', '-')
  best = {row.label: sorted(row.best) for row in rows if row.best}
  assert best == {
    'loss, best validation': [1],
    'loss, last validation': [1],
    'loss, last training': [1],
    'class top-1, best validation': [0],
    'class top-1, last validation': [1],
  }


def test_only_keys_that_differ_are_shown(tmp_path):
  paths = [
    _run(tmp_path / 'a', {'optimizer.name': 'adamw', 'optimizer.b1': 0.9}),
    _run(tmp_path / 'b', {'seed': 7, 'optimizer.name': 'adamw', 'optimizer.b1': 0.9}),
    _run(tmp_path / 'c', {'optimizer.name': 'momentum'}),
  ]
  cells = _cells(comparison_tables.differences(runs_lib.find(paths[:2])))
  assert cells == {'seed': ('0', '7')}
  cells = _cells(comparison_tables.differences(runs_lib.find(paths)))
  assert cells['optimizer.name'] == ('adamw', 'adamw', 'momentum')
  assert cells['optimizer.b1'] == ('0.9', '0.9', '-')
  assert 'batch_size' not in cells


def test_scores_of_other_numbers_of_images_are_not_compared(tmp_path, no_figure):
  """The folder has lost images since the first run."""
  paths = []
  for i, count in enumerate((36, 32)):
    records = _records((0.1, 0.2, 0.3 + 0.1 * i))
    for record in records:
      if record['kind'] == 'validation':
        record['examples'] = count
    paths.append(_run(tmp_path / str(i), (), records))
  text = comparison_page.write(paths, str(tmp_path / 'page.html'))
  (row,) = (x for x in text.splitlines() if x.startswith('class top-1, best validation'))
  assert '*' not in row and 'scored on different images' in text


def test_runs_are_found_once_in_order_and_named_apart(tmp_path):
  for name in ('x/base', 'x/other', 'y/base'):
    _run(tmp_path / name)
  (tmp_path / 'x' / 'no run').mkdir()
  (tmp_path / 'link').symlink_to(tmp_path / 'y' / 'base')
  paths = ['y/base', 'x', 'x/other', 'link']
  runs = runs_lib.find([str(tmp_path / path) for path in paths])
  assert [run.name for run in runs] == ['y/base', 'x/base', 'other']


def test_the_members_of_an_ensemble_are_runs(tmp_path):
  _run(tmp_path / 'both', {'ensemble.seeds': '0:2'})
  members = [_run(tmp_path / 'both' / f'seed{i}', {'seed': i}) for i in range(2)]
  assert [run.path for run in runs_lib.find([str(tmp_path / 'both')])] == members
  # What was exported into the folder of a run is none.
  (tmp_path / 'both' / 'seed0' / 'exported').mkdir()
  (tmp_path / 'both' / 'seed0' / 'exported' / 'config.json').write_text('{"architectures": []}')
  assert [run.path for run in runs_lib.find(members)] == members


def test_torn_lines_and_runs_without_any(tmp_path, no_figure):
  path = _run(tmp_path / 'torn', (), _records((0.1, 0.2, 0.3))[:3])
  with open(tmp_path / 'torn' / 'metrics.jsonl', 'a') as f:
    f.write('{"kind": "validation", "step": 20, "loss": 0.')
  new = _run(tmp_path / 'new')
  (tmp_path / 'new' / 'metrics.jsonl').unlink()
  cells = _cells(comparison_tables.results(runs_lib.find([path, new])))
  assert cells['steps'] == ('20', '-')
  assert cells['loss, last validation'] == ('2.25', '-')
  assert cells['loss, last training'] == ('1', '-')
  assert cells['training time'] == ('10.0 s', '-')
  text = comparison_page.write([new], str(tmp_path / 'page.html'))
  assert 'the configs do not differ' in text and '*' not in text


def test_pairs_and_plain_classes_are_not_compared(tmp_path, no_figure):
  paths = [
    _run(tmp_path / 'plain', (), _records((0.1, 0.2, 0.3))),
    _run(tmp_path / 'pairs', (), _records((0.4, 0.5, 0.6), pairs=True), _PAIRS),
  ]
  runs = runs_lib.find(paths)
  rows = comparison_tables.results(runs)
  cells = _cells(rows)
  assert cells['class top-1, best validation'] == ('30.0%', '-')
  assert cells['ANP top-1, best validation'] == ('-', '60.0%')
  assert cells['noun, best validation'] == ('-', '60.0%')
  assert not any(row.best for row in rows)
  text = comparison_page.write(paths, str(tmp_path / 'page.html'))
  assert text.startswith('caution  the runs name different classes')
  assert 'different classes' in (tmp_path / 'page.html').read_text()


@pytest.mark.parametrize('strategy', ['model_ring', named_strategies.BASELINES['independent']])
def test_each_model_of_a_ring_is_a_run(tmp_path, strategy):
  models = ['seed=5; optimizer.learning_rate=0.25', 'batch_size=64']
  ring = {'strategy.name': strategy, 'strategy.models': models}
  path = _run(tmp_path / 'ring', ring)
  for index, size in enumerate((32, 64)):
    folder = tmp_path / 'ring' / 'models' / f'00{index}'
    folder.mkdir(parents=True)
    line = {'kind': 'train', 'step': 10, 'epoch': 1.0, 'loss': float(size)}
    (folder / 'metrics.jsonl').write_text(json.dumps(line))
  runs = runs_lib.find([path])
  assert [run.name for run in runs] == ['ring/000', 'ring/001']
  cells = _cells(comparison_tables.differences(runs))
  assert cells['seed'] == ('5', '0') and cells['batch_size'] == ('32', '64')
  assert cells['optimizer.learning_rate'][0] == '0.25'
  assert set(cells) == {'seed', 'batch_size', 'optimizer.learning_rate'}
  assert [run.train[0]['images'] for run in runs] == [320, 640]
  results = _cells(comparison_tables.results(runs))
  assert results['loss, last training'] == ('32', '64')
  assert 'finished' not in results and 'training time' not in results


def test_curves_stand_at_their_steps_images_and_seconds(tmp_path):
  accuracy = (0.1, 0.2, 0.3)
  paths = [
    _run(tmp_path / 'a', {'batch_size': 32}, _records(accuracy)),
    _run(tmp_path / 'b', {'batch_size': 64}, _records(accuracy, step=5)),
  ]
  with figure_text.matplotlib_figures() as figures:
    comparison_curves.draw(runs_lib.find(paths))
  (figure,) = figures
  grid = np.reshape(figure.axes, (3, 3))
  assert [axes[0].get_title('left') for axes in grid] == [
    'Loss, training',
    'Loss, validation',
    'Class top-1, validation',
  ]
  for axes, values in zip(grid, ((2, 1, 1.5), (2.25, 1.25, 1.75), accuracy)):
    for axis, expected in zip(
      axes,
      (([10, 20, 30], [5, 10, 15]), ([320, 640, 960], [320, 640, 960]), ([5, 10, 15], [5, 10, 15])),
    ):
      for line, x in zip(axis.lines, expected):
        np.testing.assert_allclose(line.get_xdata(), x)
        np.testing.assert_allclose(line.get_ydata(), values)


def test_twelve_runs_are_told_apart_without_colours(tmp_path):
  looks = [comparison_curves.look(index) for index in range(12)]
  assert len({(look.dashes, look.marker) for look in looks}) == 12
  assert len({(look.color, look.dashes) for look in looks}) == 12
  names = [f'a long name of a run {i} <$x_1$> without an end in sight' for i in range(12)]
  losses = (900.0, 1.0, 0.01)
  paths = [_run(tmp_path / name, (), _records((0.1, 0.2, 0.3), losses)) for name in names]
  with figure_text.matplotlib_figures() as figures:
    comparison_curves.draw(runs_lib.find(paths))
  (figure,) = figures
  texts = figure_text.of_figure(figure)
  assert figure_text.faults(figure.bbox.size, texts) == []
  assert figure_text.repeated_ticks(figure) == []
  (legend,) = figure.legends
  assert len({text.get_text() for text in legend.get_texts()}) == 12
  assert [line.get_color() for line in legend.get_lines()] == [look.color for look in looks]


def test_the_page_is_one_file_in_which_names_are_texts(tmp_path):
  name = _EVIL.replace('/', '|')
  paths = [
    _run(
      tmp_path / name, {'init.from': _EVIL}, _records((0.1, 0.2, 0.3)), facts=[('network', _EVIL)]
    ),
    _run(tmp_path / 'plain', (), _records((0.2, 0.3, 0.4))),
  ]
  output = tmp_path / 'page.html'
  comparison_page.write(paths, str(output))
  page = html_pages.parsed(output)
  text = ''.join(page.text)
  assert name in text and text.count(_EVIL) == 2  # a key's value, a network
  assert '0.4*' not in text and '40.0%*' in text
  assert [tag for tag, _ in page.tags].count('img') == 1


def test_the_command_prints_what_differs_and_what_is_best(tmp_path, capsys, no_figure):
  paths = [
    _run(tmp_path / 'a', {'seed': 1}, _records((0.1, 0.2, 0.3))),
    _run(tmp_path / 'b', {'seed': 2}, _records((0.1, 0.2, 0.5))),
  ]
  output = str(tmp_path / 'page.html')
  assert compare.main(['', *paths, f'--output={output}']) == 0
  lines = capsys.readouterr().out.splitlines()
  assert lines[0].split() == ['a', 'b']
  assert lines[1].split() == ['seed', '1', '2']
  assert any(re.search(r'^class top-1, best .* 30.0% +50.0%\*$', line) for line in lines)
  assert lines[-1] == f'comparison: {output}'
  assert '<html' in (tmp_path / 'page.html').read_text()


def test_a_wide_table_has_numbers_for_names(tmp_path, no_figure):
  paths = [_run(tmp_path / f'{"long" * 8}{i}', {'seed': i}) for i in range(4)]
  text = comparison_page.write(paths, str(tmp_path / 'page.html'))
  lines = text.splitlines()
  assert lines[:2] == [f'{i + 1}  {"long" * 8}{i}' for i in range(2)]
  assert lines[5].split() == ['1', '2', '3', '4']
  assert max(map(len, lines)) < 100


@pytest.mark.parametrize(
  'arguments, words',
  [
    (['RUNS/basse'], "is no folder: .*; did you mean 'base'"),
    (['RUNS/empty'], "'RUNS/empty' is no run, and no folder that holds runs"),
    ([], 'no run is given'),
    (['RUNS/base', '--outptu=x'], "did you mean '--output'"),
    (['RUNS/base', '--output=RUNS'], 'a folder, expected a file to write'),
    (['RUNS/bad'], 'cannot read RUNS/bad/config.json'),
  ],
)
def test_bad_input_is_one_line(tmp_path, capsys, arguments, words):
  _run(tmp_path / 'base')
  (tmp_path / 'empty').mkdir()
  builders.write_tree(tmp_path / 'bad', {'config.json': '{"seed": '})
  arguments = [a.replace('RUNS', str(tmp_path)) for a in arguments]
  assert compare.main(['', *arguments]) == 2
  text = builders.error_line(capsys).replace(str(tmp_path), 'RUNS')
  assert re.search(words, text), text


@pytest.mark.parametrize(
  'change, compared',
  [
    ({'data.source': 'arrays'}, set()),
    ({'data.path': '/other'}, set()),
    ({'data.path': '/photos/../photos/'}, {'speed', 'score', 'loss'}),
    ({'data.lists': 'other.txt'}, set()),
    ({'data.dir': '/other'}, set()),
    ({'data.train_split': 'other'}, {'score'}),
    ({'data.held_out': ['a']}, {'score'}),
    ({'data.imbalance': 10}, {'score'}),
    ({'data.eval_split': 'other'}, {'speed', 'loss'}),
    ({'label_smoothing': 0.1}, {'speed', 'score'}),
    ({'model.head': 'factored'}, {'speed', 'score'}),
    ({'data.mixup': 0.2}, {'speed', 'score'}),
    ({'data.cutmix': 1}, {'speed', 'score'}),
    ({'data.balance': 'weights'}, {'speed', 'score'}),
    ({'seed': 7}, {'speed', 'score', 'loss'}),
  ],
)
def test_runs_of_other_data_are_not_compared(tmp_path, no_figure, change, compared):
  paths = []
  for i in range(2):
    records = _records((0.1, 0.2, 0.3 + 0.1 * i), (2.0, 1.0, 1.5 - 0.1 * i))
    for record in records:
      if 'images_per_second' in record:
        record['images_per_second'] *= 1 + i
    changes = {'data.source': 'folder', 'data.path': '/photos', 'seed': i}
    if i:
      changes |= change
    paths.append(_run(tmp_path / str(i), changes, records))
  page = tmp_path / 'page.html'
  text = comparison_page.write(paths, str(page))
  labels = {
    'speed': 'images/s (median)',
    'score': 'class top-1, best validation',
    'loss': 'loss, last training',
  }
  rows = {
    what: next(x for x in text.splitlines() if x.startswith(label))
    for what, label in labels.items()
  }
  assert compared == {what for what, row in rows.items() if '*' in row}
  assert ('score' in compared) != ('scored on different images' in text)
  note = '† the runs were trained on different images'
  assert ('speed' in compared) != ('†' in rows['speed'])
  assert ('speed' in compared) != (note in text) and (note in text) == (note in page.read_text())
