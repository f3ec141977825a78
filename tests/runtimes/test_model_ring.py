"""The strategy `model_ring`: models that travel around a ring of stations."""

import contextlib
import functools
import io
import json
import math
import shutil

import jax
import numpy as np
import pytest

from anp_jax import cluster, config as config_lib, train
from anp_jax.cluster import preemption
from anp_jax.data import index_shuffle, sources
from anp_jax.data.input import stream as stream_lib
from anp_jax.parallel import mesh as mesh_lib
from anp_jax.reporting import telemetry
from anp_jax.runtimes.model_ring import (
  candidates as candidates_lib,
  model_ring_cost,
  model_ring_run,
  ring_runner as runner_lib,
  schedule as schedule_lib,
  spans as spans_lib,
)
from tests import builders, model_rings, serving

BATCH, LAPS = model_rings.BATCH, model_rings.LAPS
MODELS = model_rings.MODELS
_NOT_IN_LINES = ('model', 'laps')


@pytest.fixture
def stations(monkeypatch):
  """Gives this process so many devices."""
  return functools.partial(serving.on_devices, monkeypatch)


def test_shards_are_stratified():
  random = np.random.default_rng(0)
  labels = random.integers(0, 7, 1000)
  for counts in ((1000,), (500, 500), (700, 200, 100), (333, 333, 334)):
    parts = schedule_lib.partition(labels, counts)
    assert [len(p) for p in parts] == list(counts)
    assert sorted(np.concatenate(parts)) == list(range(1000))
    for part, count in zip(parts, counts):
      for label in range(7):
        # Dealt out one by one, a class is off by one at either of its ends.
        want = (labels == label).sum() * count / 1000
        assert abs((labels[part] == label).sum() - want) <= 2


def test_shards_are_shuffled_apart_from_each_other():
  seeds = {
    (seed, station): schedule_lib.stream_seed(seed, station)
    for seed in (0, 1, 7, 2**31 - 1)
    for station in range(16)
  }
  assert len(set(seeds.values())) == len(seeds)
  orders = [index_shuffle.shuffled(np.arange(300), seeds[0, station], 300) for station in range(16)]
  for i, order in enumerate(orders):
    for earlier in orders[:i]:
      # Of two random permutations one place in 300 is the same: 1 on average,
      # and 12 or more in one pair of 1e9.
      assert (order == earlier).sum() < 12


def test_stations_shuffle_apart_and_score_alike(monkeypatch):
  seeds = []
  monkeypatch.setattr(stream_lib, 'Stream', lambda config, _: seeds.append(config.seed))
  config = model_rings.config()
  source = sources.open_source(config, training=True)
  sizes = schedule_lib.shard_sizes(config, len(source), 3)
  mesh = mesh_lib.create(config, jax.devices()[:1])
  for candidate in candidates_lib.create(config, 1)[:2]:
    schedule = schedule_lib.RingSchedule(sizes, BATCH, LAPS)
    for number, shard in enumerate(schedule_lib.data_shards(source, sizes)):
      station = schedule_lib.Station(number, mesh, shard)
      runner_lib.Runner(candidate, schedule, station, None)
  training, scoring = seeds[::2], seeds[1::2]
  assert len(training) == 6 and len(set(training)) == 6
  # One validation set for all models: that of the run.
  assert scoring == [config.seed] * 6


