"""Tests of plan: cycles of the workers of `parameter_server`, against closed forms."""

import dataclasses
import math

import numpy as np
import pytest

from anp_jax.costs import hardware, work
from anp_jax.runtimes.parameter_server import server_cost
from tests import builders, plan_settings

# 25 million weights in float32 take 0.1 s over 1 GB/s.
_LINK = hardware.Link('link', 1e9, 1e-12)
_MESSAGE = 0.1
_WORK = work.Workload(
  name='none',
  dtype='float32',
  layers=(work.Layer('dense', 0, 25_000_000, 0, 0, False),),
  image_flops=0,
  image_bytes=0,
  step_bytes=0,
  kernels=0,
  statistics=0,
  state_bytes=0,
  param_bytes=100_000_000,
  examples=1,
  total_images=1,
)


def _cycle(nodes, busy=1.0, link=_LINK, state_bytes=0, slow=(), jitter=0.0, **keys):
  """Seconds of a cycle where updates take no time."""
  config = builders.config(
    {'strategy.name': 'parameter_server'}
    | {f'strategy.{name}': value for name, value in keys.items()}
  )
  work = dataclasses.replace(_WORK, state_bytes=state_bytes)
  setting = plan_settings.setting(config, work, nodes, link=link, slow=slow, jitter=jitter)
  return server_cost.cycle(setting, busy)


def _seconds(*arguments, **keys):
  return _cycle(*arguments, **keys).seconds


@pytest.mark.parametrize(
  'nodes, servers, dedicated, messages',
  [
    (1, 1, False, 0),  # nothing leaves the process
    (2, 1, False, 1),  # the server's own worker sends nothing
    (5, 1, False, 4),
    (5, 1, True, 4),
    (5, 2, False, 2.5),  # half of each message, of all five
    (6, 2, True, 2),
    (3, 2, True, 1),  # a worker's own port is the narrow one
  ],
)
def test_a_synchronous_update_waits_for_the_servers_port(nodes, servers, dedicated, messages):
  seconds = _seconds(nodes, mode='synchronous', servers=servers, dedicated=dedicated)
  # Weights to all, then gradients of all.
  assert seconds == pytest.approx(1 + 2 * messages * _MESSAGE, rel=1e-6)


@pytest.mark.parametrize('servers', [1, 2])
@pytest.mark.parametrize('busy', [0.5, 1.0])
def test_no_more_gradients_pass_than_the_ports_let_through(busy, servers):
  """With two in flight the port is never idle: 10 a second for each server."""
  seconds = _seconds(64 + servers, busy, servers=servers, dedicated=True, in_flight=2)
  assert seconds == pytest.approx(64 / (10 * servers), rel=1e-9)


def test_the_port_does_not_limit_the_worker_beside_the_server():
  seconds = _seconds(65, in_flight=2)
  assert seconds == pytest.approx(65 / (10 + 1), rel=1e-9)


@pytest.mark.parametrize('in_flight, travelling', [(1, 0.2), (2, 0), (3, 0)])
def test_a_second_gradient_in_flight_travels_meanwhile(in_flight, travelling):
  seconds = _seconds(2, dedicated=True, in_flight=in_flight)
  assert seconds == pytest.approx(1 + travelling, rel=1e-6)


@pytest.mark.parametrize('workers', [1, 2, 4, 8])
def test_gradients_in_flight_meet_at_the_port(workers):
  """Passes take no longer than messages, so that all are always under way.

  Two directions that n customers of a closed network go through in turn, equal
  and without pauses, let n / (n + 1) of what one lets through.
  """
  seconds = _seconds(workers + 1, 2 * _MESSAGE, dedicated=True, in_flight=2)
  rate = workers / (workers + 1) / _MESSAGE
  assert seconds == pytest.approx(workers / rate, rel=1e-6)


@pytest.mark.parametrize(
  'parts, seconds',
  [
    # All begin at once, and the last of 16, 17 and 40 gradients is of pass 1, 2 and 3.
    (16, 1),
    (17, 2),
    (40, 3),
  ],
)
def test_rennala_drops_what_others_make_too_old(parts, seconds):
  cycle = _cycle(17, link=plan_settings.FAST, dedicated=True, mode='rennala', parts=parts)
  assert cycle.seconds / cycle.updates == pytest.approx(seconds, rel=1e-6)
  assert cycle.useful == cycle.updates * parts


@pytest.mark.parametrize('slow, seconds', [(1.9, 1.9), (2.5, 2.0)])
def test_an_update_of_two_parts_takes_the_first_two_gradients(slow, seconds):
  """The second is the slow worker's first one, or the quick worker's second one."""
  keys = {'mode': 'rennala', 'parts': 2, 'dedicated': True}
  cycle = _cycle(3, link=plan_settings.FAST, slow=(slow,), **keys)
  assert cycle.seconds / cycle.updates == pytest.approx(seconds, rel=1e-6)


@pytest.mark.parametrize(
  'workers, parts, slow, latency',
  [
    (8, 8, (), 0.0),
    (8, 8, (), 0.5),
    (32, 32, (), 0.0),
    (32, 16, (), 0.0),
    (8, 4, (), 0.0),
    (8, 20, (), 0.5),
    (4, 6, (10.0,), 0.0),
  ],
)
def test_rennala_waits_for_the_last_of_its_gradients(workers, parts, slow, latency):
  keys = {'mode': 'rennala', 'parts': parts, 'dedicated': True}
  link = hardware.Link('link', 1e18, latency)
  cycle = _cycle(workers + 1, link=link, slow=slow, jitter=0.1, **keys)
  # Passes as simulated workers draw them; those of a worker follow each other.
  variance = math.log1p(0.1**2)
  draws = np.random.default_rng(0).lognormal(-variance / 2, variance**0.5, (4000, parts, workers))
  seconds = draws * [*slow, *[1.0] * (workers - len(slow))] + 2 * latency
  ends = np.cumsum(seconds, axis=1).reshape(4000, -1)
  mean = np.partition(ends, parts - 1)[:, parts - 1].mean()
  # The planner's are normal: 1.4 % less where the slowest of 32 is waited for.
  assert cycle.seconds / cycle.updates == pytest.approx(mean, rel=0.02)


@pytest.mark.parametrize('servers', [1, 2])
def test_servers_make_one_update_after_another(servers):
  """Ten GB are read and written at 20 GB/s: a second, or half by each of two.

  Four workers would bring a gradient more often.
  """
  seconds = _seconds(
    4 + servers, link=plan_settings.FAST, state_bytes=int(1e10), servers=servers, dedicated=True
  )
  assert seconds == pytest.approx(4 / servers, rel=1e-6)
