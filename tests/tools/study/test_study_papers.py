"""The study of papers: published figures, formulas, pages, measurements."""

import dataclasses
import json
import os
import pathlib
import re
import shlex

import numpy as np
import pytest

from anp_jax.config import command_line
from anp_jax.data import sources
from anp_jax.runtimes.model_ring import model_ring_cost
from anp_jax.tools.plan import workload
from anp_jax.tools.study import __main__ as study_main
from anp_jax.tools.study.papers import lab as lab_lib, published, results
from tests import builders

_PRINTS = 'import pathlib, sys; pathlib.Path(sys.argv[1]).open("a").write("x")'


@pytest.mark.parametrize('name', published.PAPERS)
def test_all_that_a_paper_names_is_there(name):
  paper = published.read(name)
  for curve in paper.curves.values():
    commands = {curve.command, curve.over_command or curve.command}
    assert commands <= {'', *paper.commands} and (curve.command or curve.recorded)
  for row in paper.rows:
    for value in (row.measured, row.predicted):
      assert not isinstance(value, dict) or value['curve'] in paper.curves
  for part in (*paper.tables, *paper.panels):
    assert set(part.curves) <= set(paper.curves)


def test_derived_figures_have_their_closed_forms():
  uneven = published.read('uneven2017')
  for name, speed_up, devices in (('cpus', 3.28, 4), ('gpus', 2.45, 3)):
    share = (1 - 1 / speed_up) / (1 - 1 / devices)
    fact = uneven.facts[f'implied_share_{name}', devices]
    assert fact.number == pytest.approx(100 * share, abs=0.05)
  # Factors over the gradient: 2 K (P - 1) (M + N) over 2 M N (2 P - 2) / P.
  for layer, ratio, sent in published.read('others').tables[0].rows:
    m, n = map(int, layer.split(' x '))
    exact = 2 * 32 * 15 * (m + n) / (2 * m * n * 30 / 16)
    assert float(ratio) == pytest.approx(exact, abs=0.0051)
    assert sent == 'factors'


def test_recorded_slots_are_those_of_the_schedule():
  paper = published.read('ring2015')
  rows = [row for row in paper.rows if row.paper and row.paper.quantity.startswith('slots_')]
  assert len(rows) == 5
  for row in rows:
    models, stations, epochs = map(int, row.paper.quantity.split('_')[1:])
    assert row.predicted == model_ring_cost.slots(models, stations, epochs)


def test_recorded_hours_saved_follow_from_what_is_sent():
  # 4 models on 4 stations, 90 epochs, photographs of 110 KB, 18.3 ms an image.
  table = iter(published.read('ring2015').tables[0].rows)
  sizes = (10e9, 50e9, 150e9, 500e9, 1000e9)
  bandwidths = (125e6, 1.25e9)
  for way in ('parts', 'disk'):
    for bandwidth in bandwidths:
      _, *hours = next(table)
      for size, text in zip(sizes, hours):
        epoch, read = size / 110e3 * 0.0183, size / bandwidth
        ring = 363 * (epoch / 4 + 205e6 / bandwidth) + max(0, read - epoch)
        parts = read + 360 * (epoch / 4 + size / 4 / bandwidth)
        baseline = parts if way == 'parts' else 90 * max(epoch, 4 * read)
        assert float(text) == pytest.approx((baseline - ring) / 3600, abs=0.06, rel=0.003)


def test_ratio_is_of_what_was_measured_before_what_is_predicted():
  fact = published.Fact('speed_up', '10', 'p', 16, 'x')
  assert published.Comparison('a', fact, 5.0, 20.0).ratio == 0.5
  assert published.Comparison('a', fact, None, 20.0).ratio == 2
  assert published.Comparison('a', fact, 'text', 20.0).ratio is None
  assert published.Comparison('a', None, 5.0).ratio is None
  row = published.Comparison('a', fact, None, 20.0, why_not='not run, because')
  assert row.cells() == (
    'a',
    '10x (p)',
    'not run, because',
    '20x (planner)',
    '2.00 (predicted)',
    '-',
  )


def _one_curve(**settings):
  """A paper of one curve, whose command prints the rates of two points."""
  points = [{'nodes': 1, 'rate': 4}, {'nodes': 8, 'rate': 12}]
  code = f'print("text"); print({json.dumps({"points": points})!r})'
  commands = {'one': shlex.join(['python', '-c', code])}
  curve = published.Curve('one', ['points', {'nodes': '{x}'}, 'rate'], **settings)
  return published.Paper('', '', {}, commands, {'a': curve}, [], [], [], [])


