"""How processes of a run find server 0, and what they do when it has left."""

import json
import os
import signal
import subprocess
import time
import types

from pyarrow import flight
import pytest

from anp_jax import cluster
from anp_jax.cluster import cluster_env
from anp_jax.cluster import process_info
from anp_jax.runtimes.server import log as log_lib
from anp_jax.runtimes.server import rendezvous
from anp_jax.runtimes.server import scheduler as desk_lib
from anp_jax.runtimes.server import secondary
from anp_jax.runtimes.server import service as service_lib
from anp_jax.runtimes.server import worker as worker_lib
from tests import launching
from tests import serving


@pytest.fixture(params=['follower', 'worker'])
def come(request, config, tmp_path):
  """Has a process come to a workdir in which there is no server 0."""
  config = serving.config_of(config, **{'cluster.rendezvous_timeout': 0.5})
  place = cluster_env.ClusterEnv('test', 1, 3, num_hosts=1)
  card = process_info.collect(place, config, {})
  folder = str(tmp_path)

  def connect(address=None):
    return rendezvous.connect(config, folder, address)

  def run(launched):
    if request.param == 'worker':
      worker_lib.Worker(1, config, connect, card, None, launched).run()
    else:
      made = secondary.Follower(1, config, folder, place, card, launched)
      made.run(connect, None)

  return run


def test_started_again_after_the_end_ends_as_the_run_did(come, tmp_path):
  before = time.time()
  rendezvous.close(str(tmp_path), '')
  come(before)
  rendezvous.close(str(tmp_path), 'update 3 is not finite')
  with pytest.raises(cluster.Failed, match='^update 3 is not finite$'):
    come(before)


@pytest.mark.timeout(20)
def test_run_before_is_none_to_wait_for_without_end(come, tmp_path):
  rendezvous.close(str(tmp_path), '')
  with pytest.raises(cluster.Lost, match='the run in this workdir has ended$'):
    come(time.time())
  # As earlier versions left it.
  (tmp_path / rendezvous.NAME).write_text(json.dumps({'over': ''}))
  with pytest.raises(cluster.Lost, match='the run in this workdir has ended$'):
    come(time.time())


def test_server_that_comes_anew_waits_for_the_next_term(config, tmp_path):
  """What this one's updates were made of is not there any more."""
  place = cluster_env.ClusterEnv('test', 0, 3, num_hosts=1)
  card = process_info.collect(place, config, {})
  desk = desk_lib.Desk(config, 5, 0, set())
  term = service_lib.Lead(
    'now', None, None, desk, None, [None, None], '', card, {}, ()
  )
  assert term.join(1, 'grpc://x:1', card) == {'term': 'now'}
  assert not term.lost
  assert term.join(1, 'grpc://x:2', card) == {'wait': True}
  assert term.lost
  assert term.join(1, 'grpc://x:2', card) == {'wait': True}


def test_request_on_its_way_at_the_end_of_a_term_has_its_worker_come_anew(
  config, tmp_path
):  # fmt: skip
  """It waits in a call which had come before."""
  log = log_lib.Log(str(tmp_path), 0, {})
  keeper = types.SimpleNamespace(close=lambda: None, holds=lambda *_: True)
  desk = desk_lib.Desk(config, 5, 0, set())
  term = service_lib.Lead(
    'now', None, keeper, desk, log, [None], '', {}, {}, ()
  )
  ticket = term.take('a')['ticket']
  part = {'ticket': ticket, 'reads': [0], 'weight': 1.0, 'values': {}}
  term.close()
  with pytest.raises(flight.FlightUnavailableError, match='come anew'):
    term.commit('a', part)
  assert [r for r in log_lib.read(str(tmp_path)) if 'order' in r] == []


def test_port_of_a_server_is_shut_also_where_the_run_has_ended(
  config, tmp_path, monkeypatch
):  # fmt: skip
  place = cluster_env.ClusterEnv('test', 1, 3, num_hosts=1)
  folder, before = str(tmp_path), time.time()
  written = {'address': 'grpc://x:1', 'token': 'of the run'}
  (tmp_path / rendezvous.NAME).write_text(json.dumps(written))
  real, shut = service_lib.Service.shutdown, []

  def shutdown(self):
    shut.append(self.address)
    real(self)

  def ask(name, **request):
    rendezvous.close(folder, '')
    joined.append(request['address'])
    return {'wait': True}

  def connect():
    rendezvous.read(folder)
    return types.SimpleNamespace(ask=ask)

  joined = []
  monkeypatch.setattr(service_lib.Service, 'shutdown', shutdown)
  secondary.Follower(1, config, folder, place, {}, before).run(connect, None)
  assert shut == joined and len(shut) == 1


def test_a_process_that_ended_by_ctrl_c_is_not_started_again():
  """Though above 128, as what a signal has ended."""
  done = subprocess.run(
    ['scripts/again.sh', '3', 'bash', '-c', 'echo started; exit 130'],
    cwd=launching.ROOT, capture_output=True, text=True, check=False,
  )  # fmt: skip
  assert (done.returncode, done.stdout) == (130, 'started\n')


def test_what_is_started_again_knows_when_it_was_launched(monkeypatch):
  monkeypatch.delenv('ANP_LAUNCHED', raising=False)
  before = time.time()
  assert before <= rendezvous.launched() <= time.time()
  found = subprocess.run(
    ['scripts/again.sh', '1', 'bash', '-c', 'echo $ANP_LAUNCHED; kill -9 $$'],
    cwd=launching.ROOT, capture_output=True, text=True,
  )  # fmt: skip
  assert found.returncode == 128 + signal.SIGKILL
  first, second = found.stdout.split()
  assert first == second
  # In whole seconds, but not before it was.
  assert before <= float(first) <= time.time() + 1
  monkeypatch.setitem(os.environ, 'ANP_LAUNCHED', first)
  assert rendezvous.launched() == float(first)
