"""How processes of a run find server 0, and what they do when it has left."""

import json
import os
import re
import subprocess
import types

from pyarrow import flight
import pytest

from anp_jax import cluster
from anp_jax.cluster import cluster_env
from anp_jax.runtimes.parameter_server import (
  gradient_worker as worker_lib,
  log as log_lib,
  rendezvous,
  scheduler as scheduler_lib,
  secondary,
  service as service_lib,
  session as session_lib,
)
from tests import launching, serving


@pytest.fixture
def config(config):
  """The tiny recipe with the strategy `parameter_server`."""
  return serving.config_of(config)


@pytest.fixture(params=['server', 'worker'])
def run_member(request, config, tmp_path):
  """Runs a process on a workdir in which there is no server 0."""
  config = serving.config_of(config, **{'cluster.rendezvous_timeout': 0.5})

  def run(launch='', while_it_runs=None):
    participant = serving.participant(config, tmp_path, 1, 3, launch)
    if while_it_runs:
      while_it_runs()
    if request.param == 'worker':
      worker_lib.Worker(participant, None).run()
    else:
      secondary.SecondaryServer(participant, None).run()

  return run


def _session(config, store=None, log=None, servers=1, chief=None):
  scheduler = scheduler_lib.TicketScheduler(config, 5, 0, set())
  process, launches = (chief.process, chief.launches) if chief else ({}, set())
  roster = session_lib.Roster(process, {}, {0: ''}, launches)
  return session_lib.ChiefSession('now', store, scheduler, log, [None] * servers, roster)


@pytest.fixture
def end_run(config, tmp_path):
  """Ends a run of some launches."""
  chief = serving.participant(config, tmp_path, 0, 3)

  def end(failed='', launches=()):
    chief.launches.clear()
    chief.launches.update(launches)
    chief.announce_end(failed)

  return end


def test_started_again_after_the_end_ends_as_the_run_did(run_member, end_run, capsys):
  launches = ['other', 'ours']
  end_run('', launches)
  run_member('ours')
  line = ': the run in this workdir has ended: leaving\n'
  assert capsys.readouterr().out.endswith(line)
  end_run('update 3 is not finite', launches)
  with pytest.raises(cluster.RunFailedError, match='^update 3 is not finite$'):
    run_member('ours')


@pytest.mark.parametrize('before, launch', [(None, ''), ('', 'ours'), ('failed', '')])
def test_a_run_that_ends_while_a_process_waits_is_its_own(
  run_member, end_run, capsys, before, launch
):
  """Whatever ended before it, and though nobody gave them a name."""
  if before is not None:
    end_run(before)
  run_member(launch, end_run)
  assert 'has ended: leaving' in capsys.readouterr().out
  with pytest.raises(cluster.RunFailedError, match='^no$'):
    run_member(launch, lambda: end_run('no'))


@pytest.mark.timeout(20)
@pytest.mark.parametrize('launch, launches', [('', ['']), ('our', ['ours'])])
def test_run_before_is_none_to_wait_for_without_end(run_member, end_run, launch, launches):
  end_run('not finite', launches)
  with pytest.raises(cluster.PeerLostError, match='the run in this workdir has ended: not finite$'):
    run_member(launch)


@pytest.fixture
def requests(end_run, tmp_path, monkeypatch):
  """Requests to a server 0 whose run ends after the first one."""
  record = {'address': 'x:1', 'session': 'a'}
  (tmp_path / rendezvous.NAME).write_text(json.dumps(record))
  requests = []

  def ask(name, **request):
    requests.append(request)
    end_run()
    return {'wait': True}

  def connect(self):
    rendezvous.read_address(self.workdir)
    return types.SimpleNamespace(ask=ask, close=lambda: None)

  monkeypatch.setattr(rendezvous.Participant, 'connect', connect)
  return requests


def test_the_end_of_a_run_names_the_launches_that_took_part(config, tmp_path):
  """Each of its own, as `scripts/restart_on_failure.sh` names them on several hosts."""
  chief = serving.participant(config, tmp_path, 0, 3, 'a')
  session = _session(config, servers=2, chief=chief)
  session.join(1, 'x:1', chief.process, 'b')
  session.hello('worker', chief.process, 1, 'c')
  session.hello('typed by hand', chief.process, 1, '')
  odd = {**chief.process, 'problem': 'no'}
  assert 'problem' in session.hello('odd', odd, 1, 'd')
  chief.announce_end('')
  record = rendezvous.last_record(str(tmp_path))
  assert record['over'] == '' and record['launches'] == ['a', 'b', 'c']


