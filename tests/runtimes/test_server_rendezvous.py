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
from anp_jax.runtimes.server import log as log_lib
from anp_jax.runtimes.server import rendezvous
from anp_jax.runtimes.server import scheduler as scheduler_lib
from anp_jax.runtimes.server import secondary
from anp_jax.runtimes.server import service as service_lib
from anp_jax.runtimes.server import session as session_lib
from anp_jax.runtimes.server import worker as worker_lib
from tests import launching
from tests import serving


@pytest.fixture
def config(config):
  """The tiny recipe with the strategy `server`."""
  return serving.config_of(config)


@pytest.fixture(params=['server', 'worker'])
def run_member(request, config, tmp_path):
  """Runs a process on a workdir in which there is no server 0."""
  config = serving.config_of(config, **{'cluster.rendezvous_timeout': 0.5})

  def run(launched):
    participant = serving.participant(config, tmp_path, 1, 3, launched)
    if request.param == 'worker':
      worker_lib.Worker(participant, None).run()
    else:
      secondary.SecondaryServer(participant, None).run()

  return run


def _session(config, store=None, log=None, servers=1, process=None):
  scheduler = scheduler_lib.TicketScheduler(config, 5, 0, set())
  run = session_lib.RunInfo('', process or {}, {}, ())
  return session_lib.ChiefSession(
    'now', store, scheduler, log, [None] * servers, run
  )


def test_started_again_after_the_end_ends_as_the_run_did(run_member, tmp_path):
  before = time.time()
  rendezvous.announce_end(str(tmp_path), '')
  run_member(before)
  rendezvous.announce_end(str(tmp_path), 'update 3 is not finite')
  with pytest.raises(cluster.Failed, match='^update 3 is not finite$'):
    run_member(before)


@pytest.mark.timeout(20)
def test_run_before_is_none_to_wait_for_without_end(run_member, tmp_path):
  rendezvous.announce_end(str(tmp_path), '')
  with pytest.raises(cluster.Lost, match='the run in this workdir has ended$'):
    run_member(time.time())
  # As earlier versions left it.
  (tmp_path / rendezvous.NAME).write_text(json.dumps({'over': ''}))
  with pytest.raises(cluster.Lost, match='the run in this workdir has ended$'):
    run_member(time.time())


def test_a_restarted_server_waits_for_the_next_session(config, tmp_path):
  """It has lost what this session's updates were applied to."""
  process = serving.participant(config, tmp_path, 0, 3).process
  session = _session(config, servers=2, process=process)
  assert session.join(1, 'x:1', process) == {'session': 'now'}
  assert not session.lost
  assert session.join(1, 'x:2', process) == {'wait': True}
  assert session.lost
  assert session.join(1, 'x:2', process) == {'wait': True}


def test_a_server_whose_address_has_a_scheme_is_refused(config, tmp_path):
  """Workers would be told to call it without TLS."""
  process = serving.participant(config, tmp_path, 0, 3).process
  session = _session(config, servers=2, process=process)
  (problem,) = session.join(1, 'grpc://x:1', process).values()
  assert "'grpc://x:1'" in problem and session.addresses == {0: ''}
  assert session.failed == problem


def test_a_file_of_an_earlier_version_is_no_server_0(config, tmp_path):
  record = {'address': 'grpc://x:1', 'token': 'a'}
  (tmp_path / rendezvous.NAME).write_text(json.dumps(record))
  with pytest.raises(OSError, match='earlier version'):
    serving.participant(config, tmp_path, 1, 3).connect()


def test_a_call_that_waits_when_its_session_ends_has_its_worker_reconnect(
  config, tmp_path
):
  log = log_lib.UpdateLog(str(tmp_path), 0, {})
  store = types.SimpleNamespace(
    close=lambda: None, has_gradient=lambda *_: True
  )
  session = _session(config, store, log)
  ticket = session.take('a')['ticket']
  contribution = {'ticket': ticket, 'reads': [0], 'weight': 1.0, 'values': {}}
  session.close()
  with pytest.raises(flight.FlightUnavailableError, match='reconnect'):
    session.commit('a', contribution)
  assert [r for r in log_lib.read(str(tmp_path)) if 'order' in r] == []


def test_port_of_a_server_is_closed_also_where_the_run_has_ended(
  config, tmp_path, monkeypatch
):
  participant = serving.participant(config, tmp_path, 1, 3, time.time())
  server = secondary.SecondaryServer(participant, None)
  record = {'address': 'x:1', 'session': 'a'}
  (tmp_path / rendezvous.NAME).write_text(json.dumps(record))
  real_shutdown, closed, joined = service_lib.Service.shutdown, [], []

  def shutdown(self):
    closed.append(self.address)
    real_shutdown(self)

  def ask(name, **request):
    rendezvous.announce_end(str(tmp_path), '')
    joined.append(request['address'])
    return {'wait': True}

  def connect(self):
    rendezvous.read_address(self.workdir)
    return types.SimpleNamespace(ask=ask)

  monkeypatch.setattr(service_lib.Service, 'shutdown', shutdown)
  monkeypatch.setattr(rendezvous.Participant, 'connect', connect)
  server.run()
  assert closed == joined and len(closed) == 1


def test_a_process_that_ended_by_ctrl_c_is_not_started_again():
  """Its status is above 128, like that of a signal."""
  result = subprocess.run(
    ['scripts/again.sh', '3', 'bash', '-c', 'echo started; exit 130'],
    cwd=launching.ROOT, capture_output=True, text=True, check=False,
  )  # fmt: skip
  assert (result.returncode, result.stdout) == (130, 'started\n')


def test_a_restarted_process_knows_when_its_run_was_launched(monkeypatch):
  monkeypatch.delenv('ANP_LAUNCHED', raising=False)
  before = time.time()
  assert before <= rendezvous.launch_time() <= time.time()
  result = subprocess.run(
    ['scripts/again.sh', '1', 'bash', '-c', 'echo $ANP_LAUNCHED; kill -9 $$'],
    cwd=launching.ROOT, capture_output=True, text=True,
  )  # fmt: skip
  assert result.returncode == 128 + signal.SIGKILL
  first, second = result.stdout.split()
  assert first == second
  # In whole seconds, but not before it was.
  assert before <= float(first) <= time.time() + 1
  monkeypatch.setitem(os.environ, 'ANP_LAUNCHED', first)
  assert rendezvous.launch_time() == float(first)
