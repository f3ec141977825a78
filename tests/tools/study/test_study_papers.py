"""The study of papers: published figures, formulas, pages, measurements."""

import json
import os
import re

import pytest

from anp_jax.tools.plan import check, fit
from anp_jax.tools.study import __main__ as study_main
from anp_jax.tools.study.papers import (
  lab as lab_lib,
  others,
  papers_page,
  published_figures,
  ring2015,
  uneven2017,
)

# Read in the papers, their authors' code (c), or derived (d).
_PUBLISHED = {
  'anp2017': {
    ('speed_up', 16): (10.3, 'p'),
    ('hours', 1): (106, 'p'),
    ('hours', 16): (16, 'p'),
    ('hours_sync', 16): (12, 'p'),
    ('efficiency', 16): (0.64, 'd'),
    ('speed_up_to_result_sync', 16): (8.8, 'd'),
    ('speed_up_to_result_mixed', 16): (6.6, 'd'),
    ('gpus_a_node', 0): (4, 'c'),
    ('pairs', 0): (1200, 'c'),
    ('nouns', 0): (617, 'c'),
    ('adjectives', 0): (350, 'c'),
    ('training_images', 0): (943017, 'c'),
    ('validation_images', 0): (236347, 'c'),
    ('parameters', 0): (25.97, 'd'),
    ('gradient_megabytes', 0): (103.9, 'd'),
    ('pixels', 0): (224, 'c'),
    ('shorter_side_least', 0): (256, 'c'),
    ('shorter_side_most', 0): (512, 'c'),
    ('batch_accelerator', 1): (32, 'c'),
    ('batch_node', 4): (128, 'c'),
    ('batch_all', 16): (2048, 'c'),
    ('learning_rate', 0): (0.1, 'c'),
    ('learning_rate_factor', 0): (0.9, 'c'),
    ('learning_rate_epochs', 0): (10, 'c'),
    ('rmsprop_decay', 0): (0.9, 'c'),
    ('momentum', 0): (0.9, 'c'),
    ('rmsprop_epsilon', 0): (1.0, 'c'),
    ('weight_decay', 0): (1e-4, 'c'),
    ('clip_value', 0): (2, 'c'),
    ('averaging_decay', 0): (0.9999, 'c'),
    ('musa2017_pairs', 0): (553, 'p'),
    ('musa2017_adjectives', 0): (117, 'p'),
    ('musa2017_nouns', 0): (167, 'p'),
    ('musa2017_training_images', 0): (307185, 'p'),
    ('musa2017_test_images', 0): (77073, 'p'),
    ('musa2017_resnet50_top1', 0): (23.4, 'p'),
    ('musa2017_resnet50_top5', 0): (48.2, 'p'),
    ('musa2017_adjectives_top1', 0): (27.7, 'p'),
    ('musa2017_adjectives_top5', 0): (57.0, 'p'),
    ('musa2017_nouns_top1', 0): (41.5, 'p'),
    ('musa2017_nouns_top5', 0): (69.2, 'p'),
    ('musa2017_interpretable_top1', 0): (20.7, 'p'),
    ('musa2017_interpretable_top5', 0): (43.3, 'p'),
  },
  'uneven2017': {
    ('speed_up_cpus', 4): (3.28, 'p'),
    ('speed_up_gpus', 3): (2.45, 'p'),
    ('convolution_share_least', 0): (60, 'p'),
    ('convolution_share_most', 0): (90, 'p'),
    ('batch_least', 0): (64, '?'),
    ('batch_most', 0): (1024, '?'),
  },
  'invariant2016': {
    **{
      ('speed_up_mnist', n): (s, 'p')
      for n, s in ((2, 1.84), (4, 3.40), (8, 5.96), (12, 6.63), (16, 8.18))
    },
    **{
      ('speed_up_cifar10', n): (s, 'p')
      for n, s in ((2, 1.69), (4, 3.09), (8, 5.59), (12, 7.43), (16, 8.83))
    },
  },
  'ring2015': {},
  'others': {
    ('poseidon_speed_up', 16): (15.5, 'p'),
    ('poseidon_gigabits', 0): (10, 'p'),
    ('poseidon_inception_v3', 32): (31.5, 'p'),
    ('mimatrix_synchronisations', 0): (2, 'p'),
  },
}
_PRINTS = 'import pathlib, sys; pathlib.Path(sys.argv[1]).open("a").write("x")'


@pytest.fixture
def priors_only(monkeypatch):
  """The planner's fits take seconds, and have tests of their own."""
  monkeypatch.setattr(fit, 'cases', lambda rows, workloads: [])
  monkeypatch.setattr(check, 'sheet_error', lambda rows: 0.1)


