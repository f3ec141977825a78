"""Tests of goodput: closed forms, published optima, and a simulation of failing nodes."""

import dataclasses
import math

import numpy as np
import pytest
from scipy import special

from anp_jax.costs import goodput
from tests import builders

_HOUR = 3600.0
_FAULTS = goodput.Faults(mtbf=100 * _HOUR, repair=_HOUR, requeue=900, in_place=600, join=600)
_DOWN, _BACK, _MEMBER = range(3)  # a node that is back waits for a mirror
_SAVES = goodput.Copies(cost=20, period=_HOUR)
_MIRRORS = goodput.Copies(cost=5, period=1800)


class _Simulation:
  """A run whose nodes fail and return, event by event.

  Work is counted in seconds at full speed. A mirror or save is there once it is complete.
  """

  def __init__(self, rng, faults, used, mirrors, saves):
    self.rng, self.faults, self.used = rng, faults, used
    self.copies = {'mirror': mirrors, 'save': saves}
    self.clock = self.work = 0.0
    self.safe = dict.fromkeys(self.copies, 0.0)
    self.since = dict.fromkeys(self.copies, 0.0)  # seconds of steps
    self.start()

  def start(self):
    """All nodes are there."""
    self.nodes = np.full(len(self.used) - 1, _MEMBER)
    self.events = self.clock + self.rng.exponential(self.faults.mtbf, len(self.nodes))
    self.resume, self.copying = self.clock, ''

  @property
  def computing(self):
    """The nodes that compute."""
    return self.used[(self.nodes == _MEMBER).sum()]

  def run(self, seconds):
    """The share of full speed that is kept in `seconds`."""
    while self.clock < seconds:
      node = int(np.argmin(self.events))
      if stands := self.clock < self.resume:
        end = self.resume
      else:
        due = min(self.copies, key=lambda name: self.copies[name].period - self.since[name])
        end = self.clock + self.copies[due].period - self.since[due]
      is_event = self.events[node] <= end
      end = min(end, self.events[node])
      if not stands:
        self.work += (end - self.clock) * self.computing / len(self.nodes)
        self.since = {name: value + end - self.clock for name, value in self.since.items()}
      self.clock = end
      if is_event:
        self.change(node)
      elif not stands:
        self.copying, self.resume = due, end + self.copies[due].cost
        self.since[due] = 0.0
      elif self.copying:
        self.complete()
    return self.work / self.clock

  def complete(self):
    """A copy is there; returned nodes join at a mirror."""
    name, self.copying = self.copying, ''
    self.safe[name] = self.work
    if name == 'mirror':
      before = self.computing
      self.nodes[self.nodes == _BACK] = _MEMBER
      self.resume += self.faults.join * (self.computing > before)

  def change(self, node):
    """A node fails or returns."""
    if self.nodes[node] == _DOWN:
      self.nodes[node] = _BACK
      self.events[node] += self.rng.exponential(self.faults.mtbf)
      return
    is_computing = self.nodes[node] == _MEMBER and (
      self.rng.uniform() < self.computing / (self.nodes == _MEMBER).sum()
    )
    self.nodes[node] = _DOWN
    repair = self.rng.exponential(self.faults.repair) if self.faults.repair else math.inf
    self.events[node] += repair
    if not self.computing:
      self.work = self.safe['mirror'] = self.safe['save']
      self.since = dict.fromkeys(self.since, 0.0)
      self.start()
      self.resume = self.clock + self.faults.requeue
    elif is_computing:
      self.work, self.copying = self.safe['mirror'], ''
      self.since['save'] = max(0.0, self.since['save'] - self.since['mirror'])
      self.since['mirror'] = 0.0
      self.resume = self.clock + self.faults.in_place


def _largest(nodes, fits):
  """For 0, 1, ... nodes, the largest number that fits."""
  return [max((k for k in range(1, live + 1) if fits(k)), default=0) for live in range(nodes + 1)]


def _powers(nodes):
  return _largest(nodes, lambda k: k & (k - 1) == 0)


def _any(nodes):
  return _largest(nodes, lambda k: True)


def _all(nodes):
  return _largest(nodes, lambda k: k == nodes)


