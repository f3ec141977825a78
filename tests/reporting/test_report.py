"""report: its numbers are those of the jsonl, whatever a run left behind."""

import json
import math
import statistics
import subprocess
import sys

import matplotlib.image
import numpy as np
import pytest

from anp_jax.reporting import run_page
from anp_jax.reporting.run_page import run_tables

_CONFIG = "batch_size = 256\ndata.source = 'folder|x'\n"


def _records(steps=60, every=10, evaluations=3, parts=True, seed=0):
  """A made-up run of 20 steps an epoch."""
  random = np.random.default_rng(seed)
  names = ['anp_top1', 'anp_top5']
  names += ['adjective_top1', 'noun_top1'] if parts else []
  records = []
  for step in range(every, steps + 1, every):
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
  """The text, and the page's tables as {first cell: other cells}."""
  _save(workdir, records)
  text = run_page.write(str(workdir), _CONFIG, summary or {})
  page = (workdir / 'report' / 'report.md').read_text()
  rows = [
    [cell.strip() for cell in line.strip('|').split('|')]
    for line in page.splitlines()
    if line.startswith('|')
  ]
  return text, page, {row[0]: row[1:] for row in rows}


@pytest.fixture
def no_figure(monkeypatch):
  """For tests of the numbers alone: drawing takes half a second."""
  monkeypatch.setattr(run_page.curves, 'plot', lambda *_: None)


def test_scores_equal_those_of_the_jsonl(tmp_path, no_figure):
  records = _records(steps=200, evaluations=10)
  text, page, rows = _write(tmp_path / 'run_7', records)
  train = [r for r in records if r['kind'] == 'train']
  validation = [r for r in records if r['kind'] == 'validation']
  losses = [r['loss'] for r in validation]
  at = validation[int(np.argmin(losses))]
  assert rows['loss'] == [
    f'{min(losses):.4g}',
    f'epoch {at["epoch"]:g}, step {at["step"]}',
    f'{losses[-1]:.4g}',
    f'{train[-1]["loss"]:.4g}',
  ]
  for label, name in (
    ('ANP top-1', 'anp_top1'),
    ('ANP top-5', 'anp_top5'),
    ('adjective', 'adjective_top1'),
    ('noun', 'noun_top1'),
  ):
    values = [r[name] for r in validation]
    at = validation[int(np.argmax(values))]
    expected = [
      f'{100 * max(values):.1f}%',
      f'epoch {at["epoch"]:g}, step {at["step"]}',
      f'{100 * values[-1]:.1f}%',
      f'{100 * train[-1][name]:.1f}%',
    ]
    assert rows[label] == expected
    assert all(cell in text for cell in expected)
  assert rows['ANP top-10'][-1] == '-'  # not measured in training
  assert page.startswith('# run_7\n')
  assert f'```\n{_CONFIG}```' in page
  assert '](curves.png)' in page


def test_speed_and_time_equal_those_of_the_jsonl(tmp_path, no_figure):
  records = _records(steps=600)
  summary = {'peak_memory': '1.5 GB', 'images': 12, 'ratio': 1 / 3}
  text, _, rows = _write(tmp_path, records, summary)
  train = [r for r in records if r['kind'] == 'train']
  speed = statistics.median(r['images_per_second'] for r in train)
  wait = statistics.median(r['input_wait'] for r in train)
  assert rows['images/s (median)'] == [f'{speed:.0f}']
  assert rows['input wait (median)'] == [f'{100 * wait:.1f}%']
  assert rows['MFU (median)'] == ['41.2%']
  assert rows['training time'] == ['1:01:30 without pauses']
  assert rows['trained'] == ['epoch 30, step 600']
  assert rows['peak memory'] == ['1.5 GB']
  assert rows['ratio'] == ['0.333333']
  assert '\x1b' not in text


def test_columns_of_the_text_are_aligned(tmp_path, no_figure):
  text, _, _ = _write(tmp_path, _records())
  table = text.split('\n\n')[0].splitlines()
  assert len({len(line) for line in table}) == 1
  names = [line.split('  ')[0] for line in table[1:]]
  assert names == ['loss', 'ANP top-1', 'adjective', 'noun', 'ANP top-5', 'ANP top-10']