def test_published_figures_are_those_of_the_papers():
  facts = published_figures.read()
  assert list(facts) == list(_PUBLISHED)
  for paper, expected in _PUBLISHED.items():
    numbers = {
      key: (fact.value, fact.mark) for key, fact in facts[paper].items() if fact.value is not None
    }
    assert numbers == expected


def test_published_statements_in_words():
  facts = published_figures.read()
  assert str(facts['ring2015']['hours_saved']) == 'up to dozens of hours (p)'
  slots = facts['ring2015']['slots']
  assert (slots.text, slots.mark) == ('max(M, N) E + min(M, N) - 1', 'd')
  assert str(facts['uneven2017']['kernels_largest']) == '500:1500 (p)'
  assert facts['uneven2017']['kernels_smaller'].mark == '?'
  assert str(facts['anp2017']['speed_up', 16]) == '10.3x (p)'
  assert str(facts['anp2017']['hours', 1]) == '106 h (p)'


def test_formulas_give_their_closed_forms():
  # 1 / (0.1 + 0.9 / 4), and its inverse.
  assert uneven2017.ideal(0.9, 4) == pytest.approx(3.0769, rel=1e-4)
  assert uneven2017.implied_share(3.28, 4) == pytest.approx(0.92683, rel=1e-4)
  assert uneven2017.implied_share(2.45, 3) == pytest.approx(0.88776, rel=1e-4)
  # 64 x 15 x 8,192 numbers over 2 x 4,096^2 x 30 / 16.
  assert others.factors(4096, 4096, 32, 16) == pytest.approx(0.125)


def test_hours_saved_follow_from_what_is_sent():
  # 110 GB are a million images: 90 epochs of 4 slots, in each a part
  # of 27.5 GB takes 220 s and a state of 205 MB 1.64 s; the ring has 3 slots
  # more, of 2,500 s and a hand-over. Both read the set once, in 880 s, which a
  # ring hides.
  saved = ring2015.hours_saved(110e9, 125e6, 0.01)
  parts = 880 + 360 * (2500 + 220)
  ring = 363 * (2500 + 1.64)
  assert saved['parts'] == pytest.approx((parts - ring) / 3600)
  # Four stations read the set in 3,520 s an epoch, in which they compute.
  assert saved['disk'] == pytest.approx((90 * 10_000 - ring) / 3600)


def test_ratio_is_of_what_was_measured_before_what_is_predicted():
  fact = published_figures.Fact('anp2017', 'speed_up', 16, '10', 'x', 'p', '')
  assert papers_page.Row('a', fact, 5.0, 20.0).ratio == 0.5
  assert papers_page.Row('a', fact, None, 20.0).ratio == 2
  assert papers_page.Row('a', fact, 'text', 20.0).ratio is None
  assert papers_page.Row('a', None, 5.0).ratio is None
  row = papers_page.Row('a', fact, None, 20.0, why_not='not run, because')
  assert row.cells() == (
    'a',
    '10x (p)',
    'not run, because',
    '20x (planner)',
    '2.00 (predicted)',
    '-',
  )


def test_a_measurement_is_made_once(tmp_path):
  count = tmp_path / 'count'
  command = ['-c', f'{_PRINTS}; print("text"); print(\'{{"x": 2}}\')', str(count)]
  for _ in range(2):
    lab = lab_lib.Lab(str(tmp_path / 'study'))
    result = lab.measure('one', command)
    assert (result.get('x'), result.why_not) == (2, '')
    assert result.get('y') is result.get('x', 'y') is None
    assert len(lab.take_commands()) == 1 and lab.take_commands() == []
  assert count.read_text() == 'x'
  # Another command of the same name is another measurement.
  lab.measure('one', [*command, 'more'])
  assert count.read_text() == 'xx'


def test_what_failed_is_named_and_tried_again(tmp_path):
  for expected in (1, 0):
    lab = lab_lib.Lab(str(tmp_path))
    path = tmp_path / 'there'
    code = 'import pathlib, sys; assert pathlib.Path(sys.argv[1]).exists(); '
    result = lab.measure('one', ['-c', code + "print('{}')", str(path)])
    assert len(lab.failures) == expected
    assert bool(result.why_not) == bool(expected)
    path.touch()
  log = (tmp_path / 'measured' / 'one.log').read_text()
  assert log.strip() == '{}'


