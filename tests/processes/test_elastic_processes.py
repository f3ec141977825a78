"""A process of a run is lost, and the others go on in place with the same bits."""

import json
import os
import pathlib
import random
import re
import signal
import time

import numpy as np
import pytest

from anp_jax.cluster import generation
from anp_jax.reporting import telemetry
from anp_jax.system import files
from anp_jax.tools import top
from tests import builders, launching, network_hosts, ports, serving

pytestmark = pytest.mark.multiprocess

_INVARIANT = {'strategy.name': 'invariant', 'strategy.logical_shards': '12'}
_BATCH, _EXAMPLES = 24, 240
_KEYS = {
  'batch_size': str(_BATCH),
  'model.norm_group': '2',
  'data.source': 'tests.user_source:Numbered',
  'data.image_size': '28',
  'data.resize': '28',
  'data.augment': 'none',
  'checkpoint.best_metric': 'loss',  # falls at nearly each evaluation
  'cluster.heartbeat_timeout': '3',
  'cluster.mirror_every': '1',
  'eval.every': '20 steps',
}
# Learned so slowly that nearly each evaluation has a best checkpoint.
_LENET = {
  **launching.CONSTANT,
  'optimizer.learning_rate': '0.001',
  'checkpoint.every': '15 steps',
  'checkpoint.keep_best': '3',
  'eval.every': '10 steps',
  'cluster.heartbeat_timeout': '20',
  'log.every': '1 steps',
  'log.tensorboard': 'False',
}
_WITHIN = 100  # seconds for a start on a machine that does other work
_LONG = 1800  # likewise for any number of steps


def _arguments(workdir, steps, strategy=_INVARIANT, **keys):
  duration = {'duration': f'{steps} steps'}
  return launching.arguments(workdir, **{**_KEYS, **strategy, **duration, **keys})


def _lines(workdir, kind):
  return telemetry.of_kind(str(workdir), kind)


def _has_gone_on(workdir, restarts):
  """Whether the run has made a step after so many restarts."""
  lines = _lines(workdir, 'restart')
  steps = [line['step'] for line in _lines(workdir, 'train')]
  return len(lines) >= restarts and steps[-1] > lines[-1]['step'] + 2


@pytest.fixture
def three(tmp_path):
  """The workdir and ranks of three processes that have made some steps."""
  workdir = tmp_path / 'run'
  # Longer steps, or the run would be over first.
  environment = {'ANP_PAUSE': '0.2', **_recorded(tmp_path)}
  with launching.Ranks(tmp_path, 3, _arguments(workdir, 60), environment=environment) as ranks:
    launching.wait_until(lambda: len(_lines(workdir, 'train')) > 3)
    yield workdir, ranks


@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory):
  """The workdir of the same run in one process."""
  folder = tmp_path_factory.mktemp('undisturbed')
  arguments, environment = _arguments(folder / 'run', 60), _recorded(folder)
  launching.run(folder, 1, arguments, environment=environment, timeout=_LONG)
  return folder / 'run'


def _recorded(folder):
  """Variables of processes that record there what they train on."""
  return {'ANP_BATCHES': str(folder / 'batches')}


def _losses(workdir):
  lines = _lines(workdir, 'train')
  assert [line['step'] for line in lines] == list(range(1, len(lines) + 1))
  return [line['loss'] for line in lines]


def _assert_same(workdir, undisturbed):
  """Losses, validations, scores, and the newest and the best checkpoints: all bits."""
  assert _losses(workdir) == _losses(undisturbed)
  assert _validations(workdir) == _validations(undisturbed)
  assert _scores(workdir) == _scores(undisturbed)
  for read in launching.weights, launching.best_weights:
    serving.same_bits(read(workdir), read(undisturbed))


def _validations(workdir):
  """The numbers of all evaluations, which do not repeat."""
  return [{**line, 'time': 0} for line in _lines(workdir, 'validation')]


def _scores(workdir):
  """The text of each scores.json by its path in the run."""
  return {str(p.relative_to(workdir)): p.read_text() for p in workdir.rglob('scores.json')}


def _assert_trained_the_same(workdir, undisturbed, steps):
  """The recorded examples: of each step the undisturbed run's, and of each epoch all, once."""
  numbers = _trained(workdir.parent / 'batches', steps)
  np.testing.assert_array_equal(numbers, _trained(undisturbed.parent / 'batches', steps))
  per_epoch = _EXAMPLES // _BATCH
  epochs = numbers[: steps - steps % per_epoch].reshape(-1, _EXAMPLES)
  np.testing.assert_array_equal(np.sort(epochs), np.tile(np.arange(_EXAMPLES), (len(epochs), 1)))


