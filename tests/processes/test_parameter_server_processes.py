"""The server strategy over real processes; some are killed."""

import json
import os
import random
import signal
import time

import pytest

from anp_jax import cluster
from anp_jax.reporting import telemetry
from anp_jax.runtimes.parameter_server import log as log_lib
from anp_jax.tools import top
from tests import builders, launching

pytestmark = pytest.mark.multiprocess

_KEYS = {
  'strategy.name': 'parameter_server',
  'strategy.in_flight': '2',
  'cluster.heartbeat_timeout': '3',
  'cluster.rendezvous_timeout': '60',
  'model.name': 'tests.user_network:SmallNet',
  'data.image_size': '8',
  'data.resize': '8',
  'log.every': '20 steps',
  'checkpoint.every': '50 steps',
  'eval.every': '1000 steps',
}


def _arguments(folder, **keys):
  return launching.arguments(folder / 'run', **{**_KEYS, **keys})


def _updates(folder):
  return [r for r in log_lib.read(str(folder / 'run')) if 'order' in r]


def _until(folder, count, ranks):
  """Waits for this many updates."""
  launching.wait_until(lambda: len(_updates(folder)) >= count, 90, ranks.text)


def _whole(folder, total):
  """Every ticket once, and a replay that gives the same bits."""
  updates = _updates(folder)
  assert [u['order'] for u in updates] == list(range(total))
  tickets = [p['ticket'] for u in updates for p in u['parts']]
  assert sorted(tickets) == [[s, 0] for s in range(total)]
  assert f'{total} updates, the same bits' in launching.replayed(folder / 'run')


# Of those that were killed, and those that ended because a server was.
_LOST = -signal.SIGKILL, cluster.termination.TRY_AGAIN


def _start_lost_ones_again(ranks):
  for rank, process in enumerate(ranks.processes):
    if process.poll() in _LOST:
      ranks.restart(rank)


def _wait(ranks, seconds):
  """Waits for a good end of all."""

  def have_ended():
    _start_lost_ones_again(ranks)
    # All may be lost between two looks.
    return all(p.poll() not in (None, *_LOST) for p in ranks.processes)

  launching.wait_until(have_ended, seconds, ranks.text)
  ranks.ends(0, 0, 0)


@pytest.mark.parametrize(
  'servers, devices', [(1, 1), builders.soak(2, 1), builders.soak(1, 2)], ids=['1', '2', 'mixed']
)
def test_three_processes_and_their_replay(tmp_path, servers, devices):
  """Also where the environment names a proxy: nobody asks it."""
  arguments = _arguments(tmp_path, duration='100 steps', **{'strategy.servers': str(servers)})
  more = {'environment': launching.dead_proxy(), 'last_arguments': ['--join']}
  with launching.Ranks(tmp_path, 3, arguments, devices, **more) as ranks:
    texts = ranks.ends(0, 0, 0)
    ranks.restart(2)  # after the end: it waits for nobody
    assert ranks.wait_for(2, 30) == 0
    assert ranks.text(2) == f'{texts[2]}the run in {tmp_path / "run"} has ended\n'
  _whole(tmp_path, 100)
  workers = {p['worker'] for u in _updates(tmp_path) for p in u['parts']}
  assert len(workers) > 1  # on a busy machine the third may come too late
  assert not telemetry.of_kind(str(tmp_path / 'run'), 'restart')  # nobody was lost, or came later
  kinds = [r['kind'] for r in telemetry.read(str(tmp_path / 'run'))]
  assert kinds.count('train') == 5 and kinds.count('validation') == 1


@pytest.mark.soak
def test_dedicated_server_and_evaluation(tmp_path):
  arguments = _arguments(tmp_path, duration='20 steps', **{'strategy.dedicated': 'True'})
  launching.run(tmp_path, 2, arguments)
  _whole(tmp_path, 20)
  ranks = {p['worker'][0] for u in _updates(tmp_path) for p in u['parts']}
  assert ranks == {'1'}
  (text,) = launching.run(tmp_path / 'score', 1, [*arguments, '--mode=evaluate'])
  assert 'checkpoint of step 20, 70 images' in text


