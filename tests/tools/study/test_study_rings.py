"""The study of many models: times of a ring in closed form, its baselines, its page."""

import collections
import json
import types

import numpy as np
import pytest

from anp_jax import config as config_lib
from anp_jax.data import sources
from anp_jax.data.sources import mapped
from anp_jax.runtimes.model_ring import spans as spans_lib
from anp_jax.tools.study import (
  __main__ as study_main,
  grid,
  independent,
  plots,
  ring_times,
  study_page,
  study_results,
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


def _write(folder, spans=_SPANS, models=('seed=1',)):
  (folder / 'spans').mkdir(parents=True)
  keys = ('station', 'what', 'model', 'start', 'end')
  for station in (0, 1):
    lines = [
      json.dumps(dict(zip(keys, span)) | {'lap': int(span[1] == 'score')} | span[-1]) + '\n'
      for span in spans
      if span[0] == station
    ]
    (folder / 'spans' / f'{station}.jsonl').write_text(''.join(lines))
  run = {'parts': [20, 30], 'laps': 1, 'models': models}
  (folder / 'model_ring.json').write_text(json.dumps(run))
  (folder / 'config.json').write_text('{"strategy.name": "model_ring"}')
  scores = {'model': 0, 'laps': 1, 'step': 16, 'anp_top1': 0.5, 'time': 99.0}
  (folder / 'model_ring.jsonl').write_text(json.dumps(scores) + '\n')
  return str(folder)


def test_devices_are_in_use_while_they_train_or_score(tmp_path):
  times = ring_times.read(_write(tmp_path))
  assert times.seconds == pytest.approx(5)
  # 4 + 2 + 1 of 10 s: to prepare is no use.
  assert times.use == pytest.approx(0.7)
  # A send over the median turn.
  assert times.hand_over == pytest.approx(1 / 3)
  # One model on two stations: two of three slots of each are idle; its turns take 3 s, the
  # median, and its score 1 s.
  assert times.occupancy == pytest.approx(2 / (2 * 2))
  assert times.over_ideal == pytest.approx(5 * 2 * 0.5 / (2 * 3 + 1))


def test_a_ring_is_a_run_of_a_study(tmp_path):
  run = study_results.read(_write(tmp_path))
  # 50 images in 5 s, and the score 5 s after the first step.
  assert run.images_per_second == pytest.approx(10)
  assert (run.samples.tolist(), run.seconds.tolist()) == ([50], [5])
  assert run.accuracy.tolist() == [0.5]


def test_a_model_that_failed_is_named(tmp_path):
  spans = [(0, 'train', 1, 10.0, 14.0, {}), *_SPANS]
  models = ['seed=1', 'seed=2; optimizer.learning_rate=9']
  with pytest.raises(config_lib.ConfigError, match=r'seed=2; optimizer.learning_rate=9; '):
    study_results.read(_write(tmp_path, spans, models))


def test_the_page_compares_a_ring_with_models_one_after_another(tmp_path):
  ring = study_results.read(_write(tmp_path / 'ring'))
  cells = [grid.Cell('model_ring', 2, 1, 0)]
  cells += [grid.Cell('sync', 2, 1, 0, (('optimizer.momentum', m),)) for m in ('0', '0.9')]
  alone = study_results.Run(10.0, *[np.array([4.0])] * 4)
  runs = dict(zip(cells, (ring, alone, alone)))
  text = study_page.write(str(tmp_path), 'A title', '', study_page.Outcome(cells, runs, {}, 2), ())
  rows = [' '.join(line.split()) for line in text.splitlines()]
  assert 'model_ring 2 1 1 5.0 0.700 1.400 0.714 0.333' in rows
  assert 'sync, one after another 2 1 2 8.0 - - - -' in rows
  assert (tmp_path / 'ring.png').stat().st_size > 5000


def test_chart_has_a_bar_for_each_turn(tmp_path):
  times = ring_times.read(_write(tmp_path))
  figure = plots.gantt(times.work, ['seed=1', 'seed=2'])
  (axis,) = figure.axes
  assert sorted(round(p.get_x(), 3) for p in axis.patches) == [0.0, 2.0, 4.0]
  assert axis.get_xlim()[0] == 0
  (text,) = [t.get_text() for t in figure.legends[0].get_texts()]
  assert text == 'seed=1'


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
      'data.cache': 'mapped',
      'data.dir': str(tmp_path / 'data'),
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
  scores = independent.Trainer(config, str(tmp_path / 'run'), processes).run()
  assert [(model, laps, step) for model, laps, step, _ in scores] == [
    (0, n, 3 * n) for n in (1, 2, 3)
  ]
  turns = [s for s in spans_lib.read(str(tmp_path / 'run')) if s['what'] == 'train']
  # The whole set, in batches of 8, in each of three turns.
  assert [s['steps'] for s in turns] == [24 // 8] * 3
  # anp-compare finds metrics and scores where a ring has them.
  (folder,) = (tmp_path / 'run' / 'models').iterdir()
  lines = [json.loads(line) for line in (folder / 'metrics.jsonl').read_text().splitlines()]
  assert folder.name == '000'
  assert [(r['kind'], r['step'], r['epoch']) for r in lines] == [
    (kind, 3 * n, n) for n in (1, 2, 3) for kind in ('train', 'validation')
  ]
  assert [r['anp_top1'] for r in lines[1::2]] == [values['anp_top1'] for *_, values in scores]
  # No more than the build of the cache reads, which looks at some images of each split before.
  assert totals['read_images'] == 24 + 6 + 2 * mapped._SAMPLE


def test_other_strategies_train_each_model_by_itself(tmp_path):
  command = ['strategies', '--config=configs/model_ring_anp.py:tiny', f'--workdir={tmp_path}']
  flags = study_main._flags([*command, '--strategies=model_ring,independent,sync', '--nodes=2'])
  study, cells, _ = study_main._study(flags, {})
  assert [cell.name for cell in cells] == [
    'model_ring-2x1-seed0',
    'independent-2x1-seed0',
    'sync-2x1-seed=1-seed0',
    'sync-2x1-seed=2-optimizer.learning_rate=0.1-seed0',
  ]
  config = study.config(cells[-1])
  assert (config.seed, config.optimizer.learning_rate) == (2, 0.1)
  assert study.config(cells[1]).strategy.models == study.config(cells[0]).strategy.models


@pytest.mark.multiprocess
@pytest.mark.soak
def test_the_study_compares_three_ways(tmp_path, capsys):
  pytest.importorskip('sklearn', reason="the digits are scikit-learn's")
  status = study_main.main(
    [
      'strategies',
      '--config=configs/model_ring_anp.py:tiny',
      f'--workdir={tmp_path}',
      '--strategies=model_ring,independent,sync',
      '--nodes=2',
      '--config.data.source=digits',
      '--config.data.image_size=28',
      '--config.data.resize=28',
      '--config.model.name=lenet',
      '--config.optimizer.learning_rate=0.01',
      "--config.strategy.models=('seed=1', 'seed=2')",
    ]
  )
  out = capsys.readouterr()
  assert status == 0, out.out + out.err
  times = ring_times.read(str(tmp_path / 'runs' / 'model_ring-2x1-seed0'))
  # Two models, two laps: five slots.
  assert times.occupancy == pytest.approx(2 * 2 / 5) and 0 < times.use <= 1.01
  page = (tmp_path / 'study.md').read_text()
  assert 'independent' in page and 'sync, one after another' in page
