"""Which examples a station holds, and which steps a model makes there."""

import bisect
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from anp_jax import config as config_lib
from anp_jax.data import index_shuffle
from anp_jax.data.sources import subset
from anp_jax.parallel import apportionment as shares_lib


def partition(labels: np.ndarray, sizes: Sequence[int]) -> list[np.ndarray]:
  """Cuts a set into stratified parts.

  In the order of their classes, examples are dealt out evenly: part p gets
  those nearest to the points (k + 1/2) / sizes[p] of the whole. A class's share
  of a part is that of the set, to about one example.

  Args:
    labels: (n,) int, the class of each example.
    sizes: of the parts, n in all.

  Returns:
    Indices of each part, ascending int64; every example in one part.
  """
  by_class = np.argsort(labels, kind='stable')
  points = np.concatenate([(np.arange(n) + 0.5) / n for n in sizes])
  owners = np.repeat(np.arange(len(sizes)), sizes)
  owners = owners[np.argsort(points, kind='stable')]
  return [np.sort(by_class[owners == p]) for p in range(len(sizes))]


def sizes(config, examples: int, stations: int) -> tuple[int, ...]:
  """Examples of each station's part, by config.strategy.shares.

  Raises:
    ConfigError: for shares of another number of stations, or an empty part.
  """
  shares = config.strategy.shares
  if shares and len(shares) != stations:
    raise config_lib.ConfigError(
      f'config.strategy.shares={tuple(shares)}: expected {stations}, one for '
      'each station'
    )
  found = shares_lib.apportion(examples, shares or (1,) * stations)
  if not min(found):
    raise config_lib.ConfigError(
      f'{examples} training examples over {stations} stations: one has none'
    )
  return found


def parts(config, source, stations: int) -> list[subset.Subset]:
  """The parts of a training set, one a station; as `sizes` raises."""
  counts = sizes(config, len(source), stations)
  # Synthetic examples have no label before they are made.
  synthetic = source.kind == 'synthetic'
  labels = np.zeros(len(source)) if synthetic else source.labels()
  return [
    subset.Subset(source, indices, f'{source.name}, part {number}')
    for number, indices in enumerate(partition(labels, counts))
  ]


def stream_seed(seed: int, station: int) -> int:
  """The seed of a station's stream: no two parts are shuffled alike."""
  word = np.array([seed], np.uint64) << np.uint64(32) | np.uint64(station)
  return int(index_shuffle.mix(word)[0] >> np.uint64(33))


class Visit(NamedTuple):
  """A model's time at a station.

  Attributes:
    lap: from 0.
    station: from 0.
    first: step of the part's own stream with which it begins, or goes on.
    count: steps that are left of it.
  """

  lap: int
  station: int
  first: int
  count: int


class Itinerary:
  """All visits of a model, from its first step to its last.

  A part has a stream of its own, epoch after epoch without a break. Examples
  that fill no batch in one visit are the first of the next; after the last lap
  they are trained on too, in a batch filled up with the beginning of another
  epoch, so that nothing is cut short.

  Attributes:
    total: steps of all visits.
    ends: of each lap, the steps made when it is done.
  """

  def __init__(self, sizes: Sequence[int], batch_size: int, laps: int):
    """Makes it.

    Args:
      sizes: examples of each part.
      batch_size: images a step.
      laps: visits to each part.
    """
    self._starts, self._visits = [], []
    self.ends = []
    done = 0
    for lap in range(laps):
      for station, size in enumerate(sizes):
        first = lap * size // batch_size
        last = (lap + 1) * size // batch_size
        if lap == laps - 1:
          last = -(-laps * size // batch_size)
        if last > first:
          self._starts.append(done)
          self._visits.append(Visit(lap, station, first, last - first))
          done += last - first
      self.ends.append(done)
    self.total = done

  def at(self, step: int) -> Visit | None:
    """What is left of the visit in which this step is made; None at the end."""
    if step >= self.total:
      return None
    i = bisect.bisect_right(self._starts, step) - 1
    visit, done = self._visits[i], step - self._starts[i]
    return visit._replace(first=visit.first + done, count=visit.count - done)

  def laps_done(self, step: int) -> int:
    """Laps that are complete after this many steps."""
    return bisect.bisect_right(self.ends, step)


def slots(models: int, stations: int, laps: int) -> list[list[int | None]]:
  """The schedule of a ring without delays (Chen et al. 2015).

  At slot t station j trains model (t - j) mod max(models, stations).

  Returns:
    By slot, the model at each station; None: it has nothing to do.
  """
  around = max(models, stations)
  count = around * laps + min(models, stations) - 1

  def model(slot, station):
    begun = slot - station
    number = begun % around
    active = 0 <= begun < around * laps and number < models
    return number if active else None

  return [[model(t, j) for j in range(stations)] for t in range(count)]
