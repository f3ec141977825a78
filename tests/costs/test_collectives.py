"""Tests of plan: seconds of collectives, and of the slowest of many devices."""

import math

import numpy as np
import pytest

from anp_jax.costs import collectives, hardware, order_statistics

_LINK = hardware.Link('link', 10e9, 5e-6)
_NODE = hardware.Link('node', 100e9, 1e-6)
_BUS = hardware.Link('bus', 20e9, 1e-6, is_shared=True)
_SIZE = 100e6


def _cluster(nodes, devices, node_link=_NODE, link=_LINK):
  return collectives.Cluster(nodes, devices, node_link, link)


@pytest.mark.parametrize('devices', [2, 3, 8, 512])
def test_ring_all_reduce_is_its_closed_form(devices):
  n = devices
  expected = 2 * (n - 1) / n * _SIZE / 10e9 + 2 * (n - 1) * 5e-6
  seconds = collectives.ring_all_reduce(n, _SIZE, _LINK)
  assert seconds == pytest.approx(expected)


def test_tree_takes_a_step_a_level():
  # 1,000 devices: 10 levels up and 10 down; every byte twice.
  seconds = collectives.tree_all_reduce(1000, _SIZE, _LINK)
  assert seconds == pytest.approx(2 * _SIZE / 10e9 + 20 * 5e-6)


def test_hierarchical_sums_in_nodes_then_between_them():
  # 4 nodes of 8: 7/8 of the bytes twice within; then an eighth of the bytes
  # by each device, over an eighth of the ports; 4 nodes in a ring or a tree.
  within = 2 * 7 / 8 * _SIZE / 100e9 + 14 * 1e-6
  ring = 2 * 3 / 4 * (_SIZE / 8) / (10e9 / 8) + 6 * 5e-6
  seconds = collectives.hierarchical_all_reduce(_cluster(4, 8), _SIZE)
  assert seconds == pytest.approx(within + ring)


def test_the_fastest_way_is_taken():
  many, small = _cluster(512, 8), 1e3
  # 1 KB on 4,096 devices: a ring waits 8,190 times, a tree 24 times.
  assert collectives.all_reduce(many, small) == pytest.approx(2 * small / 10e9 + 24 * 5e-6, rel=0.3)
  assert collectives.all_reduce(_cluster(1, 1), _SIZE) == 0
  # What leaves the node is at least its share of the bytes over the ports.
  large = 10e9
  floor = 2 * 511 / 512 * large / 10e9
  assert floor <= collectives.all_reduce(many, large) <= 1.2 * floor


def test_parts_are_gathered_in_rings():
  # 8 KB on 64 nodes: a tree would need 12 steps of latency, a ring has 63.
  small = 8e3
  expected = 63 * (small / 64 / 10e9 + 5e-6)
  seconds = collectives.gather(_cluster(64, 1), small)
  assert seconds == pytest.approx(expected)
  within = collectives.gather(_cluster(1, 8), small)
  assert within == pytest.approx(7 * (small / 8 / 100e9 + 1e-6))


def test_a_torus_uses_all_of_its_links():
  torus = hardware.Link('torus', 328e9, 1e-6, topology='torus', axes=2)
  seconds = collectives.all_reduce(_cluster(16, 4, torus), _SIZE)
  # 64 devices: 8 x 8, rings of 8 along each axis.
  expected = 2 * 63 / 64 * _SIZE / 328e9 + 2 * 2 * 7 * 1e-6
  assert seconds == pytest.approx(expected)


def test_devices_on_a_bus_stage_what_leaves_the_node():
  on_bus = collectives.all_reduce(_cluster(2, 4, _BUS), _SIZE)
  apart = collectives.all_reduce(_cluster(2, 4), _SIZE)
  assert on_bus > 1.9 * apart


def test_normal_maximum_has_its_known_values():
  values = {
    1: 0.0,
    2: 1 / math.sqrt(math.pi),
    3: 1.5 / math.sqrt(math.pi),
    10: 1.53875,  # Harter 1961, table 1
    100: 2.50759,
  }

  def deviations(count, backups=0):
    return (order_statistics.slowest(1.0, 0.1, count, backups) - 1) / 0.1

  for count, value in values.items():
    assert deviations(count) == pytest.approx(value, abs=2e-5)
  # The second largest of three is the median; of ten, Harter's 1.00136.
  assert deviations(3, 1) == pytest.approx(0, abs=1e-6)
  assert deviations(10, 1) == pytest.approx(1.00136, abs=2e-5)