def _half(nodes):
  return _largest(nodes, lambda k: k in (nodes // 2, nodes))


def _all_but_one(nodes):
  return _largest(nodes, lambda k: k >= nodes - 1)


def _predicted(faults, used, mirrors, saves, seconds=math.nan):
  speeds = [count / (len(used) - 1) for count in used]
  return goodput.elastic(faults, used, speeds, mirrors, saves, seconds)


def _faults(mtbf, repair):
  return dataclasses.replace(_FAULTS, mtbf=mtbf * _HOUR, repair=repair * _HOUR)


# Nodes, rule, and hours: between failures of a node, to its return, of the simulation.
_CASES = [
  (1, _all, 50, 1, 10_000),
  (16, _all, 30, 1, 2_000),
  (128, _all, 1000, 1, 2_000),
  (4, _powers, 100, 24, 7_500),
  (5, _powers, 20, 2, 3_000),
  (16, _any, 40, 1, 1_500),
  (4, _all_but_one, 10, 8, 2_000),
  (48, _half, 100, 24, 2_000),
  (128, _powers, 1000, 1, 1_500),
  *(builders.slow(*case) for case in ((2, _any, 50, 4, 6_000), (8, _powers, 300, 2, 7_500))),
]


@pytest.mark.parametrize('nodes, rule, mtbf, repair, hours', _CASES)
def test_goodput_is_that_of_simulated_failures(nodes, rule, mtbf, repair, hours):
  faults, used = _faults(mtbf, repair), rule(nodes)
  mirrors = goodput.Copies(0, math.inf) if rule is _all else _MIRRORS
  rng = np.random.default_rng([nodes, mtbf, repair])
  share = _Simulation(rng, faults, used, mirrors, _SAVES).run(hours * _HOUR)
  assert _predicted(faults, used, mirrors, _SAVES) == pytest.approx(share, abs=0.02)


@pytest.mark.parametrize(
  'repair, in_place, join', [(60, 44, 45), builders.slow(20, 44, 45), builders.slow(60, 5, 45)]
)
def test_goodput_where_pauses_are_as_long_as_repairs(repair, in_place, join):
  faults = goodput.Faults(16 * 180.0, repair, 900.0, in_place, join)
  mirrors, saves = goodput.Copies(0.02, 2.0), goodput.Copies(1.0, 1000.0)
  rng = np.random.default_rng([repair, in_place])
  share = _Simulation(rng, faults, _any(16), mirrors, saves).run(100_000)
  # Three standard errors of the simulation are 0.015.
  assert _predicted(faults, _any(16), mirrors, saves) == pytest.approx(share, abs=0.03)


@pytest.mark.parametrize(
  'nodes, rule, mtbf, hours, runs',
  [
    (2, _any, 20, 40, 250),
    (8, _powers, 100, 50, 100),
    builders.slow(48, _half, 1000, 24, 500),
    (4, _any, 10, 1000, 8),  # some 50 jobs after each other
  ],
)
def test_goodput_of_runs_whose_nodes_never_return(nodes, rule, mtbf, hours, runs):
  faults, used = _faults(mtbf, 0), rule(nodes)
  rng = np.random.default_rng([nodes, mtbf])
  shares = [
    _Simulation(rng, faults, used, _MIRRORS, _SAVES).run(hours * _HOUR) for _ in range(runs)
  ]
  predicted = _predicted(faults, used, _MIRRORS, _SAVES, hours * _HOUR)
  assert predicted == pytest.approx(np.mean(shares), abs=0.02)


def test_free_copies_and_restarts_leave_the_nodes_that_live():
  faults = goodput.Faults(mtbf=100.0, repair=10.0, requeue=0.0, in_place=0.0, join=0.0)
  always = goodput.Copies(cost=0.0, period=1e-9)
  assert _predicted(faults, _any(50), always, always) == pytest.approx(100 / 110)
  never = dataclasses.replace(faults, repair=0.0)
  # The mean of exp(-t / 100) over the first 30 seconds.
  mean = (1 - math.exp(-0.3)) / 0.3
  assert _predicted(never, _any(50), always, always, 30.0) == pytest.approx(mean, rel=1e-5)
  # In the long run both nodes of two live for 50 seconds, then one for 100.
  assert _predicted(never, _any(2), always, always, 1e6) == pytest.approx(2 / 3, rel=1e-4)


def test_without_failures_only_copies_cost():
  faults = _faults(1e9, 1)
  assert goodput.requeued(faults, 8, _SAVES) == pytest.approx(3600 / 3620, rel=1e-5)
  share = _predicted(faults, _powers(8), _MIRRORS, _SAVES)
  assert share == pytest.approx(1800 / 1805 * 3600 / 3620, rel=1e-5)
  rare = goodput.Copies(_SAVES.cost, goodput.daly(_SAVES.cost, faults.mtbf / 8))
  mirrors = goodput.Copies(_MIRRORS.cost, goodput.daly(_MIRRORS.cost, faults.mtbf / 8))
  assert goodput.requeued(faults, 8, rare) == pytest.approx(1, abs=1e-4)
  assert _predicted(faults, _powers(8), mirrors, rare) == pytest.approx(1, abs=1e-4)


def test_one_node_is_not_elastic():
  assert _predicted(_FAULTS, [0, 1], _MIRRORS, _SAVES) == goodput.requeued(_FAULTS, 1, _SAVES)
  often = _faults(1e-6, 1)
  assert goodput.requeued(often, 1, _SAVES) == 0


@pytest.mark.parametrize('hours, minutes, digit', [(24, 117, 1), (6, 57, 1), (0.25, 9.1, 0.1)])
def test_best_period_is_that_of_dalys_figures(hours, minutes, digit):
  """Figures 3 to 5 of Daly 2006: a save takes 5 minutes."""
  assert goodput.daly(5, 60 * hours) == pytest.approx(minutes, abs=digit / 2)


@pytest.mark.parametrize('cost', [1e-6, 1e-4, 0.01, 0.1, 0.3])
def test_best_periods_minimise_the_modelled_cost(cost):
  # The derivative of the cost is zero where exp(t + cost) (1 - t) = 1, for an mtbf of 1.
  best = 1 + special.lambertw(-math.exp(-1 - cost)).real
  assert goodput.daly(cost, 1.0) == pytest.approx(best, rel=0.005)

  def share(period):
    return goodput.kept(goodput.Copies(cost, period), 0.05, 1.0)

  for period in (0.8 * best, 1.2 * best):
    assert share(goodput.daly(cost, 1.0)) > share(period)
  # Young's period (1974), to first order, is no less than Daly's, and costs little more.
  young = math.sqrt(2 * cost)
  assert young > goodput.daly(cost, 1.0)
  assert share(young) == pytest.approx(share(best), rel=0.25 * cost)


def test_best_periods_have_bounds():
  assert goodput.daly(2.0, 1.0) == goodput.daly(7.0, 1.0) == 1
