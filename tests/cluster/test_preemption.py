"""Signals and the end of a run's time become votes; stops end in time."""

import contextlib
import signal
import types

import pytest

from anp_jax.cluster import preemption
from tests import builders, coordinating, launching

_NOW = 1_700_000_000.0  # seconds since 1970


def _stop(environment=None, stop_seconds=float, minutes=0.0, clock=lambda: _NOW, tell=None):
  settings = types.SimpleNamespace(stop_timeout=60.0)
  config = types.SimpleNamespace(time_limit=minutes, cluster=settings)
  return preemption.StopHandler(config, stop_seconds, tell, environment or {}, clock)


def _votes_at(stop, clock, seconds):
  """Whether the vote becomes one of time within a second of these."""
  clock.now = _NOW + seconds - 1
  before = stop.vote()
  clock.now = _NOW + seconds + 1
  return (before, stop.vote()) == (preemption.CONTINUE, preemption.TIME_LIMIT)


def test_the_time_that_a_stop_takes_is_left(capsys):
  clock = builders.Clock(_NOW)
  stop = _stop(minutes=10.0, clock=clock, stop_seconds=lambda: 120.0)
  assert _votes_at(stop, clock, 600 - 15 - 120)
  assert '134 s of time are left: saving, then stopping' in (capsys.readouterr().err)
  clock.now += 1e6
  assert stop.vote() == preemption.TIME_LIMIT
  assert capsys.readouterr().err == ''


@pytest.mark.parametrize(
  'text, minutes, ends',
  [
    ('', 0.0, None),
    ('1700000300', 0.0, 300),
    ('1700000300', 10.0, 300),
    ('1700000300', 1.0, 60),
    ('1699999999', 10.0, 600),  # of a job that has ended
    ('', 10.0, 600),
    ('Unknown', 10.0, 600),
  ],
)
def test_the_end_of_a_limit_or_of_slurms_job(text, minutes, ends):
  clock = builders.Clock(_NOW)
  stop = _stop({'SLURM_JOB_END_TIME': text}, minutes=minutes, clock=clock)
  if ends is None:
    clock.now += 1e9
    assert stop.vote() == preemption.CONTINUE
  else:
    assert _votes_at(stop, clock, ends - 15)  # 15 s are left over, for whatever else


@pytest.mark.parametrize(
  'left, needed, allowed',
  [
    (None, 0, 60),
    (None, 100, 160),  # as long as saves have taken, and stop_timeout
    (3600, 100, 160),
    (120, 0, 115),  # Slurm's signal before the end of the job
    (120, 100, 160),
    (30, 0, 60),
  ],
)
def test_seconds_that_a_stop_may_take(left, needed, allowed):
  text = str(int(_NOW) + left) if left else ''
  stop = _stop({'SLURM_JOB_END_TIME': text}, stop_seconds=lambda: needed)
  assert stop._max_stop_seconds() == allowed


def test_a_signal_outweighs_the_time_limit():
  clock = builders.Clock(_NOW)
  stop = _stop(minutes=1.0, clock=clock)
  clock.now += 59
  assert stop.vote() == preemption.TIME_LIMIT
  stop._receive(signal.SIGTERM)
  assert stop.vote() == preemption.STOP


def test_no_thread_but_the_main_one_catches_signals():
  stop = _stop()
  before = signal.getsignal(signal.SIGTERM)
  coordinating.at_once([lambda: stop.listen(print)])
  assert signal.getsignal(signal.SIGTERM) is before
  stop.close()


def test_signals_are_given_back():
  stop = _stop()
  before = [signal.getsignal(n) for n in preemption.SIGNALS]
  old = signal.set_wakeup_fd(-1)
  try:
    stop.listen(print)
    stop.close()
    assert [signal.getsignal(n) for n in preemption.SIGNALS] == before
    assert signal.set_wakeup_fd(-1) == -1
  finally:
    signal.set_wakeup_fd(old)