def test_the_slowest_of_thousands_agrees_with_random_numbers():
  random = np.random.default_rng(0)
  drawn = random.normal(0.2, 0.01, (400, 4096))
  drawn.sort(axis=1)
  for backups in (0, 5):
    mean = order_statistics.slowest(0.2, 0.05, 4096, backups)
    assert mean == pytest.approx(drawn[:, -1 - backups].mean(), rel=2e-3)
  assert order_statistics.slowest(0.2, 0.05, 1) == 0.2


@pytest.mark.parametrize(
  'count, backups, factors',
  [
    (4, 0, (2.0,)),
    (4, 0, (1.1,)),
    (8, 1, (1.05, 1.2)),
    (16, 0, (0.5,)),
    (5, 4, (1.1, 1.1)),  # the quickest of them
    (3, 1, (1.1, 1.2, 1.3)),  # none alike
  ],
)
def test_the_slowest_of_unequal_ones_agrees_with_random_numbers(count, backups, factors):
  means = 0.3 * np.array([*factors, *[1.0] * (count - len(factors))])
  drawn = np.random.default_rng(0).normal(means, 0.1 * means, (50000, count))
  drawn.sort(axis=1)
  mean = order_statistics.slowest(0.3, 0.1, count, backups, factors)
  # The standard error of 50,000 draws is below 0.05 % of the mean.
  assert mean == pytest.approx(drawn[:, -1 - backups].mean(), rel=2e-3)


def test_the_slowest_without_jitter_is_the_slow_one():
  assert order_statistics.slowest(0.2, 0, 4, factors=(2.0, 3.0)) == 0.2 * 3
  assert order_statistics.slowest(0.2, 0, 4, 1, (2.0, 3.0)) == 0.2 * 2
  assert order_statistics.slowest(0.2, 0, 4, 2, (2.0, 3.0)) == 0.2


def test_parameter_servers_pass_all_bytes_of_all_workers():
  # One node of 8 workers: each sends and gets all, over half a bus.
  seconds = collectives.parameter_servers(_cluster(1, 8, _BUS), _SIZE)
  assert seconds == pytest.approx(16 * _SIZE / 10e9 + 2 * 5e-6)
  # On four nodes, one sum a node leaves for the servers of the three others.
  seconds = collectives.parameter_servers(
    _cluster(4, 8, _BUS, hardware.Link('slow', 1e8, 0)), _SIZE
  )
  assert seconds == pytest.approx(2 * 0.75 * _SIZE / 1e8)


def test_two_devices_on_a_bus_have_it_whole_and_three_half_of_it():
  """The streams of a ring of two meet nowhere; those of three do."""
  apart = hardware.Link('apart', 20e9, 1e-6)
  for devices, width in ((2, 20e9), (3, 10e9), (4, 10e9)):
    n = devices
    expected = 2 * (n - 1) * (_SIZE / n / width + 1e-6)
    seconds = collectives.all_reduce(_cluster(1, n, _BUS), _SIZE)
    assert seconds == pytest.approx(expected, rel=1e-9)
    if devices == 2:
      alone = collectives.all_reduce(_cluster(1, n, apart), _SIZE)
      assert seconds == alone


@pytest.mark.parametrize('is_shared, port', [(False, 10e9), (True, 20e9 / 3)])
def test_two_devices_on_a_bus_stage_what_leaves_the_node(is_shared, port):
  """Over 20 GB/s, then over 10 GB/s: each byte takes 1 / 20 + 1 / 10."""
  bus = hardware.Link('bus', 20e9, 1e-6, is_shared=is_shared)
  within = _SIZE / 20e9 + 2 * 1e-6
  between = 2 * (_SIZE / 4 / (port / 2) + 5e-6)
  seconds = collectives.hierarchical_all_reduce(_cluster(2, 2, bus), _SIZE)
  assert seconds == pytest.approx(within + between, rel=1e-9)


def test_one_device_of_a_node_stages_nothing():
  expected = 2 * (_SIZE / 2 / 10e9 + 5e-6)
  seconds = collectives.all_reduce(_cluster(2, 1, _BUS), _SIZE)
  assert seconds == pytest.approx(expected, rel=1e-9)