def test_what_a_failed_command_printed_is_no_result(tmp_path):
  lab = lab_lib.Lab(str(tmp_path))
  result = lab.measure('one', ['-c', "print('{}'); raise SystemExit(1)"])
  assert 'status 1' in result.why_not and lab.failures
  assert not (tmp_path / 'measured' / 'one.json').exists()


def test_cells_of_an_earlier_command_are_no_result(tmp_path):
  (tmp_path / 'runs' / 'one').mkdir(parents=True)
  (tmp_path / 'runs' / 'one' / 'cells.csv').write_text('name\na\n')
  lab = lab_lib.Lab(str(tmp_path))
  result = lab.measure('one', ['-c', 'pass'], lab_lib.cells)
  assert result.why_not and lab.failures


def test_predict_only_runs_nothing(tmp_path):
  lab = lab_lib.Lab(str(tmp_path), predict_only=True)
  result = lab.measure('one', ['-c', 'print("{}")'])
  assert result.why_not == 'not run, because of --predict_only'
  assert result.get('x') is None and not lab.failures
  assert os.listdir(tmp_path) == []


def test_a_benchmark_needs_the_checkout(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  lab = lab_lib.Lab(str(tmp_path))
  result = lab.measure('one', ['-m', 'scripts.bench.scaling', '--x'])
  assert result.why_not == (
    'not run, because scripts/bench is not here: start the study in the checkout of anp_jax'
  )
  assert not lab.failures


@pytest.mark.parametrize(
  'arguments, line',
  (
    (['anp2016'], "papers 'anp2016': expected one of anp2017, "),
    (['ring2015', '--page=/nowhere/x.md'], "--page='/nowhere/x.md'"),
    (['ring2015', '--predict'], "unknown argument '--predict'"),
    ([], 'name'),
  ),
)
def test_bad_input_is_one_line(arguments, line, capsys, tmp_path):
  flags = [*arguments, f'--workdir={tmp_path}']
  assert study_main.main(['papers', *flags]) == 2
  error = capsys.readouterr().err
  assert error.count('\n') == 1 and line in error


def _page(tmp_path, capsys, name):
  flags = [name, '--predict_only', f'--workdir={tmp_path}']
  assert study_main.main(['papers', *flags]) == 0
  ratios = json.loads(capsys.readouterr().out.splitlines()[-1])
  return (tmp_path / 'papers.md').read_text(), ratios


def _check_images(folder, text):
  images = re.findall(r'!\[[^]]*\]\(([^)]*)\)', text)
  assert images
  for image in images:
    size = (folder / image).stat().st_size
    assert 10_000 < size < 200_000  # something is drawn; small enough for docs


def test_page_of_predictions(tmp_path, capsys, monkeypatch):
  # To count ResNet-50's work takes seconds.
  monkeypatch.setattr(ring2015, '_image_seconds', lambda lab: 0.02)
  text, ratios = _page(tmp_path, capsys, 'ring2015')
  assert 'M = 4, N = 2, E = 3' in text and '| 13 slots (d) |' in text
  assert 'not run, because of --predict\\_only' not in text  # nothing escaped
  assert text.count('not run, because of --predict_only') == 9
  assert set(ratios['ring2015'].values()) == {1.0}
  _check_images(tmp_path, text)


def test_planned_speed_ups_stand_in_the_page(tmp_path, capsys, priors_only):
  text, ratios = _page(tmp_path, capsys, 'invariant2016')
  rows = [line for line in text.splitlines() if line.startswith('| MNIST')]
  assert len(rows) == 6 and '6.63x (p)' in rows[4]
  planned = float(re.search(r'([\d.]+)x \(planner\)', rows[4])[1])
  name = 'MNIST, LeNet: speed-up, 12 threads'
  # The text has three digits.
  assert ratios['invariant2016'][name] == pytest.approx(planned / 6.63, rel=0.01)
  assert 1 < planned < 12
  _check_images(tmp_path, text)


@pytest.mark.slow
def test_all_papers_are_on_one_page(tmp_path, capsys, priors_only):
  text, ratios = _page(tmp_path, capsys, 'all')
  assert [f'## {name}' in text for name in _PUBLISHED] == [True] * 5
  assert list(ratios) == list(_PUBLISHED)
  _check_images(tmp_path, text)
  # Strong evidence of units: no speed-up exceeds its devices.
  speed_ups = re.findall(
    r'(\d+) nodes: [^|]*\|[^|]*\|[^|]*\| '
    r'([\d.]+)x \(planner',
    text,
  )
  assert len(speed_ups) >= 8
  for size, planned in speed_ups:
    assert 0 < float(planned) <= int(size)