def _trained(folder, steps):
  """(steps, batch) numbers of the images by row, in the last generation that made a step."""
  last: dict[int, tuple[int, list]] = {}
  for path in folder.iterdir():
    for r in files.read_json_lines(str(path)):
      newest, pairs = last.get(r['step'], (-1, []))
      if r['generation'] > newest:
        newest, pairs = r['generation'], []
      if r['generation'] == newest:
        last[r['step']] = newest, [*pairs, *zip(r['rows'], r['numbers'], strict=True)]
  batches = []
  for step in range(1, steps + 1):
    rows, numbers = zip(*sorted(last[step][1]), strict=True)
    assert rows == tuple(range(_BATCH)), f'step {step}'  # none is lost or repeated
    batches.append(numbers)
  return np.array(batches)


@pytest.mark.parametrize('lost', [0, builders.soak(2)])
def test_the_others_go_on_and_one_that_comes_back_takes_part(three, undisturbed, lost, capsys):
  """The bits are those of one process, which was never disturbed."""
  workdir, ranks = three
  assert top.main(['anp-top', str(workdir), '--stacks']) == 0
  launching.wait_until(lambda: all('threads\n' in ranks.text(rank) for rank in range(3)))
  ranks.processes[lost].kill()
  launching.wait_until(lambda: _has_gone_on(workdir, 1))
  capsys.readouterr()
  assert top.main(['anp-top', str(workdir), '--once']) == 0
  _, *rows, loss, verdict = capsys.readouterr().out.splitlines()
  assert sorted(int(row.split()[1]) for row in rows) == [r for r in range(3) if r != lost]
  assert re.fullmatch(rf' rank {lost} on \S+ has gone: .*, at step \d+', loss)
  assert 'rank' in verdict or 'no process is late' in verdict
  ranks.restart(lost, joins=True)
  launching.wait_until(lambda: _has_gone_on(workdir, 2))
  text = ''.join(ranks.ends(0, 0, 0))
  gone, back = _lines(workdir, 'restart')[:2]
  assert gone['processes'] == 2 and back['processes'] == 3 and not back['lost']
  assert gone['repeated'] <= 2
  assert re.fullmatch(rf'rank {lost} on \S+ has gone: .*', gone['lost'][0])
  assert f'{gone["lost"][0]}: going on with 2 of 3 processes from step {gone["step"]};' in text
  _assert_same(workdir, undisturbed)
  _assert_trained_the_same(workdir, undisturbed, 60)


@pytest.mark.parametrize(
  'keys',
  [
    {'strategy.name': 'sync', 'sharding': "(('.*', 'fsdp'),)"},
    builders.soak({'strategy.name': 'local_sgd', 'strategy.groups': '4', 'strategy.period': '3'}),
  ],
  ids=['fsdp', 'local_sgd'],
)
def test_a_divided_state_survives_in_the_memory_of_the_others(tmp_path, keys):
  """No checkpoint is there; the part of the lost process is with the one before it."""
  rare = {'eval.every': '1000 steps'}
  launching.run(tmp_path, 1, _arguments(tmp_path / 'alone', 30, keys, **rare), devices=4)
  workdir = tmp_path / 'run'
  start = _arguments(workdir, 30, keys, **rare)
  with launching.Ranks(tmp_path, 4, start, environment={'ANP_PAUSE': '0.2'}) as ranks:
    launching.wait_until(lambda: len(_lines(workdir, 'train')) > 4)
    ranks.processes[2].kill()
    assert ranks.wait(_WITHIN)[:2] == [0, 0]
  (line,) = _lines(workdir, 'restart')
  assert line['step'] > 2 and not (workdir / f'checkpoints/{line["step"]}').exists()
  # Sums over another number of devices round differently.
  np.testing.assert_allclose(_losses(workdir), _losses(tmp_path / 'alone'), atol=1e-5)


