"""The watchdog of a process, by a clock that the test moves."""

from unittest import mock

import pytest

from anp_jax import cluster
from anp_jax.cluster import (
  client as client_lib,
  generation as generation_lib,
  termination,
  watchdog as watchdog_lib,
)
from tests import builders, launching


@pytest.fixture
def clock():
  return builders.Clock()


def _watchdog(clock, stall_timeout=100.0, **values):
  return watchdog_lib.Watchdog(stall_timeout, lambda state: None, clock=clock, **values)


def _steps(watchdog, clock, *seconds, first=1):
  """Begins these steps, each after the one before took so long."""
  for step, duration in enumerate(seconds, first):
    watchdog.heartbeat('input', step)
    watchdog.heartbeat('step', step)
    clock.now += duration


def _lasts(watchdog, clock, seconds):
  """Whether it is too long within a little of these seconds."""
  start = clock.now
  clock.now = start + seconds - 1
  before = watchdog.is_stalled()
  clock.now = start + seconds + 1
  return not before and watchdog.is_stalled()


def test_state(clock):
  watchdog = _watchdog(clock)
  clock.now += 3
  assert watchdog.state() == {'phase': 'starting', 'step': 0, 'seconds': 3.0}
  watchdog.heartbeat('saving', 7)
  clock.now += 2
  assert watchdog.state() == {'phase': 'saving', 'step': 7, 'seconds': 2.0}


@pytest.mark.parametrize(
  'phase, durations, seconds',
  [
    ('input', (1, 1, 1), 100),
    ('step', (1, 1, 1), 100),
    ('input', (30, 40, 20, 1), 400),  # ten times the longest step
    ('step', (40, *[1] * 33), 100),  # which is forgotten after 32
    *((phase, (), 1000) for phase in ('starting', 'compiling', 'saving', 'evaluating', 'leaving')),
    *((phase, (), 300) for phase in ('loading', 'joining', 'opening')),
  ],
)
def test_how_long_a_phase_may_last(clock, phase, durations, seconds):
  watchdog = _watchdog(clock, joining_timeout=300.0)
  _steps(watchdog, clock, *durations)
  watchdog.heartbeat(phase, 99)
  assert _lasts(watchdog, clock, seconds)


def test_a_pause_is_no_steps_time(clock):
  watchdog = _watchdog(clock)
  _steps(watchdog, clock, 1, 1)
  watchdog.heartbeat('saving', 2)
  clock.now += 90
  _steps(watchdog, clock, 1, 1, first=3)
  watchdog.heartbeat('input', 5)
  assert _lasts(watchdog, clock, 100)


def test_0_turns_it_off(clock):
  watchdog = _watchdog(clock, 0.0)
  watchdog.heartbeat('step', 1)
  clock.now += 1e9
  assert not watchdog.is_stalled()


def test_an_evaluation_that_gets_on_has_no_bound(clock, config):
  """However many batches it has; and it counts as one when a stop is near."""
  config.cluster.stall_timeout = 100.0
  processes = cluster.Processes(config)
  watchdog = processes._watchdog = _watchdog(clock)
  processes.heartbeat('evaluating', 5)
  batches = []
  for batch in processes.heartbeat_each(range(4), 'evaluating', 5):
    clock.now += 900
    assert not watchdog.is_stalled()
    batches.append(batch)
  assert batches == [0, 1, 2, 3]
  assert watchdog.state()['phase'] == 'evaluating'
  processes.heartbeat('input', 6)
  assert watchdog.expected_stop_seconds(2) == 2 * 3600


def test_saves_during_the_loop_count_when_a_stop_is_near(clock, config):
  config.time_limit = 2.0
  processes = cluster.Processes(config)
  processes._stop._clock = lambda: processes._stop._end - 60
  with processes.handling_signals():
    assert processes.vote() == cluster.preemption.CONTINUE
  with processes.handling_signals(lambda: 50.0):  # and a margin
    assert processes.vote() == cluster.preemption.TIME_LIMIT


def test_a_stop_is_expected_to_take_what_pauses_and_steps_took(clock):
  watchdog = _watchdog(clock)
  assert watchdog.expected_stop_seconds(2) == 0
  _steps(watchdog, clock, 3, 5, 1)
  watchdog.heartbeat('evaluating', 3)
  clock.now += 20
  watchdog.heartbeat('saving', 3)
  clock.now += 30
  assert watchdog.expected_stop_seconds(2) == 2 * 20 + 8 * 5
  watchdog.heartbeat('input', 4)
  assert watchdog.expected_stop_seconds(32) == 2 * 30 + 38 * 5


def test_time_in_which_the_process_is_stopped_is_no_stall(clock):
  """Neither in the step that is under way nor in the limit of the next ones."""
  watchdog = _watchdog(clock)
  watchdog._clock.tick()
  _steps(watchdog, clock, 1, 1, 1)
  for seconds in (1, 600, 1, 1):  # Ctrl-Z, and `fg` after 600 s
    clock.now += seconds
    assert not watchdog.is_stalled()
    watchdog._clock.tick()
  assert watchdog.state()['seconds'] < 10
  watchdog.heartbeat('input', 4)
  watchdog.heartbeat('step', 4)
  assert watchdog.timeout('step') == 100
  for _ in range(99):
    clock.now += 1
    watchdog._clock.tick()
  assert not watchdog.is_stalled()
  clock.now += 2
  assert watchdog.is_stalled()


def _pass(clock, period, reports, calls, count):
  """Moves a running watchdog's clock by periods, and lets it see each."""
  for _ in range(count):
    reports.clear()
    clock.now += period
    launching.wait_until(lambda: len(reports) > 1 or calls, 10, pause=0.001)


def test_it_reports_until_it_calls_once(clock):
  calls, reports, period = [], [], 2**-10  # whose sums are exact
  watchdog = watchdog_lib.Watchdog(100 * period, calls.append, reports.append, period, clock)
  watchdog.heartbeat('step', 7)
  watchdog.start()
  clock.now += 600  # stopped
  _pass(clock, period, reports, calls, 90)
  assert {k: reports[0][k] for k in ('phase', 'step')} == {'phase': 'step', 'step': 7}
  assert not calls
  _pass(clock, period, reports, calls, 15)
  watchdog.stop()
  watchdog._thread.join(10)
  assert len(calls) == 1
  assert 100 * period < calls[0]['seconds'] <= 103 * period


_ENDED = {'phase': 'step', 'step': 7, 'seconds': 130.0}


def test_one_process_ends_by_itself(config, monkeypatch):
  def end(code, text, stacks):
    raise RuntimeError(code, text, stacks)

  monkeypatch.setattr(termination, 'end_process', end)
  with pytest.raises(RuntimeError) as caught:
    cluster.Processes(config)._stalled(_ENDED)
  code, text, stacks = caught.value.args
  assert code == 75 and stacks
  assert text.startswith('step 7 has lasted 130 s, longer than config.cluster.')


def test_one_of_several_asks_the_others(config, capsys):
  client = mock.Mock(
    start=client_lib.Start(hosts=('a', 'b')), is_elastic=False, generation=generation_lib.FIRST
  )
  cluster.Processes(config, client=client)._stalled(_ENDED)
  client.stalled.assert_called_once_with()
  text = 'step 7 has lasted 130 s: asking where the others are'
  assert text in capsys.readouterr().err