def test_a_number_is_picked_and_divided(tmp_path):
  over = ['points', {'nodes': '1'}, 'rate']
  paper = _one_curve(over=over, x_factor=4, each=[2, 3], hardware='there')
  numbers = results.Numbers(paper, lab_lib.Lab(str(tmp_path)))
  value, hardware = numbers.at('a', 2)
  assert value == 3 and 'JAX' in hardware
  assert numbers.curve('a') == {2: 3}  # nodes=12 has no point


def test_a_recorded_number_stands_where_nothing_is_measured(tmp_path):
  paper = _one_curve(recorded={'2': 1.5}, hardware='there')
  numbers = results.Numbers(paper, lab_lib.Lab(str(tmp_path), predict_only=True))
  assert numbers.at('a', 2) == (1.5, 'there')
  row = numbers.row(
    published.Comparison('b', measured={'curve': 'a', 'at': 2, 'part_of': 6, 'times': 10})
  )
  assert (row.measured, row.hardware, row.why_not) == (40, 'there', '')
  row = numbers.row(published.Comparison('b', measured={'curve': 'a', 'at': 3}))
  assert (row.measured, row.why_not) == (None, 'not run, because of --predict_only')
  assert os.listdir(tmp_path) == []
  row = published.Comparison('b', measured={'curve': 'a', 'at': 3})
  failing = dataclasses.replace(_one_curve(), commands={'one': 'python -c 1/0'})
  numbers = results.Numbers(failing, lab_lib.Lab(str(tmp_path)))
  assert numbers.row(row).why_not == 'its command gave no such number'


def test_a_measurement_is_made_once(tmp_path):
  count = tmp_path / 'count'
  command = shlex.join(['python', '-c', f'{_PRINTS}; print("text"); print(\'{{"x": 2}}\')'])
  command += f" {count} --config.duration='60 steps'"  # not as shlex.join quotes it
  for _ in range(2):
    lab = lab_lib.Lab(str(tmp_path / 'study'))
    assert lab.result('one', command).values == {'x': 2}
  assert count.read_text() == 'x'
  # Another command of the same name is another measurement.
  lab.result('one', command + ' more')
  assert count.read_text() == 'xx'


def test_what_failed_is_named_and_tried_again(tmp_path):
  path = tmp_path / 'there'
  code = "import os, sys; print('{}'); os.path.exists(sys.argv[1]) or sys.exit('error: not there')"
  command = shlex.join(['python', '-c', code, str(path)])
  for expected in (1, 0):
    lab = lab_lib.Lab(str(tmp_path))
    result = lab.result('one', command)
    assert [line.endswith('one.log: not there') for line in lab.failures] == [True] * expected
    # What a failed command printed is no result.
    assert (result is None) == bool(expected)
    path.touch()
  log = (tmp_path / 'measured' / 'one.log').read_text()
  assert log.strip() == '{}'


def test_cells_of_a_study_are_its_result(tmp_path):
  (tmp_path / 'runs' / 'one').mkdir(parents=True)
  (tmp_path / 'runs' / 'one' / 'cells.csv').write_text('name\na\n')  # of an earlier command
  lab = lab_lib.Lab(str(tmp_path))
  assert lab.result('one', 'python -c pass') is None and lab.failures
  code = "import pathlib, sys; pathlib.Path(sys.argv[1], 'cells.csv').write_text('a,b\\n1,2\\n')"
  result = lab.result('one', shlex.join(['python', '-c', code]) + ' {folder}')
  assert result.values == {'cells': [{'a': '1', 'b': '2'}]}


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
  assert line in builders.error_line(capsys)


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


def test_page_of_what_is_recorded(tmp_path, capsys):
  text, ratios = _page(tmp_path, capsys, 'invariant2016')
  rows = [line for line in text.splitlines() if line.startswith('| MNIST')]
  assert len(rows) == 6
  assert rows[0].split(' | ')[2:5] == ['1.52x', '1.52x (planner)', '0.83 (measured)']
  assert '| 6.63x (p) | not run, because it takes 12 cores, and this machine has 2 |' in rows[4]
  name = 'MNIST, LeNet: speed-up, 12 threads'
  assert ratios['invariant2016'][name] == pytest.approx(2.88 / 6.63, abs=1e-4)
  _check_images(tmp_path, text)


def test_all_papers_are_on_one_page(tmp_path, capsys, priors_only, monkeypatch):
  config = command_line.load('configs/lenet.py', {'data.source': 'synthetic'})
  cost = workload.count(config, 1000, 10)  # for each network: counting takes seconds
  monkeypatch.setattr(workload, 'count', lambda *_: cost)
  text, ratios = _page(tmp_path, capsys, 'all')
  assert all(f'## {name}' in text for name in published.PAPERS)
  assert tuple(ratios) == published.PAPERS
  _check_images(tmp_path, text)
  # A planned speed-up stands in the page, and its ratio to the published one in the last line.
  planned = float(re.search(r'4 CPUs, 500:1500.*3.28x.*?([\d.]+)x \(planner\)', text)[1])
  name = 'speed-up, 4 CPUs, 500:1500, 64 images, 1 Gbit/s'
  # The text has three digits.
  assert ratios['uneven2017'][name] == pytest.approx(planned / 3.28, rel=0.01)
  # Strong evidence of units: no speed-up exceeds its devices.
  speed_ups = re.findall(r'(\d+) nodes: [^|]*\|[^|]*\|[^|]*\| ([\d.]+)x \(planner', text)
  assert len(speed_ups) >= 8
  for size, planned in speed_ups:
    assert 0 < float(planned) <= int(size)