_PROGRAM = """
import hashlib
import os
import sys
import threading
import time
import types
from anp_jax.cluster import preemption

echo, stop_timeout, then = sys.argv[1:]
preemption._ECHO = preemption._PASSED_ON = float(echo)
settings = types.SimpleNamespace(stop_timeout=float(stop_timeout))
config = types.SimpleNamespace(time_limit=0.0, cluster=settings)

def cannot(text):
  print(text, flush=True)
  os._exit(75)

def end_echoes():
  for name in sys.stdin:
    setattr(preemption, name.strip(), 0.0)
    print('over', flush=True)

def vote():
  while not stop.vote():
    time.sleep(0.005)
  print('vote', stop.vote(), flush=True)

def vote_and_leave():
  vote()
  os._exit(3)

def receive(number):
  is_echo = stop._signal_time is not None
  preemption.StopHandler._receive(stop, number)
  if is_echo:
    print('heard', flush=True)

stop = preemption.StopHandler(config, environment={})
stop._receive = receive
stop.listen(cannot)
print('ready', flush=True)
if then == 'goes on':
  threading.Thread(target=end_echoes, daemon=True).start()
if then == 'computes':
  threading.Thread(target=vote_and_leave, daemon=True).start()
  hashlib.pbkdf2_hmac('sha256', b'a', b'b', 50_000_000)
vote()
if then == 'stops':
  stop.close()
  print('closed', flush=True)
time.sleep(0.5 if then == 'stops' else 20)
"""


@contextlib.contextmanager
def _child(echo=5, stop_timeout=0, then='goes on'):
  """The program above, once it listens."""
  with launching.start('-c', _PROGRAM, echo, stop_timeout, then) as child:
    child.hears('ready')
    yield child


@pytest.mark.parametrize(
  'first, again',
  [
    (signal.SIGTERM, signal.SIGTERM),
    (signal.SIGUSR1, signal.SIGTERM),
    (signal.SIGINT, signal.SIGINT),
  ],
)
def test_a_signal_is_a_vote_its_echo_nothing_and_another_leaves_at_once(first, again):
  """A launcher passes on the Ctrl-C that a terminal sends to all."""
  with _child(echo=60) as child:
    child.send_signal(first)
    child.hears(f'vote {preemption.STOP}')
    child.send_signal(again)
    child.hears('heard')
    print('_PASSED_ON' if again == signal.SIGINT else '_ECHO', file=child.stdin, flush=True)
    child.hears('over')
    child.send_signal(again)
    assert child.wait(10) == 128 + again
    text = child.stderr.read()
  assert text == f'\n{first.name}: saving, then stopping; once more to leave at once\n'


@pytest.mark.parametrize('number, is_for_one', [(signal.SIGTERM, True), (signal.SIGUSR1, False)])
def test_sigterm_may_be_for_one_process_of_an_elastic_run(number, is_for_one):
  """A batch script signals all by SIGUSR1; who is told votes once it is ordered to."""
  calls = []
  stop = _stop(tell=lambda: calls.append(1))
  stop._receive(number)
  assert (calls, stop.vote()) == (
    ([1], preemption.CONTINUE) if is_for_one else ([], preemption.STOP)
  )
  stop.order('stop')
  assert stop.vote() == preemption.STOP


_RESTARTED = """
import os, signal, sys, time
from anp_jax import config
from anp_jax.cluster import generation, preemption
if not generation.current().number:
  generation.restart(generation.Generation(1))
os.kill(os.getpid(), signal.{name})
stop = preemption.StopHandler(config.base(), environment={{}})
stop.listen(print)
while stop.vote() != preemption.STOP:
  time.sleep(0.01)
print('stops')
"""


@pytest.mark.parametrize('name', ['SIGTERM', 'SIGUSR1'])
def test_a_signal_during_a_restart_waits_until_somebody_listens(name):
  result = launching.python('-c', _RESTARTED.format(name=name), status=0)
  assert result.stdout == 'stops\n'


def test_a_stop_that_does_not_come_about():
  with _child(stop_timeout=0.3) as child:
    child.send_signal(signal.SIGTERM)
    child.hears(f'vote {preemption.STOP}')
    assert child.wait(10) == 75
    child.hears('could not stop within 0.3 s of SIGTERM')


@pytest.mark.parametrize(
  'echo, then, status',
  [
    (5, signal.SIGTERM, 0),  # a small run has stopped before Slurm sends it again
    (0, signal.SIGTERM, -signal.SIGTERM),
    (5, signal.SIGINT, -signal.SIGINT),
  ],
)
def test_a_stop_in_time_and_a_signal_after_it(echo, then, status):
  with _child(echo, stop_timeout=0.3, then='stops') as child:
    child.send_signal(signal.SIGTERM)
    child.hears(f'vote {preemption.STOP}')
    child.hears('closed')
    child.send_signal(then)
    assert child.wait(10) == status
    assert child.stdout.read() == ''


def test_a_signal_is_received_while_the_main_thread_computes():
  """Python runs no handler within a call of native code; the thread hears."""
  with _child(then='computes') as child:
    child.send_signal(signal.SIGTERM)
    assert child.wait(10) == 3
