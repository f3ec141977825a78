"""report: its numbers are those of the jsonl, whatever a run left behind."""

import html
import json
import math
import re
import statistics

import matplotlib.image
import numpy as np
import pytest

from anp_jax import config as config_lib
from anp_jax.reporting import run_page
from anp_jax.reporting.run_page import run_tables
from tests import builders, launching


@pytest.fixture(scope='module', autouse=True)
def quick_compiles():
  """Figures are drawn."""


_CONFIG = "batch_size = 256\ndata.source = 'folder|x'\n"


def _records(steps=60, evaluations=3, parts=True, seed=0):
  """A made-up run of 20 steps an epoch."""
  random = np.random.default_rng(seed)
  names = ['anp_top1', 'anp_top5']
  names += ['adjective_top1', 'noun_top1'] if parts else []
  records = []
  for step in range(10, steps + 1, 10):
    line = {'kind': 'train', 'step': step, 'time': 1e9, 'epoch': step / 20}
    line['loss'] = float(random.uniform(1, 7))
    line |= {n: float(random.uniform()) for n in names}
    line |= {'learning_rate': 0.1, 'grad_norm': 1.0, 'seconds': 61.5}
    line['images_per_second'] = float(random.uniform(2000, 3000))
    line |= {'input_wait': float(random.uniform()), 'mfu': 0.4125}
    records.append(line)
  for step in range(20, 20 * evaluations + 1, 20):
    line = {'kind': 'validation', 'step': step, 'time': 1e9, 'epoch': step / 20}
    line['loss'] = float(random.uniform(1, 7))
    line |= {n: float(random.uniform()) for n in [*names, 'anp_top10']}
    records.append(line)
  return sorted(records, key=lambda r: r['step'])


def _save(workdir, records):
  workdir.mkdir(exist_ok=True)
  text = ''.join(json.dumps(r) + '\n' for r in records)
  (workdir / 'metrics.jsonl').write_text(text)


def _write(workdir, records, summary=None):
  """The text, the page, and the page's tables as {first cell: other cells}."""
  _save(workdir, records)
  text = run_page.write(str(workdir), _CONFIG, summary or {})
  page = (workdir / 'report' / 'index.html').read_text()
  rows = (re.findall('<t[hd]>(.*?)</t[hd]>', row) for row in re.findall('<tr>(.*?)</tr>', page))
  return text, page, {row[0]: row[1:] for row in rows}


def _of_kind(records, kind):
  return [r for r in records if r['kind'] == kind]


def test_scores_equal_those_of_the_jsonl(tmp_path, no_figure):
  records = _records(steps=200, evaluations=10)
  text, page, rows = _write(tmp_path / 'run_7', records)
  train, validation = _of_kind(records, 'train'), _of_kind(records, 'validation')
  table = text.split('\n\n')[0].splitlines()
  assert len({len(line) for line in table}) == 1  # aligned
  labels = {
    'loss': 'loss',
    'ANP top-1': 'anp_top1',
    'adjective': 'adjective_top1',
    'noun': 'noun_top1',
    'ANP top-5': 'anp_top5',
  }
  assert [line.split('  ')[0] for line in table[1:]] == [*labels, 'ANP top-10']
  for label, name in labels.items():
    values = [r[name] for r in validation]
    best = min(values) if name == 'loss' else max(values)
    at = validation[values.index(best)]
    best, *last = (
      f'{v:.4g}' if name == 'loss' else f'{100 * v:.1f}%'
      for v in (best, values[-1], train[-1][name])
    )
    expected = [best, f'epoch {at["epoch"]:g}, step {at["step"]}', *last]
    assert rows[label] == expected
    assert all(cell in text for cell in expected)
  assert rows['ANP top-10'][-1] == '-'  # not measured in training
  assert '<title>run_7</title>' in page
  assert html.escape(_CONFIG, quote=False).replace("'", '&#39;') in page


def test_speed_and_time_equal_those_of_the_jsonl(tmp_path, no_figure):
  records = _records(steps=600)
  summary = {'peak_memory': '1.5 GB', 'images': 12, 'ratio': 1 / 3}
  text, _, rows = _write(tmp_path, records, summary)
  train = _of_kind(records, 'train')
  speed = statistics.median(r['images_per_second'] for r in train)
  wait = statistics.median(r['input_wait'] for r in train)
  assert rows['images/s (median)'] == [f'{speed:.0f}']
  assert rows['input wait (median)'] == [f'{100 * wait:.1f}%']
  assert rows['MFU (median)'] == ['41.2%']
  assert rows['training time'] == ['1 h 01 min without pauses']
  assert rows['trained'] == ['epoch 30, step 600']
  assert rows['peak memory'] == ['1.5 GB']
  assert rows['ratio'] == ['0.333333']
  assert '\x1b' not in text


