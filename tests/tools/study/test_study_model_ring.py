"""The study of a ring: arithmetic, chart, baselines."""

import collections
import json
import types

import pytest

from anp_jax.data import sources
from anp_jax.runtimes.model_ring import spans as spans_lib
from anp_jax.tools.study import (
  __main__ as study_main,
  launching,
  model_ring_independent,
  model_ring_study,
  plots,
)
from tests import builders, model_rings

# Two stations, 5 s from the first step to the last score.
_SPANS = (
  (0, 'prepare', 0, 0.0, 10.0, {}),
  (0, 'train', 0, 10.0, 14.0, {'steps': 8}),
  (1, 'prepare', 1, 5.0, 11.0, {}),
  (1, 'train', 0, 12.0, 14.0, {'steps': 8}),
  (1, 'save', 0, 13.0, 13.5, {}),  # within a turn: counted once
  (0, 'send', 0, 14.0, 15.0, {'bytes': 3_000_000}),
  (1, 'score', 0, 14.0, 15.0, {}),
)


def _write(folder, spans=_SPANS):
  (folder / 'spans').mkdir(parents=True)
  for station in (0, 1):
    with open(folder / 'spans' / f'{station}.jsonl', 'w') as f:
      for where, what, model, start, end, more in spans:
        if where == station:
          record = {
            'station': where,
            'what': what,
            'model': model,
            'lap': 0,
            'start': start,
            'end': end,
            **more,
          }
          f.write(json.dumps(record) + '\n')


def test_devices_are_in_use_while_they_train_or_score(tmp_path):
  _write(tmp_path)
  study = model_ring_study.Study.__new__(model_ring_study.Study)
  study.stations = 2
  numbers = study.from_spans(str(tmp_path), sent=7.0)
  assert numbers['seconds'] == pytest.approx(5)
  # 4 + 2 + 1 of 10 s: to prepare is no use.
  assert numbers['use'] == pytest.approx(0.7)
  assert numbers['moved'] == pytest.approx(3) and numbers['sent'] == 7
  turns = study.turns(str(tmp_path), models=1)
  assert turns['turn_seconds'] == [pytest.approx(2 * 3)]
  assert turns['score_seconds'] == pytest.approx(1)
  assert turns['hand_over'] == pytest.approx(1 / 3)
  assert turns['most_steps'] == 8


def test_a_model_that_failed_is_named(tmp_path):
  _write(tmp_path, [(0, 'train', 1, 10.0, 14.0, {}), *_SPANS])
  study = model_ring_study.Study.__new__(model_ring_study.Study)
  study.models = [['seed=1'], ['seed=2', 'optimizer.learning_rate=9']]
  with pytest.raises(launching.RunFailedError, match=r'seed=2 optimizer.learning_rate=9; '):
    study.turns(str(tmp_path), models=2)


def test_chart_has_a_bar_for_each_turn():
  spans = [
    {'station': s, 'what': w, 'model': m, 'start': a, 'end': b}
    for s, w, m, a, b, _ in _SPANS
    if w in ('train', 'score')
  ]
  figure = plots.gantt(spans, ['seed=1', 'seed=2'])
  (axis,) = figure.axes
  lefts = sorted(round(p.get_x(), 3) for p in axis.patches)
  assert lefts == [0.0, 2.0, 4.0]
  assert axis.get_xlim()[0] == 0
  (text,) = [t.get_text() for t in figure.legends[0].get_texts()]
  assert text == 'seed=1'


@pytest.mark.slow  # TensorFlow is imported, to decode files
def test_independent_models_read_the_files_once(tmp_path, monkeypatch):
  """24 and 6 images, three epochs."""
  files = {
    f'{split}/{label}/{i}.png': builders.encode_image(builders.random_pixels(8, 8, seed=i))
    for split, count in (('train', 12), ('validation', 3))
    for label in ('red_cat', 'red_dog')
    for i in range(count)
  }
  builders.write_tree(tmp_path / 'images', files)
  config = model_rings.config(
    models=('seed=1',),
    **{
      'batch_size': 8,  # an image for each of the tests' devices
      'model.norm_group': 1,
      'data.source': 'folder',
      'data.path': str(tmp_path / 'images'),
      'data.cache': 'encoded',
    },
  )
  totals = collections.Counter()
  open_split = sources.open_split

  def open_counted(*arguments):
    source = open_split(*arguments)
    read = source.read

    def read_counted(indices):
      totals['read_images'] += len(indices)
      return read(indices)

    source.read = read_counted
    return source

  monkeypatch.setattr(sources, 'open_split', open_counted)
  processes = types.SimpleNamespace(
    index=0, count=1, heartbeat=lambda *_: None, gather=lambda value: [value]
  )
  model_ring_independent.Independent(config, str(tmp_path / 'run'), processes).run()
  turns = [s for s in spans_lib.read(str(tmp_path / 'run')) if s['what'] == 'train']
  # The whole set, in batches of 8, in each of three turns.
  assert [s['steps'] for s in turns] == [24 // 8] * 3
  # Batches are read ahead, beyond the end of an epoch.
  once = 24 + 6
  assert once <= totals['read_images'] < 1.5 * once


@pytest.mark.parametrize(
  'more, expected',
  [
    ([], '--config is missing'),
    (['--config=configs/lenet.py', '--workdir=x'], 'expected model_ring'),
    (['--stations=two'], "invalid int value: 'two'"),
    (['--config=x', '--workdir=x', '--stations=0'], '--stations=0: expected'),
    (['--statoins=2'], "did you mean '--stations'?"),
  ],
)
def test_bad_input_is_refused_in_one_line(capsys, more, expected):
  assert study_main.main(['model_ring', *more]) == 2
  error = capsys.readouterr().err
  assert expected in error and error.count('\n') == 1


@pytest.mark.multiprocess
@pytest.mark.soak
def test_the_study_compares_three_ways(tmp_path, capsys):
  pytest.importorskip('sklearn', reason="the digits are scikit-learn's")
  status = study_main.main(
    [
      'model_ring',
      '--config=configs/model_ring_anp.py:tiny',
      f'--workdir={tmp_path}',
      '--config.data.source=digits',
      '--config.data.image_size=28',
      '--config.data.resize=28',
      '--config.model.name=lenet',
      '--config.optimizer.learning_rate=0.01',
      "--config.strategy.models=('seed=1', 'seed=2')",
    ]
  )
  out = capsys.readouterr()
  assert status == 0, out.err
  ratios = json.loads(out.out.splitlines()[-1])
  assert (ratios['models'], ratios['slots'], ratios['laps']) == (2, 5, 2)
  assert ratios['schedule_occupancy'] == pytest.approx(2 * 2 / 5)
  assert 0 < ratios['use_over_schedule'] <= 1.01
  page = (tmp_path / 'study.md').read_text()
  assert '## Leaderboard' in page and 'whole set in memory' in page
  assert (tmp_path / 'ring.png').stat().st_size > 5000