@pytest.mark.parametrize(
  'kills',
  [
    ['2 input 1 KILL'],
    builders.soak(['1 compiling 1 KILL']),
    builders.soak(['0 evaluating 1 KILL']),
    builders.soak(['1 saving 1 KILL']),
    builders.soak(['0 step 9 KILL', '1 joining 1 KILL']),  # it was rank 2
  ],
  ids=lambda kills: kills[-1].split()[1],
)
def test_one_is_killed_at_a_named_moment(tmp_path, undisturbed, kills):
  workdir, log = tmp_path / 'run', tmp_path / 'kills'
  environment = {
    'ANP_KILL': ';'.join(kills),
    'ANP_KILL_LOG': str(log),
    'ANP_STALL': '2 9' if 'input' in kills[0] else '',
    **_recorded(tmp_path),
  }
  with launching.Ranks(tmp_path, 3, _arguments(workdir, 60), environment=environment) as ranks:
    statuses = ranks.wait(_LONG)
  assert log.read_text().splitlines() == kills, ranks.text()
  assert sorted(statuses) == [-signal.SIGKILL] * len(kills) + [0] * (3 - len(kills))
  assert _lines(workdir, 'restart')[-1]['processes'] == 3 - len(kills)
  _assert_same(workdir, undisturbed)
  _assert_trained_the_same(workdir, undisturbed, 60)


def test_one_that_was_stopped_comes_back_as_a_spare(three, undisturbed):
  workdir, ranks = three
  os.kill(ranks.processes[0].pid, signal.SIGSTOP)
  launching.wait_until(lambda: _has_gone_on(workdir, 1))
  os.kill(ranks.processes[0].pid, signal.SIGCONT)
  ranks.ends(0, 0, 0)
  assert 'rank 0 on' in _lines(workdir, 'restart')[0]['lost'][0]
  assert 'has been silent for 3 s' in _lines(workdir, 'restart')[0]['lost'][0]
  _assert_same(workdir, undisturbed)


def test_one_that_is_told_to_leave_hands_over(three, undisturbed):
  workdir, ranks = three
  ranks.processes[1].terminate()
  assert 'the other processes go on with the run' in ranks.ends(0, 0, 0)[1]
  (line,) = _lines(workdir, 'restart')
  assert line['processes'] == 2 and line['repeated'] == 0
  assert re.fullmatch(r'rank 1 on \S+ was told to leave', line['lost'][0])
  _assert_same(workdir, undisturbed)


def test_too_few_processes_end_the_run(tmp_path):
  arguments = _arguments(tmp_path / 'run', 10000, **{'cluster.min_processes': '2'})
  with launching.Ranks(tmp_path, 2, arguments) as ranks:
    launching.wait_until(lambda: len(_lines(tmp_path / 'run', 'train')) > 3)
    ports.assert_those_of_sync(ranks.processes, elastic=True)
    ranks.processes[1].kill()
    assert ranks.wait_for(0, _WITHIN) == 75
    assert 'fewer than config.cluster.min_processes=2' in ranks.text(0)


def test_too_few_that_would_be_left_save_and_stop(tmp_path):
  workdir = tmp_path / 'run'
  keys = {'cluster.min_processes': '2', 'checkpoint.every': '10000 steps'}
  environment = {'ANP_PAUSE': '0.2'}
  arguments = _arguments(workdir, 10000, **keys)
  with launching.Ranks(tmp_path, 2, arguments, environment=environment) as ranks:
    launching.wait_until(lambda: len(_lines(workdir, 'train')) > 3)
    ranks.processes[1].terminate()
    assert ranks.wait(_WITHIN) == [0, 0]
  assert json.loads((workdir / 'stopped.json').read_text())['total'] == 10000
  names = [path.name for path in (workdir / 'checkpoints').iterdir()]
  assert str(_lines(workdir, 'train')[-1]['step']) in names


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize('rank, heals', [(3, True), (0, False)], ids=['heals', 'stays'])
def test_a_host_is_cut_off(tmp_path, undisturbed, rank, heals):
  """The others go on; it finds them again, or ends when it has heard of nobody."""
  workdir, name = tmp_path / 'run', f'{network_hosts.PREFIX}{rank}'
  environment = {'ANP_PAUSE': '0.4', 'ANP_HOSTS': network_hosts.PREFIX, **_recorded(tmp_path)}
  with network_hosts.open_hosts(4) as host:
    place = f'--coordinator={host}:{launching.free_port()}'
    arguments = _arguments(workdir, 60, **{'cluster.heartbeat_timeout': '10'})
    with launching.Ranks(tmp_path, 4, [*arguments, place], environment=environment) as ranks:
      launching.wait_until(lambda: len(_lines(workdir, 'train')) > 3, _LONG)
      network_hosts.cut(rank)
      if heals:
        launching.wait_until(lambda: _is_restarted(ranks.processes[0]), _LONG)
        network_hosts.heal(rank)
      ranks.ends(*(75 if i == rank and not heals else 0 for i in range(4)), timeout=_LONG)
  lines = _lines(workdir, 'restart')
  assert re.match(rf'rank {rank} on {name} has been silent for 1\d s', lines[0]['lost'][0])
  assert lines[-1]['processes'] == 3 + heals
  if not heals:
    assert f'rank 3 may go on without rank {rank} on {name}: ending' in ranks.text(rank)
  _assert_same(workdir, undisturbed)
  _assert_trained_the_same(workdir, undisturbed, 60)


