"""Predicts what a ring saves on a large data set, from measured rates.

Here M models are trained for E epochs on N stations, and all stations read from
one disk of B bytes a second, each at an equal part of that rate. The set has S
bytes. c is the seconds that a station computes for an epoch of one model over
all S bytes; each way has its own, since one that reads a file again decodes it
again, too. Reading overlaps computing: the longer one counts.

  ring         (max(M, N) E + min(M, N) - 1) (c / N + h) + max(0, S/B - c)
  parts        S/B + ceil(M / N) E N (c / N + x)
  independent  ceil(M / N) E c + max(0, min(M, N) S/B - c)
  disk         E (floor(M / N) max(c, N S/B) + max(c, (M mod N) S/B)),
               the last term only if M mod N > 0

A ring has max(M, N) E + min(M, N) - 1 slots (Chen et al. 2015), each as long as
one model's turn on one part, c / N, and a hand-over, h. Station j reads its
part in slot j, alone at the disk; from then on it has it in memory. Parts that
travel are read before the first step, and exchanged in x seconds after each
turn. `independent` reads all of the set on each station in the first epoch of
the first models, `disk` in every epoch. Scores are left out of all. Models that
differ in speed count with their mean.
"""

from collections.abc import Mapping
import dataclasses
from typing import NamedTuple

# Ways that are predicted, as they are named to people.
WAYS = ('ring', 'parts', 'independent', 'disk')


class Rate(NamedTuple):
  """What was measured of a way, in seconds of a set of any size.

  Attributes:
    epoch: c.
    transfer: h of a ring, x of parts that travel, 0 of the others.
  """

  epoch: float
  transfer: float = 0.0


@dataclasses.dataclass(frozen=True)
class Load:
  """What is to be trained, and where.

  Attributes:
    models: M, in all.
    stations: N, devices.
    epochs: E, of each model.
    data_bytes: S, of the training set's files.
    disk_rate: B, bytes a second, of all stations together.
  """

  models: int
  stations: int
  epochs: int
  data_bytes: float
  disk_rate: float

  @property
  def slots(self) -> int:
    """Slots of a ring."""
    most, fewest = sorted((self.models, self.stations))[::-1]
    return most * self.epochs + fewest - 1

  @property
  def _rounds(self):
    """Models that the busiest station trains one after another."""
    return -(-self.models // self.stations)

  @property
  def _read_seconds(self):
    """Seconds in which the disk gives all of the set once."""
    return self.data_bytes / self.disk_rate

  def ring(self, rate: Rate) -> float:
    """Returns the seconds of a ring."""
    wait = max(0.0, self._read_seconds - rate.epoch)
    return self.slots * (rate.epoch / self.stations + rate.transfer) + wait

  def parts(self, rate: Rate) -> float:
    """Returns the seconds where models stay and parts of the set travel."""
    turns = self._rounds * self.epochs * self.stations
    turn = rate.epoch / self.stations + rate.transfer
    return self._read_seconds + turns * turn

  def independent(self, rate: Rate) -> float:
    """Returns the seconds where each station has the whole set in memory."""
    readers = min(self.models, self.stations)
    wait = max(0.0, readers * self._read_seconds - rate.epoch)
    return self._rounds * self.epochs * rate.epoch + wait

  def disk(self, rate: Rate) -> float:
    """Returns the seconds where each epoch reads the whole set from disk."""
    full, rest = divmod(self.models, self.stations)
    seconds = full * max(rate.epoch, self.stations * self._read_seconds)
    if rest:
      seconds += max(rate.epoch, rest * self._read_seconds)
    return self.epochs * seconds

  def data(self, way: str) -> tuple[float, float]:
    """Returns the bytes that a way reads from disk, and keeps at a station."""
    size, readers = self.data_bytes, min(self.models, self.stations)
    return {
      'ring': (size, size / self.stations),
      'parts': (size, size / self.stations),
      'independent': (readers * size, size),
      'disk': (self.models * self.epochs * size, 0.0),
    }[way]

  def hours(self, rates: Mapping[str, Rate]) -> dict[str, float]:
    """Returns the hours of each way, of WAYS, that has a rate."""
    return {way: getattr(self, way)(rate) / 3600 for way, rate in rates.items()}


def table(load: Load, rates: Mapping[str, Rate], names: Mapping[str, str]) -> list[tuple[str, ...]]:
  """Returns what each way would take, one a row, after a head.

  Args:
    load: what is to be trained.
    rates: by way; 'ring' is one of them.
    names: of the ways, for people.
  """
  hours = load.hours(rates)
  rows = [('', 'hours', 'saved by the ring', 'GB read', 'GB held a station')]
  for way, value in hours.items():
    read_bytes, kept_bytes = load.data(way)
    rows.append(
      (
        names[way],
        f'{value:.1f}',
        f'{value - hours["ring"]:+.1f}',
        f'{read_bytes / 1e9:.0f}',
        f'{kept_bytes / 1e9:.1f}',
      )
    )
  return rows
