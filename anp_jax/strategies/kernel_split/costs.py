"""What a step takes, by a model of measured times; and the plan it makes best.

A step is a sum: each device's work on a layer, of which the slowest counts;
what the layer's parts take to travel; and the rest, which all compute. Nothing
of it overlaps: forward and backward, a layer needs what the one before gave.
"""

import bisect
from collections.abc import Sequence
import dataclasses

import numpy as np

from anp_jax.strategies import shares as shares_lib

# Features that come together in registers or matrix units: of a device's share
# a multiple is no slower than less.
MULTIPLES = {'cpu': 8, 'gpu': 8, 'tpu': 128}


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
  """What was measured of a layer, with one image or more a device.

  Attributes:
    features: that it has.
    alone: seconds of each device for all of it, not split.
    counts: features of which the times are, ascending, the last one all.
    seconds: of each device, for each of counts: forward and backward, as part
      of a split layer.
    output: bytes of what it gives.
    input: bytes of what it is given; 0 where no gradient of that is asked for.
    kernel: bytes of it.
  """

  features: int
  alone: tuple[float, ...]
  counts: tuple[int, ...]
  seconds: tuple[tuple[float, ...], ...]
  output: int
  input: int
  kernel: int

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
    multiple: see MULTIPLES.
  """

  names: tuple[str, ...]
  whole: tuple[float, ...]
  layers: dict[str, Layer]
  others: int
  link: Link
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
    return self._convolutions(self.baseline) / self.alone

  def rest(self) -> float:
    """Seconds of all that is not in a layer, on the slowest device."""
    return max(
      max(w - self._convolutions(d), 0.0) for d, w in enumerate(self.whole)
    )

  def ideal(self) -> float:
    """Seconds of a step were nothing to travel.

    Convolutions at all devices' rates together, the rest at the baseline's: of
    n equal devices 1 / ((1 - f) + f / n) times as fast as one, f being `share`.
    """
    rest = max(self.alone - self._convolutions(self.baseline), 0.0)
    return rest + sum(
      1 / sum(1 / t for t in layer.alone) for layer in self.layers.values()
    )

  def layer(self, path: str, counts: Sequence[int] | None) -> float:
    """Seconds of a layer, split so; None: all devices compute all of it."""
    layer, devices = self.layers[path], range(len(self.names))
    if counts is None:
      return max(layer.alone)
    work = max(float(layer.takes(d, n)) for d, n in zip(devices, counts))
    # Parts of one size, as wide as the widest.
    widened = len(counts) * max(counts) / layer.features
    sent = self.link.gathers(layer.output * widened)
    if layer.input:
      sent += self.link.sums(layer.input)
    # The kernel's latency is that of all gradients, see `step`.
    return work + sent + layer.kernel * widened * self.link.gather[1]

  def step(self, plan: dict[str, Sequence[int]]) -> float:
    """Seconds of a step with these layers split."""
    if not plan:
      return max(self.whole) + self.link.sums(0)
    whole = [x.kernel for path, x in self.layers.items() if path not in plan]
    gradients = self.link.gather[0] + self.link.sums(self.others + sum(whole))
    layers = sum(self.layer(path, plan.get(path)) for path in self.layers)
    return self.rest() + layers + gradients

  def best(self) -> dict[str, tuple[int, ...]]:
    """Counts for each layer that is best split; {} if nothing is.

    Splitting one layer does not change what another takes, so each is looked at
    alone: left whole, or divided over the fastest one, two, ... devices such
    that they need equally long; or nearly so, for the widest part is what
    travels.
    """
    plan = {}
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
    lines = [f'devices  {"; ".join(names)}, along mesh.model']
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
    if not plan and ratio < 0.95:
      lines.append(
        f'plan     alone, {self.names[self.baseline]} would be faster'
      )
    return lines

  def _convolutions(self, device):
    return sum(layer.alone[device] for layer in self.layers.values())


def _widths(features, devices):
  """Features of the widest part, from equal parts to all."""
  return np.unique(np.linspace(-(-features // devices), features, 16).round())


def _reached(times, bound):
  """The most units that take at most `bound`."""
  return int(np.searchsorted(times, bound, side='right')) - 1


def _seconds(value):
  return f'{value:.3g} s' if value >= 1 else f'{1e3 * value:.3g} ms'