def _is_restarted(process):
  """Whether a process is another program than the one that forked."""
  environment = pathlib.Path(f'/proc/{process.pid}/environ').read_bytes()
  return f'{generation.VARIABLE}='.encode() in environment


def _lenet(workdir, steps, strategy):
  keys = {**_KEYS, **_LENET, **strategy, 'duration': f'{steps} steps'}
  del keys['model.norm_group']
  return ['--config=configs/lenet.py', f'--workdir={workdir}', *launching.typed(keys)]


@pytest.mark.soak
@pytest.mark.timeout(0)  # as many as are asked for
@pytest.mark.parametrize(
  ('strategy', 'environment'),
  [(_INVARIANT, {}), ({'strategy.name': 'sync', **launching.FLOAT64}, launching.X64)],
  ids=['invariant', 'sync'],
)
def test_random_losses_of_lenet(tmp_path, strategy, environment):
  """One or two of four, rank 0 too, at any moment; each comes back.

  The last steps, after a stop, end with an evaluation of each example.
  """
  workdir, alone = tmp_path / 'run', tmp_path / 'alone' / 'run'
  start = _lenet(workdir, 10**6, strategy)
  recorded = {**environment, **_recorded(tmp_path)}
  with launching.Ranks(tmp_path, 4, start, environment=recorded | {'ANP_PAUSE': '0.05'}) as ranks:
    _lose_at_random(ranks, workdir)
    for process in ranks.processes:
      process.terminate()
    ranks.ends(0, 0, 0, 0, timeout=_LONG)
  step = json.loads((workdir / 'stopped.json').read_text())['step']
  environment = environment | {'ANP_BATCHES': str(tmp_path / 'last')}
  options = {'environment': environment, 'timeout': _LONG}
  launching.run(tmp_path, 4, _lenet(workdir, step + 20, strategy), **options)
  options['environment'] = recorded | _recorded(alone.parent)
  launching.run(alone.parent, 1, _lenet(alone, step + 20, strategy), **options)
  _assert_trained_the_same(workdir, alone, step)
  # Sums over another number of devices round differently.
  np.testing.assert_allclose(_losses(workdir), _losses(alone), rtol=0, atol=1e-5)
  if strategy is _INVARIANT:
    assert len(_scores(alone)) == 1
    _assert_same(workdir, alone)
  print(f'{step + 20} steps, {len(_lines(workdir, "restart"))} restarts')


def _lose_at_random(ranks, workdir):
  """Kills one or two processes again and again, and has them join again."""
  chance = random.Random(int(os.environ.get('ANP_SEED', '0')))
  launching.wait_until(lambda: _lines(workdir, 'train'), _LONG)
  lost: list[int] = []
  for number in range(int(os.environ.get('ANP_LOSSES', '3'))):
    time.sleep(chance.uniform(0, 8))
    comes = lost
    while not {*range(4)} - {*lost, *comes} or lost is comes:  # one stays that takes part
      lost = chance.sample(range(4), chance.choice([1, 2]))
    before = len(_lines(workdir, 'train'))
    print(f'loss {number}: ranks {lost} at step {before}', flush=True)
    for rank in lost:
      ranks.processes[rank].kill()
    launching.wait_until(
      lambda before=before: len(_lines(workdir, 'train')) > before + 1, _LONG, ranks.text
    )
    for rank in lost:
      ranks.restart(rank, joins=True)
  launching.wait_until(lambda: _lines(workdir, 'restart')[-1]['processes'] == 4, _LONG, ranks.text)
