"""The examples of each station, and the steps of each model there."""

import bisect
from collections.abc import Sequence
import dataclasses
from typing import NamedTuple

import jax
import ml_collections
import numpy as np

from anp_jax import config as config_lib
from anp_jax.data import index_shuffle, sources
from anp_jax.data.sources import subset
from anp_jax.parallel import apportionment


@dataclasses.dataclass(frozen=True)
class Station:
  """A place in the ring: devices, and the examples that stay there.

  Attributes:
    number: number of the station, from 0, in the order of the models' visits.
    mesh: mesh of the station's devices.
    shard: the station's part of the training set.
  """

  number: int
  mesh: jax.sharding.Mesh
  shard: subset.Subset


def partition(labels: np.ndarray, sizes: Sequence[int]) -> list[np.ndarray]:
  """Cuts a set into stratified shards.

  Sorted by class, examples are dealt out evenly: shard i gets those nearest to
  the points (k + 1/2) / sizes[i] of the set. A class has the same share of each
  shard and of the set, to about one example.

  Args:
    labels: (n,) int, the class of each example.
    sizes: sizes of the shards, n in all.

  Returns:
    Indices of each shard, ascending int64; every example is in one shard.
  """
  by_class = np.argsort(labels, kind='stable')
  points = np.concatenate([(np.arange(n) + 0.5) / n for n in sizes])
  owners = np.repeat(np.arange(len(sizes)), sizes)
  owners = owners[np.argsort(points, kind='stable')]
  return [np.sort(by_class[owners == i]) for i in range(len(sizes))]


def shard_sizes(config: ml_collections.ConfigDict, examples: int, stations: int) -> tuple[int, ...]:
  """Returns the examples of each station, by config.strategy.shares.

  Raises:
    ConfigError: for shares of another number of stations, or an empty shard.
  """
  shares = config.strategy.shares
  if shares and len(shares) != stations:
    raise config_lib.ConfigError(
      f'config.strategy.shares={tuple(shares)}: expected {stations}, one for each station'
    )
  sizes = apportionment.apportion(examples, shares or (1,) * stations)
  if not min(sizes):
    raise config_lib.ConfigError(
      f'{examples} training examples over {stations} stations: one has none'
    )
  return sizes


def data_shards(source: sources.Source, sizes: Sequence[int]) -> list[subset.Subset]:
  """Divides a training set into shards of these sizes, one per station."""
  # Synthetic examples have no label before they are made.
  synthetic = source.kind == 'synthetic'
  labels = np.zeros(len(source)) if synthetic else source.labels()
  return [
    subset.Subset(source, indices, f'{source.name}, part {number}')
    for number, indices in enumerate(partition(labels, sizes))
  ]


def stream_seed(seed: int, station: int) -> int:
  """Returns a seed of its own for the stream of each station."""
  word = np.array([seed], np.uint64) << np.uint64(32) | np.uint64(station)
  return int(index_shuffle.mix(word)[0] >> np.uint64(33))


class Segment(NamedTuple):
  """The steps that a model makes at one station in one lap.

  Attributes:
    lap: lap, from 0.
    station: station, from 0.
    first: step of the shard's own stream at which the segment begins.
    steps: steps that are left of the segment.
  """

  lap: int
  station: int
  first: int
  steps: int


class RingSchedule:
  """All segments of a model, from its first step to its last.

  A shard has a stream of its own, epoch after epoch without a break. Examples
  that fill no batch in one segment are the first of the next; after the last
  lap they are trained on too, in a batch filled up with the beginning of
  another epoch, so that nothing is cut short.

  Attributes:
    total: steps of all segments.
    ends: steps made at the end of each lap.
    examples: examples of all shards.
  """

  def __init__(self, sizes: Sequence[int], batch_size: int, laps: int):
    """Computes the segments.

    Args:
      sizes: number of examples of each shard.
      batch_size: images per step.
      laps: number of visits to each shard.
    """
    self._sizes, self._batch_size, self._laps = sizes, batch_size, laps
    self._starts, self._segments = [], []
    self.ends = []
    self.examples = sum(sizes)
    self.total = 0
    for lap in range(laps):
      for station in range(len(sizes)):
        segment = self.segment(lap, station)
        if segment.steps:
          self._starts.append(self.total)
          self._segments.append(segment)
          self.total += segment.steps
      self.ends.append(self.total)

  def segment(self, lap: int, station: int) -> Segment:
    """Returns the segment of a lap at a station; it may have no steps."""
    size = self._sizes[station]
    first, end = (k * size // self._batch_size for k in (lap, lap + 1))
    if lap == self._laps - 1:
      end = -(-self._laps * size // self._batch_size)
    return Segment(lap, station, first, end - first)

  def at(self, step: int) -> Segment | None:
    """Returns the rest of the segment of a step; None at the end."""
    if step >= self.total:
      return None
    i = bisect.bisect_right(self._starts, step) - 1
    segment, done = self._segments[i], step - self._starts[i]
    return segment._replace(first=segment.first + done, steps=segment.steps - done)

  def laps_done(self, step: int) -> int:
    """Returns the laps that are complete after so many steps."""
    return bisect.bisect_right(self.ends, step)
