"""The strategy `relay`: models that go round a ring of stations."""

import json
import math

import jax
import numpy as np
import pytest

from anp_jax import cluster
from anp_jax import config as config_lib
from anp_jax import train
from anp_jax.cluster import preemption
from anp_jax.data import index_shuffle
from anp_jax.data import sources
from anp_jax.data.input import stream as stream_lib
from anp_jax.parallel import mesh as mesh_lib
from anp_jax.reporting import telemetry
from anp_jax.runtimes.relay import candidates as candidates_lib
from anp_jax.runtimes.relay import ensemble
from anp_jax.runtimes.relay import leaderboard as leaderboard_lib
from anp_jax.runtimes.relay import runner as runner_lib
from anp_jax.runtimes.relay import schedule as schedule_lib
from anp_jax.runtimes.relay import spans as spans_lib
from anp_jax.training import heads
from anp_jax.training import objective as objective_lib
from tests import relaying

pytestmark = pytest.mark.usefixtures('quick_compiles')

BATCH, LAPS = relaying.BATCH, relaying.LAPS
MODELS = relaying.MODELS


@pytest.fixture
def stations(monkeypatch):
  """Lets this process have so many devices."""

  def give(count):
    devices = jax.devices()[:count]
    monkeypatch.setattr(jax, 'local_devices', lambda: devices)

  return give


def test_parts_are_stratified():
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


def test_parts_of_the_ring_are_shuffled_apart_from_each_other():
  seeds = {
    (seed, station): schedule_lib.stream_seed(seed, station)
    for seed in (0, 1, 7, 2**31 - 1)
    for station in range(16)
  }
  assert len(set(seeds.values())) == len(seeds)
  orders = [
    index_shuffle.shuffled(np.arange(300), seeds[0, station], 300)
    for station in range(16)
  ]
  for i, one in enumerate(orders):
    for other in orders[:i]:
      # Of two random permutations one place in 300 is the same: 1 on average,
      # and 12 or more in one pair of 1e9.
      assert (one == other).sum() < 12