@pytest.mark.soak
def test_the_page_is_what_its_command_writes(tmp_path, capsys):
  """All of it is arithmetic or recorded; half a minute of one core."""
  text, _ = _page(tmp_path, capsys, 'all')
  page = (pathlib.Path(__file__).parents[3] / 'docs' / 'PAPERS.md').read_text()

  def lines(content):
    # Commands name their folder.
    return [line for line in content.splitlines() if not line.startswith('    ')]

  assert lines(text) == lines(page)


def test_scores_of_the_runs_that_somebody_trained_stand_next_to_the_papers(tmp_path, capsys):
  folders = [tmp_path / 'runs' / 'pairs' / 'evaluation' / f'{step}-validation' for step in (8, 9)]
  for folder, top1 in zip(folders, (0.1, 0.117)):  # the later one counts
    folder.mkdir(parents=True)
    scores = {'examples': 1200, 'anp_top1': top1, 'anp_top5': None}  # it was not finite
    text = json.dumps({'scores': scores, 'data': 'photos: validation'})
    (folder / 'scores.json').write_text(text)
  os.utime(folders[0] / 'scores.json', (1, 1))
  text, ratios = _page(tmp_path, capsys, 'anp553')
  rows = [line.split(' | ') for line in text.splitlines() if line.startswith('| ')][2:]
  assert rows[0][1:4] == ['23.4% (p)', '11.7%', '-']
  assert rows[0][4:] == ['0.50 (measured)', 'not known; 1,200 images of photos: validation |']
  assert ratios == {'anp553': {'ResNet-50, 553 pairs: top-1': 0.5}}
  # Every other row has the published figure alone, and says why.
  assert len(rows) == 11 and all(row[2].startswith('not run, because ') for row in rows[1:])
  assert [row[1] for row in rows[6:8]] == ['20.7% (p)', '43.3% (p)']
  assert rows[10][1] == 'only synchronous (p)'  # stands in the file of the cluster paper
  assert not (tmp_path / 'measured').exists()  # no training was begun


def test_commands_of_adjectives_and_nouns_see_the_images_of_the_pairs(tmp_path, monkeypatch):
  commands = published.read('anp553').commands
  names = ['happy_dog', 'sad_dog', 'happy_cat']
  tree = [f'{name}/{i}_{i:x}.jpg' for name in names for i in range(30)]
  builders.write_tree(tmp_path / 'photos', dict.fromkeys(tree, b''))
  builders.write_tree(
    tmp_path,
    {
      'mtvso553_anplabels.txt': '\n'.join(names).encode(),
      'mtvso553_adjlabels.txt': b'sad\nhappy\n',
      'mtvso553_nounlabels.txt': b'cat\ndog\n',
    },
  )
  recipe = pathlib.Path('configs/resnet_anp.py').resolve()
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv('ANP553', str(tmp_path / 'photos'))

  def labels(command, split):
    """The label of each image that a command trains or evaluates on."""
    typed = os.path.expandvars(command.replace('configs/resnet_anp.py', str(recipe)))
    overrides, (_, _, spec, workdir) = command_line.split_overrides(shlex.split(typed))
    assert workdir == '--workdir={folder}'
    config = command_line.load(spec.removeprefix('--config='), overrides)
    source = sources.open_source(config, split == 'train')
    return dict(zip(source.listing(), source.labels().tolist()))

  for split in ('train', 'validation'):
    pairs = labels(commands['pairs'], split)
    assert 0 < len(pairs) < 90
    # Ids are line numbers of the lists.
    adjectives = {file: int(file.startswith('happy')) for file in pairs}
    nouns = {file: int('dog' in file) for file in pairs}
    assert labels(commands['adjectives'], split) == adjectives
    assert labels(commands['nouns'], split) == nouns
    # So does the fusion, whose files of features are of all images.
    all_names = [f'photos/{name}' for name in tree]
    for word in ('adjectives', 'nouns'):
      np.savez(f'{word}.npz', names=all_names, logits=np.ones((90, 2)))
    fused = labels(commands['fusion'].replace('configs/', f'{recipe.parent}/'), split)
    assert {name.removeprefix('photos/') for name in fused} == {*pairs}