@pytest.mark.slow
@pytest.mark.soak
def test_stopped_workers_ticket_goes_to_another(tmp_path):
  keys = {'strategy.mode': 'rennala', 'strategy.parts': '1'}
  arguments = _arguments(tmp_path, duration='200 steps', **keys)
  with launching.Ranks(tmp_path, 3, arguments) as ranks:
    _until(tmp_path, 40, ranks)
    os.kill(ranks.processes[1].pid, signal.SIGSTOP)
    code = ranks.wait_for(0, 120)
    assert code == 0, ranks.text(0)
  _whole(tmp_path, 200)
  assert set(log_lib.staleness(_updates(tmp_path))) == {0}


@pytest.mark.slow
@pytest.mark.soak  # CI has one in each phase
def test_random_kills(tmp_path):
  """Any of three processes, two of them servers, at any moment."""
  rng = random.Random(0)
  kills = int(os.environ.get('ANP_KILLS', '5'))
  # Enough that the run does not end before the last kill: who is started after
  # the end waits for another run.
  steps = 160 * kills
  arguments = _arguments(tmp_path, duration=f'{steps} steps', **{'strategy.servers': '2'})
  with launching.Ranks(tmp_path, 3, arguments) as ranks:
    for _ in range(kills):
      _until(tmp_path, 1, ranks)
      time.sleep(rng.uniform(0, 3))
      ranks.processes[rng.randrange(3)].kill()
      time.sleep(1)
      _start_lost_ones_again(ranks)
    _wait(ranks, 300)
  _whole(tmp_path, steps)


@pytest.mark.slow
@pytest.mark.parametrize(
  'kills', [['2 push 5', '0 save 1'], builders.soak(['2 pull 5', '1 apply 20'])]
)
def test_a_kill_in_each_phase(tmp_path, kills, capsys):
  """Ranks 0 and 1 are servers; what is half done has to be undone."""
  log = tmp_path / 'kills'
  log.touch()
  steps = 640  # enough that the run does not end before the last kill
  arguments = _arguments(tmp_path, duration=f'{steps} steps', **{'strategy.servers': '2'})
  environment = {'ANP_KILL_CALL': ';'.join(kills), 'ANP_KILL_LOG': str(log)}
  with launching.Ranks(tmp_path, 3, arguments, environment=environment) as ranks:
    _until(tmp_path, 1, ranks)
    assert top.main(['anp-top', str(tmp_path / 'run'), '--once']) == 0
    _, *rows, verdict = capsys.readouterr().out.splitlines()
    assert {int(row.split()[1]) for row in rows} >= {0, 1}
    assert verdict == ' no process is late'
    _wait(ranks, 400)
  assert log.read_text().splitlines() == kills
  _whole(tmp_path, steps)
  # A server that was killed has returned all to a checkpoint.
  starts = [r['start'] for r in log_lib.read(str(tmp_path / 'run')) if 'start' in r]
  assert all(start % 50 == 0 for start in starts), starts


@pytest.mark.soak
def test_signal_stops_all_and_the_same_command_goes_on(tmp_path):
  arguments = _arguments(tmp_path, duration='400 steps')
  with launching.Ranks(tmp_path, 2, arguments) as ranks:
    _until(tmp_path, 30, ranks)
    os.kill(ranks.processes[1].pid, signal.SIGTERM)
    assert 'run the same command to resume' in ranks.ends(0, 0)[0]
  stopped = json.loads((tmp_path / 'run' / 'stopped.json').read_text())
  assert 0 < stopped['step'] < 400
  launching.run(tmp_path / 'again', 2, arguments)
  _whole(tmp_path, 400)


def test_number_that_is_not_finite_ends_all_and_saves_nothing(tmp_path):
  arguments = _arguments(tmp_path, duration='400 steps', **{'optimizer.learning_rate': '1e30'})
  for text in launching.ended(tmp_path, [1, 1], arguments):
    assert 'is not finite' in text
  assert not any(p.name.isdigit() for p in (tmp_path / 'run' / 'checkpoints').iterdir())
  # Nor does it say that it has ended well.
  assert 'ended' not in (tmp_path / 'run' / 'members.json').read_text()