def test_stations_shuffle_apart_and_score_alike(monkeypatch):
  seeds = []
  monkeypatch.setattr(
    stream_lib, 'Stream', lambda config, _: seeds.append(config.seed)
  )
  config = relaying.config()
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
  found = schedule_lib.RingSchedule(sizes, 4, LAPS)
  assert found.total == sum(math.ceil(LAPS * n / 4) for n in sizes)
  made = {p: 0 for p in range(len(sizes))}
  step = 0
  for lap in range(LAPS):
    for station, size in enumerate(sizes):
      whole = (lap + 1) * size // 4 - made[station]
      if lap == LAPS - 1:
        whole = -(-LAPS * size // 4) - made[station]
      for i in range(whole):
        visit = found.at(step)
        assert visit == (lap, station, made[station], whole - i)
        made[station] += 1
        step += 1
    assert found.ends[lap] == step
    assert found.laps_done(step) == lap + 1
    assert found.laps_done(step - 1) == lap
  assert found.at(step) is None


@pytest.mark.parametrize('models', [1, 2, 3, 5])
@pytest.mark.parametrize('stations', [1, 2, 3, 4])
def test_slots_are_the_papers(models, stations):
  found = schedule_lib.slots(models, stations, LAPS)
  longer, shorter = max(models, stations), min(models, stations)
  assert len(found) == longer * LAPS + shorter - 1
  visits = {m: [] for m in range(models)}
  for slot in found:
    inside = [m for m in slot if m is not None]
    assert len(set(inside)) == len(inside) >= 1
    for station, m in enumerate(slot):
      if m is not None:
        visits[m].append(station)
  assert all(v == list(range(stations)) * LAPS for v in visits.values())


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
def test_bad_models(text, expected):
  config = relaying.config(('seed=1', text))
  with pytest.raises(config_lib.ConfigError) as e:
    candidates_lib.create(config, 1)
  assert 'config.strategy.models[1]=' in str(e.value)
  assert expected in str(e.value)


@pytest.mark.parametrize(
  'overrides, expected',
  [
    ({'strategy.models': ()}, 'config.strategy.models=()'),
    ({'strategy.models': (3,)}, 'config.strategy.models=(3,)'),
    ({'strategy.halving': 1}, 'config.strategy.halving=1'),
    ({'strategy.shares': (1, -1)}, 'config.strategy.shares=(1, -1)'),
    ({'strategy.station': 'rack'}, 'config.strategy.station='),
  ],
)
def test_bad_keys(overrides, expected):
  with pytest.raises(config_lib.ConfigError, match='expected') as e:
    relaying.config(**overrides)
  assert str(e.value).startswith(expected)


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
def test_what_does_not_fit(tmp_path, stations, overrides, expected):
  stations(2)
  with pytest.raises(config_lib.ConfigError) as e:
    train.run(relaying.config(**overrides), str(tmp_path))
  assert expected in str(e.value)


# Fewer models than stations, as many, more.
@pytest.mark.parametrize(
  'devices, models, shares',
  [
    (1, 2, ()),
    pytest.param(2, 3, (3, 2), marks=pytest.mark.slow),
    pytest.param(2, 4, (), marks=pytest.mark.soak),
    pytest.param(4, 1, (), marks=pytest.mark.slow),
    pytest.param(4, 4, (), marks=pytest.mark.soak),
    pytest.param(4, 2, (5, 1, 1, 2), marks=pytest.mark.soak),
    pytest.param(8, 4, (), marks=pytest.mark.soak),
  ],
)
def test_each_model_ends_as_if_alone(
  tmp_path, stations, devices, models, shares
):
  stations(devices)
  config = relaying.config(MODELS[:models], **{'strategy.shares': shares})
  scores = train.run(config, str(tmp_path))
  sizes = json.loads((tmp_path / 'relay.json').read_text())['parts']
  if not shares:
    assert max(sizes) - min(sizes) <= 1
  relaying.assert_same(tmp_path, config, sizes, range(models))
  board = relaying.leaderboard(tmp_path, config, LAPS)
  assert board.finished() == list(range(models))
  assert board.best() == scores
  for m in range(models):
    lines = telemetry.read(str(tmp_path / 'models' / f'{m:03}'))
    total = sum(math.ceil(LAPS * n / BATCH) for n in sizes)
    steps = [*range(5, total, 5), total]
    assert [r['step'] for r in lines if r['kind'] == 'train'] == steps
    kept = [r for r in lines if r['kind'] == 'validation']
    ends = [sum(lap * n // BATCH for n in sizes) for lap in range(1, LAPS)]
    assert sorted(r['step'] for r in kept) == [*ends, total]
    for record in board.all_scores(m):
      own = {k: v for k, v in record.items() if k not in ('model', 'laps')}
      (line,) = [r for r in kept if r['step'] == record['step']]
      epoch = record['step'] * BATCH / relaying.EXAMPLES
      assert line == {'kind': 'validation', 'epoch': epoch, **own}
  made = spans_lib.read(str(tmp_path))
  trained = [s for s in made if s['what'] == 'train']
  assert len(trained) == models * devices * LAPS
  # The last scores fall to the station that has nothing to train any more.
  scored = {(s['station'], s['lap']) for s in made if s['what'] == 'score'}
  assert {station for station, laps in scored if laps == LAPS} == {0}
  assert devices == 1 or {1} <= {k for k, laps in scored if laps < LAPS}


@pytest.mark.slow
def test_a_station_of_several_devices(tmp_path, stations):
  stations(2)
  config = relaying.config(MODELS[:2], **{'strategy.station': 'host'})
  train.run(config, str(tmp_path))
  assert json.loads((tmp_path / 'relay.json').read_text())['parts'] == [70]
  for index in range(2):
    ended = relaying.by_content(relaying.ended(tmp_path, index).values())
    want = relaying.by_content(relaying.alone(config, index, (70,), devices=2))
    for have, expected in zip(ended, want, strict=True):
      np.testing.assert_array_equal(have, expected)


class _Stopping(cluster.Processes):
  """Asks to stop after so many looks."""

  def __init__(self, config, looks):
    super().__init__(config)
    self._looks = looks

  def vote(self):
    self._looks -= 1
    return preemption.STOP if self._looks < 0 else preemption.CONTINUE


@pytest.mark.slow
@pytest.mark.parametrize(
  'all_looks',
  [
    (3, 150, 10**6),
    pytest.param(
      (1, 3, 8, 20, 40, 80, 160, 320, 640, 10**6), marks=pytest.mark.soak
    ),
  ],
)
def test_stopped_anywhere_goes_on(tmp_path, stations, monkeypatch, all_looks):
  stations(2)
  config = relaying.config(
    ('seed=1', 'seed=2', 'seed=3'), **{'checkpoint.every': '4 steps'}
  )
  from anp_jax.runtimes.relay import run as relay_run

  stops = 0
  monkeypatch.setattr(relay_run, '_POLL', 0.02)
  for looks in all_looks:
    (tmp_path / 'stopped.json').unlink(missing_ok=True)
    relay_run.run(config, str(tmp_path), _Stopping(config, looks))
    if not (tmp_path / 'stopped.json').exists():
      break
    marker = json.loads((tmp_path / 'stopped.json').read_text())
    assert marker['reason'] == 'a signal'
    assert marker['step'] < marker['total'] == 3 * 2 * math.ceil(3 * 35 / 4)
    stops += 1
  assert stops >= 2
  relaying.assert_same(tmp_path, config, (35, 35), range(3))
  lines = (tmp_path / 'relay.jsonl').read_text().splitlines()
  found = sorted((r['model'], r['laps']) for r in map(json.loads, lines))
  assert found == [(m, k) for m in range(3) for k in (1, 2, 3)]
  # Finished: nothing is trained again.
  before = len(spans_lib.read(str(tmp_path)))
  relay_run.run(config, str(tmp_path), cluster.Processes(config))
  assert len(spans_lib.read(str(tmp_path))) == before


@pytest.mark.slow
@pytest.mark.parametrize(
  'overrides, expected',
  [
    ({'strategy.shares': (2, 1)}, 'its stations have parts of [35, 35]'),
    ({'duration': '4 epochs'}, 'its models make laps: 3, not 4'),
    ({'strategy.models': ('seed=7',)}, 'may only grow at its end'),
    ({'label_smoothing': 0.2}, 'config.label_smoothing is 0.2'),
  ],
)
def test_another_ring_is_refused(tmp_path, stations, overrides, expected):
  stations(2)
  train.run(relaying.config(('seed=1',)), str(tmp_path))
  config = relaying.config(**{'models': ('seed=1',), **overrides})
  if 'strategy.models' in overrides:
    config = relaying.config(overrides['strategy.models'])
  with pytest.raises(config_lib.ConfigError) as e:
    train.run(config, str(tmp_path))
  assert expected in str(e.value) and str(tmp_path) in str(e.value)


@pytest.mark.parametrize('mode', ['train', 'evaluate'])
def test_workdir_of_another_run_stays_as_it_is(tmp_path, stations, mode):
  stations(2)
  (tmp_path / 'checkpoints' / '5').mkdir(parents=True)
  other = relaying.config()
  other.strategy.name = 'sync'
  (tmp_path / 'config.json').write_text(config_lib.to_json(other))
  before = {p: p.read_bytes() for p in tmp_path.rglob('*') if p.is_file()}
  with pytest.raises(config_lib.ConfigError) as e:
    train.run(relaying.config(), str(tmp_path), mode)
  expected = {
    'train': "config.strategy.name is 'relay', but the run in this workdir",
    'evaluate': 'has no checkpoint of a ring to evaluate',
  }[mode]
  assert expected in str(e.value) and str(tmp_path) in str(e.value)
  after = {p: p.read_bytes() for p in tmp_path.rglob('*') if p.is_file()}
  assert after == before


@pytest.mark.slow
def test_list_may_grow(tmp_path, stations):
  stations(2)
  train.run(relaying.config(('seed=1',)), str(tmp_path))
  config = relaying.config(('seed=1', 'seed=2'))
  train.run(config, str(tmp_path))
  relaying.assert_same(tmp_path, config, (35, 35), (0, 1))


@pytest.mark.slow
def test_one_that_is_not_finite_leaves(tmp_path, stations, capsys):
  stations(2)
  config = relaying.config(
    ('seed=1', 'optimizer.learning_rate=1e30', 'seed=3'),
  )
  train.run(config, str(tmp_path))
  assert '001  failed: step ' in capsys.readouterr().out
  page = (tmp_path / 'leaderboard.md').read_text()
  assert 'Mean of the 2 finished' in page
  (line,) = [line for line in page.splitlines() if '1e30' in line]
  assert line.startswith('| 3 |') and 'is not finite' in line
  relaying.assert_same(tmp_path, config, (35, 35), (0, 2))


def _board(tmp_path, halving, laps, scores, models=6):
  config = relaying.config(
    tuple(f'seed={i}' for i in range(models)), **{'strategy.halving': halving}
  )
  board = relaying.leaderboard(tmp_path, config, laps)
  for (model, k), value in scores.items():
    board.add(model, k, 10 * k, {'anp_top1': value})
  return board


@pytest.mark.parametrize(
  'halving, kept', [(2, [1, 1, 2, 2, 3]), (3, [1, 1, 1, 2, 2])]
)
def test_halving_rounds_up(tmp_path, halving, kept):
  """Of one model, two, three ... the best 1/h go on, as docs/strategies.md."""
  for count, most in enumerate(kept, 1):
    for place in range(count):  # of the last model among all, from the best
      scores = {(m, 1): -float(m + (m >= place)) for m in range(count - 1)}
      scores[count - 1, 1] = -float(place)
      folder = tmp_path / f'{count} {place}'
      folder.mkdir()
      board = _board(folder, halving, halving**2, scores)
      want = leaderboard_lib.GO_ON if place < most else leaderboard_lib.RETIRED
      assert board.decide(count - 1, 1) == want, (count, place)


def test_halving(tmp_path):
  board = _board(tmp_path, 2, 8, {(0, 1): 0.5, (1, 1): 0.4, (2, 1): 0.6})
  assert [k for k in range(9) if board._rungs.is_rung(k)] == [1, 2, 4]
  # Of one the best half is one, of two one, of three two.
  assert [board.decide(m, 1) for m in (0, 1, 2)] == [
    leaderboard_lib.GO_ON, leaderboard_lib.RETIRED, leaderboard_lib.GO_ON,
  ]  # fmt: skip
  assert board.decide(4, 1) == leaderboard_lib.WAIT  # for 3 and its own score
  board.add(4, 1, 10, {'anp_top1': 0.1})
  assert board.decide(4, 1) == leaderboard_lib.WAIT
  board.fail(3, 5, 'is not finite')
  assert board.decide(4, 1) == leaderboard_lib.RETIRED
  assert board.decide(3, 1) == leaderboard_lib.FAILED
  # What a later one brings changes nothing: its order is its number.
  board.add(5, 1, 10, {'anp_top1': 0.9})
  assert board.decide(2, 1) == leaderboard_lib.GO_ON
  # At the second rung those that left are not waited for.
  board.add(2, 2, 20, {'anp_top1': 0.7})
  assert board.decide(2, 2) == leaderboard_lib.WAIT
  board.add(0, 2, 20, {'anp_top1': 0.8})
  assert board.decide(2, 2) == leaderboard_lib.RETIRED
  assert board.status(2, 8) == leaderboard_lib.RETIRED
  assert board.decide(0, 3) == leaderboard_lib.GO_ON
  # Read again, a torn line left out, it decides alike.
  with open(tmp_path / 'relay.jsonl', 'a') as f:
    f.write('{"model": 0, "la')
  again = _board(tmp_path, 2, 8, {(0, 4): 0.9})
  again = _board(tmp_path, 2, 8, {})
  assert again.decide(2, 2) == leaderboard_lib.RETIRED
  assert again.last_scores(0)['laps'] == 4


@pytest.mark.slow
def test_search_fills_the_ring(tmp_path, stations):
  stations(2)
  config = relaying.config(
    tuple(f'seed={i}' for i in range(6)),
    **{'strategy.halving': 2, 'strategy.at_once': 2, 'duration': '4 epochs'},
  )
  train.run(config, str(tmp_path))
  records = [json.loads(line) for line in (tmp_path / 'relay.jsonl').open()]
  score = {(r['model'], r['laps']): r['anp_top1'] for r in records}
  # The rule once more, from the scores alone.
  inside = {}
  for rung in (1, 2):
    came = [m for m in range(6) if rung == 1 or inside[m]]
    went_on = {}
    for i, m in enumerate(came):
      ranked = sorted(came[: i + 1], key=lambda o: (-score[o, rung], o))
      went_on[m] = m in ranked[: math.ceil((i + 1) / 2)]
    inside = {m: went_on.get(m, False) for m in range(6)}
  assert {m for m, k in score if k == 4} == {m for m in inside if inside[m]}
  assert {m for m, k in score if k == 1} == set(range(6))
  spans = [s for s in spans_lib.read(str(tmp_path)) if s['what'] == 'train']
  stays = []
  for model in range(6):
    own = [s for s in spans if s['model'] == model]
    stays.append((min(s['start'] for s in own), max(s['end'] for s in own)))
  # Never more than two models on their way, and not one after another.
  counts = [sum(a <= begin < b for a, b in stays) for begin, _ in stays]
  assert max(counts) == 2


def test_ensemble_is_the_mean_of_probabilities(tmp_path):
  random = np.random.default_rng(0)
  labels = random.integers(0, 5, 50)
  weights = np.ones(50, np.float32)
  weights[7] = 0
  parts = random.dirichlet(np.ones(5), (3, 50)).astype(np.float32)
  nouns = random.dirichlet(np.ones(3), (3, 50)).astype(np.float32)
  folders = []
  for i, part in enumerate(parts):
    (tmp_path / str(i)).mkdir()
    folders.append(str(tmp_path / str(i)))
    scores = {'anp': part, 'noun': nouns[i]}
    ensemble.write(folders[-1], scores, labels, weights)
  ids = (0, 1, 2, 1, 0)
  objective = objective_lib.Objective(
    heads.Joint(5, (heads.Factor('noun', 3, ids),))
  )
  found = ensemble.score(folders, objective)
  mean = parts.astype(np.float64).mean(0)
  counted = weights > 0
  hits = (mean.argmax(-1) == labels)[counted]
  assert found['anp_top1'] == pytest.approx(hits.mean(), rel=1e-6)
  # A noun's probabilities are averaged too, not made of the pairs'.
  hits = (nouns.mean(0).argmax(-1) == np.array(ids)[labels])[counted]
  assert found['noun_top1'] == pytest.approx(hits.mean(), rel=1e-6)
  loss = -np.log(mean[np.arange(50), labels])[counted].mean()
  assert found['loss'] == pytest.approx(loss, rel=1e-5)  # float32 logarithms


@pytest.mark.slow
def test_evaluation_of_all_models(tmp_path, stations, capsys):
  stations(2)
  config = relaying.config(MODELS[:2])
  train.run(config, str(tmp_path))
  trained = capsys.readouterr().out
  stations(1)
  # Of a ring that still trains, and is writing this.
  save = tmp_path / 'models/000/checkpoints/99.orbax-checkpoint-tmp'
  save.mkdir()
  train.run(config, str(tmp_path), 'evaluate')
  assert save.is_dir()
  scored = capsys.readouterr().out
  for name in ('000', '001'):
    (line,) = [x for x in trained.splitlines() if f'{name}  lap 3' in x]
    (again,) = [x for x in scored.splitlines() if f'{name}  step' in x]
    assert line.partition(': ')[2] == again.partition(': ')[2]
  with pytest.raises(config_lib.ConfigError, match='expected newest or a step'):
    train.run(config, str(tmp_path), 'evaluate', 'best')
