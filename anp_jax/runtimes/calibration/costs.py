"""Predicted seconds of a step with split convolutions, from measured times.

A step is a sum. Devices wait for each other where a split layer's parts are
joined: up to there each computes its part of that layer, all layers before that
are not split, and the rest, and the slowest counts. The collectives are added.
Nothing overlaps: forward and backward, a layer needs the result of the layer
before.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools

import numpy as np

# Features that registers or matrix units compute together: rounding a device's
# share up to a multiple costs nothing.
MULTIPLES = {'cpu': 8, 'gpu': 8, 'tpu': 128}
# By the path of each layer that is split: features of each device.
Split = Mapping[str, Sequence[int]]


@dataclasses.dataclass(frozen=True)
class CollectiveCost:
  """Seconds of collectives between the devices of a plan.

  Attributes:
    gather: (seconds, seconds per byte) of a gather, by the bytes that a device
      has in the end.
    total: (seconds, seconds per byte) of a sum over the devices, by its bytes.
  """

  gather: Sequence[float]
  total: Sequence[float]

  def gather_seconds(self, size: float) -> float:
    """Returns the seconds of a gather of that many bytes."""
    return self.gather[0] + size * self.gather[1]

  def sum_seconds(self, size: float) -> float:
    """Returns the seconds of a sum of that many bytes."""
    return self.total[0] + size * self.total[1]


NO_COLLECTIVES = CollectiveCost((0.0, 0.0), (0.0, 0.0))


@dataclasses.dataclass(frozen=True)
class Layer:
  """Measured times and sizes of one layer, for a device's images of a step.

  Attributes:
    features: output channels.
    alone: seconds of each device for all features, not split.
    counts: numbers of features that were timed, ascending, the last one all.
    seconds: seconds of each device for each of counts: forward and backward, as
      part of a split layer.
    output: bytes of the gathered map: the result, after functions that keep
      channels apart.
    input: bytes of the operand; 0 where it needs no gradient.
    kernel: bytes of the kernel's gradient.
    uses: number of collectives that gather the map.
    reads: path of the layer whose map is the operand; '': another array.
  """

  features: int
  alone: Sequence[float]
  counts: Sequence[int]
  seconds: Sequence[Sequence[float]]
  output: int
  input: int
  kernel: int
  uses: int = 1
  reads: str = ''

  def seconds_for(self, device: int, count: int | np.ndarray) -> np.ndarray:
    """Returns the seconds of a device for that many features (any shape).

    Interpolates between measured counts; below them, extends the first line,
    but not to less than in proportion.
    """
    count = np.asarray(count, float)
    times = np.maximum.accumulate(self.seconds[device])
    below = times[0] * count / self.counts[0]
    if len(self.counts) > 1:
      slope = (times[1] - times[0]) / (self.counts[1] - self.counts[0])
      line = times[0] + (count - self.counts[0]) * slope
      below = np.maximum(line, below)
    seconds = np.interp(count, self.counts, times)
    seconds = np.where(count < self.counts[0], below, seconds)
    return np.where(count > 0, seconds, 0.0)


@dataclasses.dataclass(frozen=True)
class Costs:
  """Measured times and sizes of a network on the devices of a mesh.

  Attributes:
    names: names of the devices, for people.
    unsplit: seconds of a step of each device by itself, nothing split.
    layers: path to Layer, for those that may be split.
    other_bytes: bytes of the gradients of all other parameters.
    link: cost of collectives between the devices.
    multiple: number of features that are computed together, see MULTIPLES.
  """

  names: Sequence[str]
  unsplit: Sequence[float]
  layers: Mapping[str, Layer]
  other_bytes: int
  link: CollectiveCost
  multiple: int = 1

  # For people: the devices, and those that compute a layer that is not split.
  devices_are = 'along mesh.model'
  computes_unsplit = 'every device'

  @classmethod
  def from_json(cls, values: dict) -> 'Costs':
    """Reads what `to_json` returned, also after a round trip through JSON."""
    layers = {k: Layer(**v) for k, v in values['layers'].items()}
    return cls(**{**values, 'layers': layers, 'link': CollectiveCost(**values['link'])})

  def to_json(self) -> dict:
    """Returns all fields as JSON values."""
    return dataclasses.asdict(self)

  def of_devices(self, devices: Sequence[int]) -> 'Costs':
    """Returns the costs of some of the devices, by index, as measured with the others."""

    def some(values):
      return [values[d] for d in devices if d < len(values)]

    return dataclasses.replace(self.mapped(some), names=some(self.names))

  def mapped(self, change: Callable[[Sequence], list]) -> 'Costs':
    """Returns the costs with each list of values by device changed, such as `unsplit`."""
    layers = {
      path: dataclasses.replace(layer, alone=change(layer.alone), seconds=change(layer.seconds))
      for path, layer in self.layers.items()
    }
    return dataclasses.replace(self, unsplit=change(self.unsplit), layers=layers)

  @property
  def baseline(self) -> int:
    """The index of the device that would be the fastest alone."""
    return int(np.argmin(self.unsplit))

  @property
  def alone(self) -> float:
    """Seconds of a step on the baseline device, nothing split."""
    return self.unsplit[self.baseline]

  def ideal_seconds(self) -> float:
    """Returns the seconds of a step if communication took no time.

    Convolutions at all devices' rates together, the rest at the baseline's: on
    n equal devices 1 / ((1 - f) + f / n) times as fast as on one, where f is the
    fraction of its step that convolutions take.
    """
    return self._rest[self.baseline] + sum(
      1 / sum(1 / t for t in layer.alone) for layer in self.layers.values()
    )

  def layer_seconds(
    self, path: str, counts: Sequence[int] | None, plan: Split, behind: float | np.ndarray = 0.0
  ) -> float:
    """Returns the seconds of a layer.

    Args:
      path: path of the layer.
      counts: features of each device; None: not split.
      plan: plan of the layers before.
      behind: seconds that each device computes before; see `behind`.
    """
    communication = self._communication(path, counts, plan)
    return max(behind + np.array(self._work(path, counts))) + communication

  def step_seconds(self, plan: Split) -> float:
    """Returns the predicted seconds; layers without a plan are not split."""
    kernels = [layer.kernel for path, layer in self.layers.items() if path not in plan]
    gradients = self.link.sum_seconds(self.other_bytes + sum(kernels))
    if not plan:
      return max(self.unsplit) + gradients
    seconds, behind = self._progress(plan)
    return float(seconds + max(behind) + gradients)

  def behind(self, plan: Split, path: str) -> np.ndarray:
    """Returns the seconds of each device since the last wait, up to a layer.

    Args:
      plan: plan of the layers before.
      path: path of the layer.
    """
    return self._progress(plan, path)[1]

  def _progress(self, plan, until=None):
    """Returns the seconds up to the last wait, and those of each device since then.

    Args:
      plan: plan of the layers.
      until: path of the layer before whose own work to stop; None: the end.
    """
    seconds, behind = 0.0, np.zeros(len(self.names))
    for path in self.layers:
      counts = plan.get(path)
      behind = behind + self._rest_by_layer[path]
      if path == until:
        break
      behind = behind + self._work(path, counts)
      if counts is not None:
        seconds += max(behind) + self._communication(path, counts, plan)
        behind = np.zeros(len(self.names))
    return seconds, behind

  def _work(self, path, counts):
    """Returns the seconds that each device computes for a layer."""
    layer = self.layers[path]
    if counts is None:
      return layer.alone
    return [float(layer.seconds_for(d, n)) for d, n in enumerate(counts)]

  def _communication(self, path, counts, plan):
    """Returns the seconds in which a layer's map and its operand's gradient travel."""
    if counts is None:
      return 0.0
    layer = self.layers[path]
    latencies = (layer.uses - 1) * self.link.gather[0]
    seconds = latencies + self.link.gather_seconds(layer.output * _padding(counts))
    if not layer.input:
      return seconds
    operand = plan.get(layer.reads)
    if operand is None:  # every device has to have all of the gradient
      seconds += (layer.uses - 1) * self.link.total[0]
      return seconds + self.link.sum_seconds(layer.input)
    # Each device gets the sum of its own channels: a gather backwards.
    size = layer.input * _padding(operand)
    return seconds + latencies + self.link.gather_seconds(size)

  @functools.cached_property
  def _rest_by_layer(self):
    """Each layer's part of each device's rest, by the layer's share of seconds."""
    shares = {k: np.mean(v.alone / self._convolutions) for k, v in self.layers.items()}
    return {path: share * self._rest for path, share in shares.items()}

  @functools.cached_property
  def _rest(self):
    """Seconds of everything outside the layers here, of each device of `unsplit`."""
    return np.maximum(self.unsplit - self._convolutions[: len(self.unsplit)], 0.0)

  @functools.cached_property
  def _convolutions(self):
    """Seconds of each device for all layers here, not split."""
    return np.sum([layer.alone for layer in self.layers.values()], 0)


@dataclasses.dataclass(frozen=True)
class OffloadCosts(Costs):
  """Costs of the training device, which comes first, and its offload devices.

  The offload devices compute nothing of the rest, and their times include the
  transfers. `unsplit` has the training device alone.
  """

  devices_are = 'offload devices from 1 on'
  computes_unsplit = 'device 0'

  @property
  def baseline(self) -> int:
    """The index of the training device."""
    return 0

  def step_seconds(self, plan: Split) -> float:
    """Returns the predicted seconds: the rest, and each layer's slowest device."""
    return self._rest[0] + sum(
      self.layer_seconds(path, plan.get(path), plan) for path in self.layers
    )

  def _work(self, path, counts):
    if counts is None:
      return [self.layers[path].alone[0]]
    return super()._work(path, counts)

  @functools.cached_property
  def _rest_by_layer(self):  # offload devices wait for what is sent
    return dict.fromkeys(self.layers, np.zeros(len(self.names)))

  def _communication(self, path, counts, plan):
    return 0.0  # in the devices' times


def _padding(counts):
  """Returns the seconds of a gather over those of equal parts: the largest part decides."""
  return len(counts) * max(counts) / sum(counts)
