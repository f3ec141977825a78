"""The watch over the steps of a process, by a clock in the test's hands."""

import time

import pytest

from anp_jax import cluster
from anp_jax.cluster import watchdog as watch_lib


class _Clock:
  def __init__(self):
    self.now = 1000.0

  def __call__(self):
    return self.now


@pytest.fixture
def clock():
  return _Clock()


def _watch(clock, stall_timeout=100.0, **values):
  return watch_lib.Watchdog(stall_timeout, lambda state: None, clock=clock,
                         **values)  # fmt: skip


def _steps(watch, clock, *seconds, first=1):
  """Begins these steps, each after the one before took so long."""
  for step, duration in enumerate(seconds, first):
    watch.heartbeat('input', step)
    watch.heartbeat('step', step)
    clock.now += duration


def _lasts(watch, clock, seconds):
  """Whether it is too long within a little of these seconds."""
  start = clock.now
  clock.now = start + seconds - 1
  before = watch.is_stalled()
  clock.now = start + seconds + 1
  return not before and watch.is_stalled()


def test_state(clock):
  watch = _watch(clock)
  clock.now += 3
  assert watch.state() == {'phase': 'starting', 'step': 0, 'seconds': 3.0}
  watch.heartbeat('saving', 7)
  clock.now += 2
  assert watch.state() == {'phase': 'saving', 'step': 7, 'seconds': 2.0}


@pytest.mark.parametrize('phase', ['input', 'step'])
def test_a_step_may_last_as_long_as_the_config_says(clock, phase):
  watch = _watch(clock)
  _steps(watch, clock, 1, 1, 1)
  watch.heartbeat(phase, 4)
  assert _lasts(watch, clock, 100)


@pytest.mark.parametrize(
  'phase', ['compiling', 'saving', 'evaluating', 'leaving']
)
def test_all_else_may_last_ten_times_that(clock, phase):
  watch = _watch(clock)
  watch.heartbeat(phase, 4)
  assert _lasts(watch, clock, 1000)


def test_the_start_may_last_ten_times_that(clock):
  assert _lasts(_watch(clock), clock, 1000)


@pytest.mark.parametrize('phase', ['loading', 'joining', 'opening'])
def test_until_jax_is_up_it_is_the_rendezvous_timeout(clock, phase):
  watch = _watch(clock, joining_timeout=300.0)
  watch.heartbeat(phase)
  assert _lasts(watch, clock, 300)


def test_slow_steps_may_last_ten_times_the_longest(clock):
  watch = _watch(clock)
  _steps(watch, clock, 30, 40, 20, 1)
  watch.heartbeat('input', 5)
  assert _lasts(watch, clock, 400)


def test_a_long_step_is_forgotten_after_32(clock):
  watch = _watch(clock)
  _steps(watch, clock, 40, *[1] * 33)
  watch.heartbeat('step', 35)
  assert _lasts(watch, clock, 100)


def test_a_pause_is_no_steps_time(clock):
  watch = _watch(clock)
  _steps(watch, clock, 1, 1)
  watch.heartbeat('saving', 2)
  clock.now += 90
  _steps(watch, clock, 1, 1, first=3)
  watch.heartbeat('input', 5)
  assert _lasts(watch, clock, 100)


def test_0_turns_it_off(clock):
  watch = _watch(clock, 0.0)
  watch.heartbeat('step', 1)
  clock.now += 1e9
  assert not watch.is_stalled()


def test_an_evaluation_that_gets_on_has_no_bound(clock, config):
  """However many batches it has; and it counts as one when a stop is near."""
  config.cluster.stall_timeout = 100.0
  processes = cluster.Processes(config)
  watch = processes._watch = _watch(clock)
  processes.heartbeat('evaluating', 5)
  seen = []
  for batch in processes.heartbeat_each(range(4), 'evaluating', 5):
    clock.now += 900
    assert not watch.is_stalled()
    seen.append(batch)
  assert seen == [0, 1, 2, 3]
  assert watch.state()['phase'] == 'evaluating'
  processes.heartbeat('input', 6)
  assert watch.expected_stop_seconds() == 2 * 3600


def test_saves_beside_the_loop_count_when_a_stop_is_near(clock, config):
  config.time_limit = 2.0
  processes = cluster.Processes(config)
  processes._stop._clock = lambda: processes._stop._ends - 60
  with processes.handling_signals():
    assert processes.vote() == cluster.preemption.CONTINUE
  with processes.handling_signals(lambda: 50.0):  # and a margin
    assert processes.vote() == cluster.preemption.TIME_LIMIT


def test_to_stop_is_what_pauses_and_steps_have_taken(clock):
  watch = _watch(clock)
  assert watch.expected_stop_seconds() == 0
  _steps(watch, clock, 3, 5, 1)
  watch.heartbeat('evaluating', 3)
  clock.now += 20
  watch.heartbeat('saving', 3)
  clock.now += 30
  assert watch.expected_stop_seconds() == 2 * 20 + 8 * 5
  watch.heartbeat('input', 4)
  assert watch.expected_stop_seconds() == 2 * 30 + 8 * 5


def test_a_look_at_a_phase_that_ends_now(clock):
  """The thread that looks may be overtaken by the one that beats."""
  watch = _watch(clock)
  watch.heartbeat('saving', 1)
  clock.now += 500

  def overtaken():
    watch._clock = clock
    watch.heartbeat('input', 2)
    return clock.now

  watch._clock = overtaken
  assert not watch.is_stalled()


def test_it_calls_once_and_gives_signs_of_life_before(clock):
  calls, pulses = [], []
  watch = watch_lib.Watchdog(100.0, calls.append, pulses.append, 0.01, clock)
  watch.heartbeat('step', 7)
  watch.start()
  deadline = time.monotonic() + 10
  while len(pulses) < 3 and time.monotonic() < deadline:
    time.sleep(0.01)
  assert pulses[0] == {'phase': 'step', 'step': 7, 'seconds': 0.0}
  assert not calls
  clock.now += 101
  time.sleep(0.2)
  assert calls == [{'phase': 'step', 'step': 7, 'seconds': 101.0}]


def test_it_does_not_call_once_it_is_stopped(clock):
  calls = []
  watch = watch_lib.Watchdog(100.0, calls.append, seconds=0.01, clock=clock)
  watch.start()
  watch.stop()
  clock.now += 1e6
  time.sleep(0.1)
  assert not calls


_ENDED = {'phase': 'step', 'step': 7, 'seconds': 130.0}


def test_one_process_ends_by_itself(config, monkeypatch):
  def end(code, text, stacks):
    raise RuntimeError(code, text, stacks)

  monkeypatch.setattr(cluster.link_lib, 'end_process', end)
  with pytest.raises(RuntimeError) as caught:
    cluster.Processes(config)._stalled(_ENDED)
  code, text, stacks = caught.value.args
  assert code == 75 and stacks
  assert text.startswith('step 7 has lasted 130 s, longer than config.cluster.')


def test_one_of_several_asks_the_others(config, capsys):
  class Link:
    hosts = ('a', 'b')
    asked = 0

    def stalled(self):
      self.asked += 1

    def heartbeat(self, state):
      pass

  link = Link()
  cluster.Processes(config, link=link)._stalled(_ENDED)
  assert link.asked == 1
  text = 'step 7 has lasted 130 s: asking where the others are'
  assert text in capsys.readouterr().err