def test_the_figure_is_drawn(tmp_path):
  _write(tmp_path, _records(steps=20000))
  image = matplotlib.image.imread(tmp_path / 'report' / 'curves.png')
  assert image.shape[:2] == (910, 1430)
  for color in ('#0072b2', '#d55e00', '#009e73', '#cc79a7', '#8c8c8c'):
    rgb = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    assert (np.abs(image[..., :3] - rgb) < 0.01).all(-1).sum() > 100


def test_the_same_run_gives_the_same_files(tmp_path):
  contents = []
  for _ in range(2):
    _write(tmp_path, _records(), {'b': 1, 'a': 2})
    folder = tmp_path / 'report'
    contents.append({p.name: p.read_bytes() for p in sorted(folder.iterdir())})
  assert contents[0] == contents[1]
  assert list(contents[0]) == ['curves.png', 'index.html', 'report.md', 'run.json']


def test_a_run_without_evaluation(tmp_path):
  records = _records(evaluations=0)
  text, _, rows = _write(tmp_path, records)
  assert rows['ANP top-1'] == [f'{100 * records[-1]["anp_top1"]:.1f}%']
  assert 'validation' not in text


def test_a_plain_class_set(tmp_path):
  text, page, rows = _write(tmp_path, _records(parts=False))
  assert 'class top-1' in rows and 'ANP' not in text + page
  assert 'adjective' not in text + page and 'noun' not in text + page


def test_evaluation_only(tmp_path):
  records = [r for r in _records() if r['kind'] == 'validation']
  _, _, rows = _write(tmp_path, records)
  assert rows['ANP top-1'][2] == f'{100 * records[-1]["anp_top1"]:.1f}%'


def test_a_run_that_recorded_nothing(tmp_path):
  assert 'nothing' in run_page.write(str(tmp_path), _CONFIG, {})
  assert _CONFIG in (tmp_path / 'report' / 'report.md').read_text()
  assert (tmp_path / 'report' / 'curves.png').exists()


def test_a_step_that_was_done_again_counts_once(tmp_path):
  first, again = _records(seed=1), _records(seed=2)
  before = [r for r in first if r['step'] < 40]
  _, _, expected = _write(tmp_path / 'a', before + again[len(before) :])
  # What the first try left behind stands in the way and out of order.
  resumed = first[: len(before) - 1 : -1] + before + again[len(before) :]
  _save(tmp_path / 'b', resumed)
  with open(tmp_path / 'b' / 'metrics.jsonl', 'a') as f:
    f.write('{"kind": "train", "step": 999, "loss"')  # torn
  run_page.write(str(tmp_path / 'b'), _CONFIG, {})
  a, b = (tmp_path / d / 'report' for d in 'ab')
  assert b.joinpath('report.md').read_text()[3:] == (a.joinpath('report.md').read_text()[3:])
  assert (b / 'curves.png').read_bytes() == (a / 'curves.png').read_bytes()
  assert expected['training time'] == ['6:09 without pauses']


@pytest.mark.parametrize('bad', [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_never_the_best(tmp_path, bad):
  records = _records()
  validation = [r for r in records if r['kind'] == 'validation']
  validation[0] |= {'loss': bad, 'anp_top1': bad}
  _, _, rows = _write(tmp_path, records)
  finite = [r['anp_top1'] for r in validation[1:]]
  assert rows['ANP top-1'][0] == f'{100 * max(finite):.1f}%'
  assert rows['loss'][0] == f'{min(r["loss"] for r in validation[1:]):.4g}'


def test_the_first_of_equal_scores_is_the_best(tmp_path, no_figure):
  records = _records()
  for record in records:
    record['anp_top1'] = 0.5
  _, _, rows = _write(tmp_path, records)
  assert rows['ANP top-1'][:2] == ['50.0%', 'epoch 1, step 20']


def test_matplotlib_is_loaded_only_to_write():
  code = (
    'import sys\nfrom anp_jax.reporting import run_page\n'
    'print([m for m in ("matplotlib", "jax", "tensorflow", "torch") '
    'if m in sys.modules])'
  )
  process = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
  assert process.stdout == '[]\n'


def test_the_result_of_a_run_for_programs(tmp_path):
  records = _records()
  train = [r for r in records if r['kind'] == 'train']
  validation = [r for r in records if r['kind'] == 'validation']
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
