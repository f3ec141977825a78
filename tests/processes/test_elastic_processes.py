"""A process of a run is lost, and the others go on in place with the same bits."""

import json
import os
import random
import re
import signal
import time

import numpy as np
import pytest

from anp_jax.reporting import telemetry
from anp_jax.tools import top
from tests import builders, launching, ports, serving

pytestmark = pytest.mark.multiprocess

_INVARIANT = {'strategy.name': 'invariant', 'strategy.logical_shards': '12'}
_KEYS = {
  'batch_size': '24',
  'model.norm_group': '2',
  'data.synthetic_examples': '240',
  'cluster.heartbeat_timeout': '3',
  'cluster.mirror_every': '1',
  'eval.every': '20 steps',
}
_WITHIN = 100  # seconds for a start on a machine that does other work


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
  pause = {'ANP_PAUSE': '0.2'}  # a step, or the run would be over first
  with launching.Ranks(tmp_path, 3, _arguments(workdir, 60), environment=pause) as ranks:
    launching.wait_until(lambda: len(_lines(workdir, 'train')) > 3)
    yield workdir, ranks


@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory):
  """The weights and losses of the same run in one process."""
  folder = tmp_path_factory.mktemp('undisturbed')
  launching.run(folder, 1, _arguments(folder / 'run', 60))
  return launching.weights(folder / 'run'), _losses(folder / 'run')


def _losses(workdir):
  lines = _lines(workdir, 'train')
  assert [line['step'] for line in lines] == list(range(1, len(lines) + 1))
  return [line['loss'] for line in lines]


def _assert_same(workdir, undisturbed):
  weights, losses = undisturbed
  assert _losses(workdir) == losses
  serving.same_bits(launching.weights(workdir), weights)


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
@pytest.mark.timeout(0)  # as many as are asked for
def test_random_losses_change_no_bit(tmp_path):
  """One or two of four, rank 0 too, at any moment; each comes back."""
  chance = random.Random(int(os.environ.get('ANP_SEED', '0')))
  workdir = tmp_path / 'run'
  keys = {'schedule.name': 'constant', 'checkpoint.every': '50 steps', 'eval.every': '20 steps'}
  arguments = _arguments(workdir, 10**6, **keys)
  environment = {'ANP_PAUSE': '0.05'}
  with launching.Ranks(tmp_path, 4, arguments, environment=environment) as ranks:
    launching.wait_until(lambda: _lines(workdir, 'train'))
    lost: list[int] = []
    for _ in range(int(os.environ.get('ANP_LOSSES', '3'))):
      time.sleep(chance.uniform(0, 8))
      comes = lost
      while not {*range(4)} - {*lost, *comes} or lost is comes:  # one stays that takes part
        lost = chance.sample(range(4), chance.choice([1, 2]))
      for rank in lost:
        ranks.processes[rank].kill()
      before = len(_lines(workdir, 'train'))
      launching.wait_until(lambda before=before: len(_lines(workdir, 'train')) > before + 1)
      for rank in lost:
        ranks.restart(rank, joins=True)
    launching.wait_until(lambda: _lines(workdir, 'restart')[-1]['processes'] == 4)
    for process in ranks.processes:
      process.terminate()
    ranks.ends(0, 0, 0, 0)
  step = json.loads((workdir / 'stopped.json').read_text())['step']
  alone = tmp_path / 'alone'
  launching.run(tmp_path, 1, _arguments(alone, step, **keys))
  _assert_same(workdir, (launching.weights(alone), _losses(alone)))
