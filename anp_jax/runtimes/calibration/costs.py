"""What a step takes, by a model of measured times; and the plan it makes best.

A step is a sum: each device's work on a layer, of which the slowest counts;
what the layer's parts take to travel; and the rest, which all compute. Nothing
of it overlaps: forward and backward, a layer needs what the one before gave.
"""

import bisect
from collections.abc import Sequence
import dataclasses

import numpy as np

from anp_jax.parallel import apportionment as shares_lib

# Features that come together in registers or matrix units: of a device's share
# a multiple is no slower than less.
MULTIPLES = {'cpu': 8, 'gpu': 8, 'tpu': 128}
# Times of devices that differ by less than this are of one speed.
_ALIKE = 1.1


@dataclasses.dataclass(frozen=True)
class Link:
  """How long collectives take between the devices of a plan.

  Attributes:
    gather: (seconds, seconds a byte) of a gather; bytes are those that a device
      has in the end.
    total: likewise of a sum over the devices, of its bytes.
  """

  gather: tuple[float, float]
  total: tuple[float, float]

  @classmethod
  def ring(cls, devices: int, bandwidth: float, latency: float):
    """Of devices each with a link of its own, one way at a time.

    Args:
      devices: in the ring.
      bandwidth: bytes a second of each link.
      latency: seconds a message.
    """
    hops = devices - 1
    gather = (hops * latency, hops / devices / bandwidth)
    return cls(gather, tuple(2 * x for x in gather))

  def gathers(self, size: float) -> float:
    """Seconds of a gather of so many bytes."""
    return self.gather[0] + size * self.gather[1]

  def sums(self, size: float) -> float:
    """Seconds of a sum of so many bytes."""
    return self.total[0] + size * self.total[1]


@dataclasses.dataclass(frozen=True)
class Layer:
  """What was measured of a layer: of all a device's images of a step.

  Attributes:
    features: that it has.
    alone: seconds of each device for all of it, not split.
    counts: features of which the times are, ascending, the last one all.
    seconds: of each device, for each of counts: forward and backward, as part
      of a split layer.
    output: bytes of what it gives.
    input: bytes of what it is given; 0 where no gradient of that is asked for.
    kernel: bytes of its gradient.
    uses: collectives that join what it gives.
  """

  features: int
  alone: tuple[float, ...]
  counts: tuple[int, ...]
  seconds: tuple[tuple[float, ...], ...]
  output: int
  input: int
  kernel: int
  uses: int = 1

  def takes(self, device: int, count) -> np.ndarray:
    """Seconds that a device works on so many features (any shape).

    Between two counts that were measured on a line, and below them on that of
    the first two, but not less than in proportion.
    """
    count = np.asarray(count, float)
    times = np.maximum.accumulate(self.seconds[device])
    found = np.interp(count, self.counts, times)
    if len(self.counts) > 1:
      slope = (times[1] - times[0]) / (self.counts[1] - self.counts[0])
      line = times[0] + (count - self.counts[0]) * slope
      share = times[0] * count / self.counts[0]
      low = np.maximum(line, share)
    else:
      low = times[0] * count / self.counts[0]
    found = np.where(count < self.counts[0], low, found)
    return np.where(count > 0, found, 0.0)