@pytest.mark.parametrize('sizes', [(70,), (35, 35), (41, 20, 9), (3, 67)])
def test_every_example_counts_once_a_lap(sizes):
  schedule = schedule_lib.RingSchedule(sizes, 4, LAPS)
  assert schedule.total == sum(math.ceil(LAPS * n / 4) for n in sizes)
  steps = [0] * len(sizes)
  step = 0
  for lap in range(LAPS):
    for station, size in enumerate(sizes):
      count = (lap + 1) * size // 4 - steps[station]
      if lap == LAPS - 1:
        count = -(-LAPS * size // 4) - steps[station]
      assert schedule.segment(lap, station).steps == count
      for i in range(count):
        segment = schedule.at(step)
        assert segment == (lap, station, steps[station], count - i)
        steps[station] += 1
        step += 1
    assert schedule.ends[lap] == step
    assert schedule.laps_done(step) == lap + 1
    assert schedule.laps_done(step - 1) == lap
  assert schedule.at(step) is None


@pytest.mark.parametrize('models, stations', [(1, 1), (1, 4), (2, 3), (3, 3), (5, 2)])
def test_slots_are_the_papers(models, stations):
  """At slot t station j trains model (t - j) mod max(M, N), until all laps are done."""
  period = max(models, stations)
  busy = [
    t
    for t in range(3 * period * LAPS)
    for j in range(stations)
    if 0 <= t - j < period * LAPS and (t - j) % period < models
  ]
  assert model_ring_cost.slots(models, stations, LAPS) == max(busy) + 1


@pytest.mark.parametrize(
  'text, expected',
  [
    ('sed=3', "unknown key config.sed; did you mean 'seed'?"),
    ('seed', "'seed': expected key=value"),
    ('duration=3 epochs', 'config.duration is the same for all models'),
    ('seed=x', "config.seed='x': expected a whole number"),
    ('model.name=resnet19', "did you mean 'resnet1"),
    ('optimizer.momentum=2', 'a number from 0, below 1'),
  ],
)
def test_bad_models_are_refused(text, expected):
  config = model_rings.config(('seed=1', text))
  line = builders.refusal(candidates_lib.create, config, 1)
  assert 'config.strategy.models[1]=' in line
  assert expected in line


@pytest.mark.parametrize(
  'overrides, expected',
  [
    ({'duration': '20 steps'}, "config.duration='20 steps': expected whole"),
    ({'duration': '1.5 epochs'}, "config.duration='1.5 epochs': expected"),
    ({'eval.every': '5 steps'}, "config.eval.every='5 steps': expected"),
    ({'strategy.shares': (1, 2, 3)}, 'expected 2, one for each station'),
    ({'strategy.shares': (1, 0)}, 'over 2 stations: one has none'),
    ({'batch_size': 3}, 'config.model.norm_group=2'),
    ({'checkpoint.best_metric': 'noun_top1'}, 'config.checkpoint.best_metric'),
  ],
)
def test_a_config_that_does_not_fit_is_refused(tmp_path, stations, overrides, expected):
  stations(2)
  assert expected in builders.refusal(train.run, model_rings.config(**overrides), str(tmp_path))


# Two stations with parts of 42 and 28 examples.
_SHARES = {'strategy.shares': (3, 2), 'checkpoint.every': '4 steps'}
_SIZES = 42, 28
_ENDS = [sum(lap * n // BATCH for n in _SIZES) for lap in range(1, LAPS)]
_TOTAL = sum(math.ceil(LAPS * n / BATCH) for n in _SIZES)


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
  """A ring of three models and one that fails: its workdir, config, scores and output."""
  workdir = tmp_path_factory.mktemp('ring')
  config = model_rings.config((*MODELS[:3], 'optimizer.learning_rate=1e30'), **_SHARES)
  with pytest.MonkeyPatch.context() as m, contextlib.redirect_stdout(io.StringIO()) as out:
    serving.on_devices(m, 2)
    scores = train.run(config, str(workdir))
  return workdir, config, scores, out.getvalue()


@pytest.mark.slow
def test_each_model_ends_as_if_alone(trained):
  workdir, config, best_scores, printed = trained
  assert json.loads((workdir / 'model_ring.json').read_text())['parts'] == [*_SIZES]
  model_rings.assert_same(workdir, config, _SIZES, range(3))
  board = model_rings.leaderboard(workdir, config, LAPS)
  assert [board.status(m, LAPS) for m in range(4)] == ['finished'] * 3 + ['failed']
  assert board.best() == best_scores
  assert '003  failed: step ' in printed
  (line,) = [x for x in (workdir / 'leaderboard.md').read_text().splitlines() if '1e30' in x]
  assert line.startswith('| 4 |') and 'is not finite' in line
  for m in range(3):
    lines = telemetry.read(str(workdir / 'models' / f'{m:03}'))
    steps = [*range(5, _TOTAL, 5), _TOTAL]
    assert [r['step'] for r in lines if r['kind'] == 'train'] == steps
    scores = [r for r in lines if r['kind'] == 'validation']
    assert sorted(r['step'] for r in scores) == [*_ENDS, _TOTAL]
    for record in board.all_scores(m):
      (line,) = [r for r in scores if r['step'] == record['step']]
      epoch = record['step'] * BATCH / model_rings.EXAMPLES
      record = {'kind': 'validation', 'epoch': epoch} | record
      assert line == {k: record[k] for k in record if k not in _NOT_IN_LINES}
  spans = spans_lib.read(str(workdir))
  assert len([s for s in spans if s['what'] == 'train' and s['model'] < 3]) == 3 * 2 * LAPS
  # The last scores fall to the station that has nothing to train any more.
  scored = {(s['station'], s['lap']) for s in spans if s['what'] == 'score'}
  assert {station for station, laps in scored if laps == LAPS} == {0}
  assert {1} <= {k for k, laps in scored if laps < LAPS}


@pytest.mark.slow
def test_another_ring_is_refused_but_the_list_of_models_may_grow(trained, tmp_path, stations):
  stations(2)
  workdir, config = shutil.copytree(trained[0], tmp_path / 'ring'), trained[1]
  models = config.strategy.models
  for models_, overrides, expected in (
    (models, {'strategy.shares': (1, 1)}, 'its stations have parts of [42, 28]'),
    (models, {'duration': '4 epochs'}, 'its models make laps: 3, not 4'),
    (('seed=7',), {}, 'may only grow at its end'),
    (models, {'label_smoothing': 0.2}, 'config.label_smoothing is 0.2'),
  ):
    line = builders.refusal(
      train.run, model_rings.config(models_, **{**_SHARES, **overrides}), str(workdir)
    )
    assert expected in line and str(workdir) in line
  longer = model_rings.config((*models, 'seed=2'), **_SHARES)
  train.run(longer, str(workdir))
  model_rings.assert_same(workdir, longer, _SIZES, (0, 4))


@pytest.mark.slow
def test_evaluation_scores_all_models_as_training_did(trained, stations, capsys):
  workdir, config, _, printed = trained
  stations(1)  # the shares were two stations'
  config = model_rings.config(config.strategy.models, **{**_SHARES, 'strategy.shares': ()})
  # Of a ring that still trains, and is writing this.
  save = workdir / 'models/000/checkpoints/99.orbax-checkpoint-tmp'
  save.mkdir()

  def lines_of(which):
    train.run(config, str(workdir), 'evaluate', which)
    lines = capsys.readouterr().out.splitlines()
    return [next(x for x in lines if f'{m:03}  step' in x) for m in range(3)]

  newest = lines_of('newest')
  assert save.is_dir()
  save.rmdir()
  board = model_rings.leaderboard(workdir, config, LAPS)
  for model, (again, best) in enumerate(zip(newest, lines_of('best'), strict=True)):
    name, scores = f'{model:03}', board.all_scores(model)
    (folder,) = (workdir / 'models' / name / 'best').iterdir()
    (record,) = [r for r in scores if r['step'] == int(folder.name)]
    assert len(scores) == LAPS
    assert record['anp_top1'] == max(r['anp_top1'] for r in scores)
    assert best.startswith(f'{name}  step {folder.name}:')
    for text, laps in ((again, LAPS), (best, record['laps'])):
      (line,) = [x for x in printed.splitlines() if f'{name}  lap {laps} of' in x]
      assert line.partition(': ')[2] == text.partition(': ')[2]


# A model more than stations, as many, fewer; a host with two devices.
@pytest.mark.parametrize(
  'devices, models, keys, sizes',
  [
    builders.slow(2, 1, {'strategy.station': 'host'}, (70,)),
    builders.soak(4, 4, {}, (18, 18, 17, 17)),
    builders.soak(8, 2, {}, (9,) * 6 + (8,) * 2),
  ],
)
def test_other_stations(tmp_path, stations, devices, models, keys, sizes):
  stations(devices)
  config = model_rings.config(MODELS[-models:], **keys)
  train.run(config, str(tmp_path))
  parts = json.loads((tmp_path / 'model_ring.json').read_text())['parts']
  assert sorted(parts) == sorted(sizes)
  each = devices if keys else 1
  model_rings.assert_same(tmp_path, config, parts, range(models), devices=each)


@pytest.mark.slow
def test_a_lap_without_steps_has_no_scores(tmp_path, stations):
  """A batch of 20 is larger than the four parts, of 17 and 18 examples."""
  stations(4)
  config = model_rings.config(('batch_size=20', 'batch_size=10'), **{'log.every': '1 epochs'})
  train.run(config, str(tmp_path))
  sizes = json.loads((tmp_path / 'model_ring.json').read_text())['parts']
  # An epoch has 3.5 and 7 steps; the last step is recorded, too.
  steps = [sum(math.ceil(LAPS * n / batch) for n in sizes) for batch in (20, 10)]
  recorded = [[4, 8, 12], [7, 14, 21, 24]]
  assert steps == [12, 24]
  for folder, want in zip(sorted((tmp_path / 'models').iterdir()), recorded, strict=True):
    lines = map(json.loads, (folder / 'metrics.jsonl').read_text().splitlines())
    assert [r['step'] for r in lines if r['kind'] == 'train'] == want


class _Stopping(cluster.Processes):
  """Asks to stop after so many votes."""

  def __init__(self, config, votes):
    super().__init__(config)
    self._votes = votes

  def vote(self):
    self._votes -= 1
    return preemption.STOP if self._votes < 0 else preemption.CONTINUE


@pytest.mark.slow
@pytest.mark.parametrize(
  'all_votes', [(3, 150, 10**6), builders.soak((1, 3, 8, 20, 40, 80, 160, 320, 640, 10**6))]
)
def test_a_stopped_ring_resumes_anywhere(tmp_path, stations, monkeypatch, all_votes):
  stations(2)
  config = model_rings.config(MODELS[:3], **_SHARES)
  stops = 0
  monkeypatch.setattr(model_ring_run, '_POLL', 0.02)
  for votes in all_votes:
    (tmp_path / 'stopped.json').unlink(missing_ok=True)
    model_ring_run.run(config, str(tmp_path), _Stopping(config, votes))
    if not (tmp_path / 'stopped.json').exists():
      break
    marker = json.loads((tmp_path / 'stopped.json').read_text())
    assert marker['reason'] == 'a signal'
    assert marker['step'] < marker['total'] == 3 * _TOTAL
    stops += 1
  assert stops >= 2
  model_rings.assert_same(tmp_path, config, _SIZES, range(3))
  lines = (tmp_path / 'model_ring.jsonl').read_text().splitlines()
  scores = sorted((r['model'], r['laps']) for r in map(json.loads, lines))
  assert scores == [(m, k) for m in range(3) for k in (1, 2, 3)]
  # Finished: nothing is trained again.
  before = len(spans_lib.read(str(tmp_path)))
  model_ring_run.run(config, str(tmp_path), cluster.Processes(config))
  assert len(spans_lib.read(str(tmp_path))) == before


@pytest.mark.parametrize('mode', ['train', 'evaluate'])
def test_a_workdir_of_another_run_stays_as_it_is(tmp_path, stations, mode):
  stations(2)
  (tmp_path / 'checkpoints' / '5').mkdir(parents=True)
  other = model_rings.config()
  other.strategy.name = 'sync'
  (tmp_path / 'config.json').write_text(config_lib.to_json(other))
  before = builders.read_tree(tmp_path)
  line = builders.refusal(train.run, model_rings.config(), str(tmp_path), mode)
  expected = {
    'train': "config.strategy.name is 'model_ring', but the run in this workdir",
    'evaluate': 'has no checkpoint of a ring to evaluate',
  }[mode]
  assert expected in line and str(tmp_path) in line
  assert builders.read_tree(tmp_path) == before