def test_a_server_joins_once_and_waits_for_the_next_session_when_it_is_restarted(config, tmp_path):
  """It has lost what this session's updates were applied to."""
  chief = serving.participant(config, tmp_path, 0, 3)
  process, session = chief.process, _session(config, servers=2, chief=chief)
  # Workers would be told to call it without TLS.
  (problem,) = _session(config, servers=2, chief=chief).join(1, 'grpc://x:1', process).values()
  assert "'grpc://x:1'" in problem
  assert session.join(1, 'x:1', process) == {'session': 'now'}
  assert session.status == session_lib.OPEN
  assert session.join(1, 'x:2', process) == {'wait': True}
  assert session.status == session_lib.LOST
  assert session.join(1, 'x:2', process) == {'wait': True}


def test_a_call_that_waits_when_its_session_ends_has_its_worker_reconnect(config, tmp_path):
  log = log_lib.UpdateLog(str(tmp_path), 0, {})
  store = types.SimpleNamespace(close=lambda: None, has_gradient=lambda *_: True)
  session = _session(config, store, log)
  ticket = session.take('a')['ticket']
  contribution = {'ticket': ticket, 'reads': [0], 'weight': 1.0, 'values': {}}
  session.close()
  with pytest.raises(flight.FlightUnavailableError, match='reconnect'):
    session.commit('a', contribution)
  assert [r for r in log_lib.read(str(tmp_path)) if 'order' in r] == []


def test_port_of_a_server_is_closed_also_where_the_run_has_ended(
  config, tmp_path, monkeypatch, requests
):
  real_shutdown, closed = service_lib.Service.shutdown, []

  def shutdown(self):
    closed.append(self.address)
    real_shutdown(self)

  monkeypatch.setattr(service_lib.Service, 'shutdown', shutdown)
  participant = serving.participant(config, tmp_path, 1, 3, 'ours')
  secondary.SecondaryServer(participant, None).run()
  (request,) = requests
  assert closed == [request['address']] and request['launch'] == 'ours'


def test_a_process_that_ended_by_ctrl_c_is_not_started_again():
  """Its status is above 128, like that of a signal."""
  result = subprocess.run(
    ['scripts/restart_on_failure.sh', '3', 'bash', '-c', 'echo started; exit 130'],
    cwd=launching.ROOT,
    capture_output=True,
    text=True,
    check=False,
  )
  assert (result.returncode, result.stdout) == (130, 'started\n')


def _launches(*command, **environment):
  """Names of launches that a command's processes print, one a line."""
  variables = {k: v for k, v in os.environ.items() if k != 'ANP_LAUNCHED'}
  result = subprocess.run(
    command,
    cwd=launching.ROOT,
    capture_output=True,
    text=True,
    env={**variables, **environment},
    check=False,
  )
  names = result.stdout.split()
  assert all(re.fullmatch('[0-9a-f]{32}', name) for name in names), names
  return names


def test_a_restarted_process_keeps_the_name_of_its_launch(monkeypatch):
  command = ('scripts/restart_on_failure.sh', '1', 'bash', '-c')
  lost = 'echo $ANP_LAUNCHED; kill -9 $$'
  first, second = _launches(*command, lost)
  assert first == second
  assert _launches(*command, lost)[0] != first  # another launch
  assert _launches(*command, lost, ANP_LAUNCHED='ab' * 16)[0] == 'ab' * 16
  monkeypatch.setenv('ANP_LAUNCHED', first)
  env = cluster_env.ClusterEnv('flags', 1, 2)
  assert rendezvous.launch_id(env) == first
  assert rendezvous.launch_id(env._replace(token='7.0.1')) == '7.0.1'
  monkeypatch.delenv('ANP_LAUNCHED')
  assert rendezvous.launch_id(env) == ''


@pytest.mark.parametrize('again', [(), ('--again=1',)], ids=str)
def test_processes_of_one_local_launch_share_its_name(tmp_path, again):
  python = tmp_path / 'python'
  python.write_text('#!/bin/sh\necho $ANP_LAUNCHED\n')
  python.chmod(0o755)
  names = _launches(
    'scripts/launch_local.sh', '3', *again, PYTHON=str(python), PORT='1', ANP_LAUNCHED='ab' * 16
  )
  assert len(names) == 3 and len({*names, 'ab' * 16}) == 2