def test_training_time_has_no_gap_where_a_run_was_resumed(tmp_path):
  """20 steps of 1 s, the last 5 of them timed after the second half's resume."""
  line = {'kind': 'train', 'epoch': 1.0, 'images_per_second': 8.0, 'input_wait': 0.25}
  _save(tmp_path, [line | {'step': 10, 'seconds': 10.0}, line | {'step': 20, 'seconds': 5.0}])
  config = config_lib.flat(builders.config({'batch_size': 8}))
  (tmp_path / 'config.json').write_text(json.dumps(config))
  train, validation = run_tables.load(str(tmp_path))
  assert run_tables.result(train, validation)['seconds'] == 20
  assert dict(run_tables.facts(train, validation))['training time'] == '20.0 s without pauses'
  assert run_tables.durations(str(tmp_path), train) == {'steps': 15, 'waiting for input': 5}


def test_the_figure_is_drawn_and_the_same_run_gives_the_same_files(tmp_path):
  records, contents = _records(steps=6000), []
  for _ in range(2):
    _write(tmp_path, records, {'b': 1, 'a': 2})
    folder = tmp_path / 'report'
    contents.append({p.name: p.read_bytes() for p in sorted(folder.iterdir())})
  assert contents[0] == contents[1]
  assert list(contents[0]) == ['curves.png', 'index.html', 'run.json']
  image = matplotlib.image.imread(tmp_path / 'report' / 'curves.png')
  assert image.shape[:2] == (910, 1430)
  for color in ('#0072b2', '#d55e00', '#009e73', '#cc79a7', '#8c8c8c'):
    rgb = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    assert (np.abs(image[..., :3] - rgb) < 0.01).all(-1).sum() > 100


@pytest.mark.parametrize('kind, evaluations', [('train', 0), ('validation', 3)])
def test_a_run_of_training_or_evaluation_alone(tmp_path, no_figure, kind, evaluations):
  records = _of_kind(_records(evaluations=evaluations), kind)
  text, _, rows = _write(tmp_path, records)
  values = rows['ANP top-1']
  assert values[2 if evaluations else 0] == f'{100 * records[-1]["anp_top1"]:.1f}%'
  assert ('validation' in text) == bool(evaluations)


def test_a_plain_class_set(tmp_path, no_figure):
  text, page, rows = _write(tmp_path, _records(parts=False))
  assert 'class top-1' in rows
  assert not re.search('ANP|adjective|noun', text + page)


def test_a_run_that_recorded_nothing(tmp_path):
  text, page, _ = _write(tmp_path, [])
  assert 'nothing' in text and 'batch_size = 256' in page
  assert (tmp_path / 'report' / 'curves.png').exists()


def test_a_step_that_was_done_again_counts_once(tmp_path, no_figure):
  first, again = _records(seed=1), _records(seed=2)
  before = [r for r in first if r['step'] < 40]
  expected = before + again[len(before) :]
  _save(tmp_path / 'a', expected)
  # What the first try left behind stands in the way and out of order.
  _save(tmp_path / 'b', first[: len(before) - 1 : -1] + expected)
  with open(tmp_path / 'b' / 'metrics.jsonl', 'a') as f:
    f.write('{"kind": "train", "step": 999, "loss"')  # torn
  assert run_tables.load(str(tmp_path / 'b')) == run_tables.load(str(tmp_path / 'a'))


@pytest.mark.parametrize('bad', [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_never_the_best(bad):
  validation = _of_kind(_records(), 'validation')
  for name, best in (('loss', min), ('anp_top1', max)):
    validation[0][name] = bad
    line = run_tables.best_line(name, validation)
    assert line[name] == best(r[name] for r in validation[1:])
  lines = [{'step': step, 'anp_top1': 0.5} for step in (20, 40)]
  assert run_tables.best_line('anp_top1', lines)['step'] == 20  # the first of equal ones


def test_matplotlib_is_loaded_only_to_write():
  code = (
    'import sys\nfrom anp_jax.reporting import run_page\n'
    'print([m for m in ("matplotlib", "jax", "tensorflow", "torch") '
    'if m in sys.modules])'
  )
  done = launching.python('-c', code)
  assert (done.returncode, done.stdout) == (0, '[]\n'), done.stderr


def test_the_result_of_a_run_for_programs(tmp_path):
  records = _records()
  train, validation = _of_kind(records, 'train'), _of_kind(records, 'validation')
  validation[0]['loss'] = math.nan
  validation[-1]['anp_top5'] = math.inf
  _save(tmp_path, records)
  result = run_tables.result(*run_tables.load(str(tmp_path)))
  assert json.loads(json.dumps(result, allow_nan=False)) == result
  assert (result['step'], result['epoch']) == (60, 3.0)
  assert result['best']['loss'] == min(r['loss'] for r in validation[1:])
  top1 = [r['anp_top1'] for r in validation]
  assert result['best']['anp_top1'] == max(top1)
  assert result['last']['anp_top1'] == top1[-1]
  assert result['last']['anp_top5'] is None
  assert result['training']['loss'] == train[-1]['loss']
  assert 'anp_top10' in result['best'] and 'anp_top10' not in result['training']
  assert result['seconds'] == 6 * 61.5
  rates = [r['images_per_second'] for r in train]
  assert result['images_per_second'] == statistics.median(rates)
  assert run_tables.result([], []) == {
    'step': 0,
    'epoch': 0.0,
    'best': {},
    'last': {},
    'training': {},
    'seconds': 0,
    'images_per_second': None,
  }