@dataclasses.dataclass(frozen=True)
class Costs:
  """What was measured of a network on some devices.

  Attributes:
    names: of the devices, for people.
    whole: seconds of a step of the network that is not split, of each device.
    layers: path to Layer, for those that may be split.
    others: bytes of all parameters' gradients that no layer here has.
    link: between the devices.
    alike: whether the devices are of one kind.
    multiple: see MULTIPLES.
  """

  names: tuple[str, ...]
  whole: tuple[float, ...]
  layers: dict[str, Layer]
  others: int
  link: Link
  alike: bool = True
  multiple: int = 1

  @property
  def baseline(self) -> int:
    """The device that would be the fastest alone."""
    return int(np.argmin(self.whole))

  @property
  def alone(self) -> float:
    """Seconds of a step on the baseline device, nothing split."""
    return self.whole[self.baseline]

  @property
  def share(self) -> float:
    """Of the baseline's step, what the convolutions are."""
    return min(self._convolutions(self.baseline) / self.alone, 1.0)

  def ideal(self) -> float:
    """Seconds of a step were nothing to travel.

    Convolutions at all devices' rates together, the rest at the baseline's: of
    n equal devices 1 / ((1 - f) + f / n) times as fast as one, f being `share`.
    """
    return self._rest(self.baseline) + sum(
      1 / sum(1 / t for t in layer.alone) for layer in self.layers.values()
    )

  def layer(self, path: str, counts: Sequence[int] | None) -> float:
    """Seconds of a layer, split so; None: all devices compute all of it."""
    return max(self._work(path, counts)) + self._travel(path, counts)

  def step(self, plan: dict[str, Sequence[int]]) -> float:
    """Seconds of a step with these layers split."""
    if not plan:
      kernels = sum(layer.kernel for layer in self.layers.values())
      gradients = 0 if self.alike else self.others + kernels
      return max(self.whole) + self.link.sums(gradients)
    work = np.array([self._work(path, plan.get(path)) for path in self.layers])
    rest = [self._rest(d) for d in range(len(self.names))]
    # The slowest device's, and what it waits for others that are slower on a
    # layer. A device's rest is a difference of what was measured of it, so that
    # an error there is made good by what it has of the convolutions.
    own = (rest + work.sum(0)).max()
    waits = work.max(1).sum() - work.sum(0).max()
    sent = sum(self._travel(path, plan.get(path)) for path in self.layers)
    whole = [x.kernel for path, x in self.layers.items() if path not in plan]
    gradients = self.link.gather[0] + self.link.sums(self.others + sum(whole))
    return float(own + waits + sent + gradients)

  def best(self) -> dict[str, tuple[int, ...]]:
    """Counts for each layer that is best split; {} if nothing is.

    Splitting one layer does not change what another takes, so each is looked at
    alone: left whole, or divided over the fastest one, two, ... devices such
    that they need equally long; or nearly so, for the widest part is what
    travels.
    """
    plan = {}
    if len(self.names) == 1:
      return plan
    for path, layer in self.layers.items():
      order = np.argsort(layer.alone, kind='stable')
      ways = [
        self.balanced(path, order[: k + 1], most)
        for k in range(len(order))
        for most in _widths(layer.features, k + 1)
      ]
      # Left whole, its gradient is summed with the others.
      summed = layer.kernel * self.link.total[1]
      best = min(ways, key=lambda counts: self.layer(path, counts))
      if self.layer(path, best) < self.layer(path, None) + summed:
        plan[path] = best
    return plan if self.step(plan) < self.step({}) else {}

  def balanced(
    self, path: str, devices: Sequence[int], most: float = np.inf
  ) -> tuple[int, ...]:
    """Counts with which these devices need equally long; 0 for others.

    Args:
      path: of the layer.
      devices: among which it is divided.
      most: features that one may have, if the others can have the rest.
    """
    layer = self.layers[path]
    unit = self.multiple
    if layer.features < unit * len(devices):
      unit = 1
    counts = np.arange(0, layer.features + 1, unit)
    counts = counts[counts <= max(most, -(-layer.features // len(devices)))]
    times = [layer.takes(d, counts) for d in devices]
    bounds = np.unique(np.concatenate(times))
    needed = layer.features // unit
    enough = bisect.bisect_left(
      bounds, True,
      key=lambda bound: sum(_reached(t, bound) for t in times) >= needed,
    )  # fmt: skip
    bound = bounds[min(enough, len(bounds) - 1)]
    shares = [0] * len(self.names)
    for device, t in zip(devices, times, strict=True):
      shares[device] = _reached(t, bound)
    return shares_lib.apportion(layer.features, shares, unit)

  def table(self, plan: dict[str, Sequence[int]]) -> list[str]:
    """Lines that tell a person of the plan."""
    names = [f'{i}: {n}' for i, n in enumerate(self.names)]
    lines = [f'devices  {"; ".join(names)}, {self._where()}']
    width = max((len(p) for p in self.layers), default=0)
    for path, layer in self.layers.items():
      counts = plan.get(path)
      text = 'all by all'
      if counts and sorted(counts)[-2:][0] == 0:
        text = f'all by {int(np.argmax(counts))}'
      elif counts:
        text = ' + '.join(map(str, counts))
      if plan:
        text += f', {_seconds(self.layer(path, counts))}'
      alone = layer.alone[self.baseline]
      lines.append(
        f'plan     {path.ljust(width)}  {layer.features} features, '
        f'{_seconds(alone)} alone; {text}'
      )
    step = self.step(plan)
    ratio = self.alone / step
    what = 'a step' if plan else 'nothing is split; a step'
    lines.append(
      f'plan     {what} is to take {_seconds(step)}, {_seconds(self.alone)} on '
      f'device {self.baseline} alone: {ratio:.2f} times as fast'
    )
    if ratio < 0.95:
      lines.append(
        f'plan     alone, {self.names[self.baseline]} would be faster'
      )
    return lines

  def _where(self):
    return 'along mesh.model'

  def _work(self, path, counts):
    """Seconds of each device on a layer."""
    layer = self.layers[path]
    if counts is None:
      return list(layer.alone)
    return [float(layer.takes(d, n)) for d, n in enumerate(counts)]

  def _travel(self, path, counts):
    """Seconds in which a layer's parts and gradients are joined."""
    if counts is None:
      return 0.0
    layer = self.layers[path]
    # Parts of one size, as wide as the widest.
    widened = len(counts) * max(counts) / layer.features
    starts = (layer.uses - 1) * self.link.gather[0]
    sent = starts + self.link.gathers(layer.output * widened)
    if layer.input:
      sent += (layer.uses - 1) * self.link.total[0]
      sent += self.link.sums(layer.input)
    # The kernel's latency is that of all gradients, see `step`.
    return sent + layer.kernel * widened * self.link.gather[1]

  def _rest(self, device):
    """Seconds of all that is in no layer here."""
    return max(self.whole[device] - self._convolutions(device), 0.0)

  def _convolutions(self, device):
    return sum(layer.alone[device] for layer in self.layers.values())


def pooled(costs: Costs) -> Costs:
  """Devices that are nearly of one speed are taken to be of one.

  What was measured of them differs by chance, and shares would follow it.
  """
  order = sorted(range(len(costs.whole)), key=lambda d: costs.whole[d])
  alike = {}
  for d in order:
    fastest = next(
      (f for f in alike if costs.whole[d] <= _ALIKE * costs.whole[f]), d
    )
    alike.setdefault(fastest, []).append(d)
  of = {d: group for group in alike.values() for d in group}

  def mean(values):
    return tuple(
      np.mean([values[i] for i in of[d]], 0).tolist()
      for d in range(len(values))
    )

  layers = {
    path: dataclasses.replace(
      layer, alone=mean(layer.alone),
      seconds=tuple(map(tuple, mean(layer.seconds))),
    )
    for path, layer in costs.layers.items()
  }  # fmt: skip
  return dataclasses.replace(costs, whole=mean(costs.whole), layers=layers)


def _widths(features, devices):
  """Features of the widest part, from equal parts to all."""
  return np.unique(np.linspace(-(-features // devices), features, 16).round())


def _reached(times, bound):
  """The most units that take at most `bound`."""
  return int(np.searchsorted(times, bound, side='right')) - 1


def _seconds(value):
  return f'{value:.3g} s' if value >= 1 else f'{1e3 * value:.3g} ms'
