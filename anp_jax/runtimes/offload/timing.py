"""What a network's convolutions take on a device and on its helpers.

As `timing` and `costs`, but helpers compute nothing of the rest, and what they
are given and give back is timed with their work: no sums travel beside.
"""

import dataclasses

import numpy as np

from anp_jax.runtimes.calibration import costs as costs_lib
from anp_jax.runtimes.calibration import timing as timing_lib
from anp_jax.runtimes.offload import device as device_lib


class Timing(timing_lib.Timing):
  """Times convolutions and the whole step, round after round."""

  def __init__(self, spec, processes):
    """Compiles all of it, on the helpers too; as `timing.Timing`."""
    self._helpers = spec.offload_devices
    super().__init__(spec, processes)

  def costs(self, names, alike: bool) -> 'Costs':
    """Medians over the rounds.

    Args:
      names: of the device and its helpers, for people.
      alike: not looked at: what helpers take has their way in it.
    """
    del alike
    layers = {
      path: self._layer([call for call, _ in self._uses[path]], seconds.T)
      for path, seconds in self._layers().items()
    }
    (step,) = self._times(0)
    free = costs_lib.Link((0.0, 0.0), (0.0, 0.0))
    return Costs(
      names=tuple(names), whole=(float(step),), layers=layers, others=0,
      link=free, alike=False,
      multiple=costs_lib.MULTIPLES.get(self._devices[0].platform, 1),
    )  # fmt: skip

  def _more(self, call, count, split):
    # A layer that is not split is the training device's alone.
    return [_helping(call, count, h) for h in self._helpers] if split else []

  def _ways(self, place):
    alone, *split = [self._times(p) for p in range(place.start, place.stop)]
    # What a helper takes for all of a layer is that of the last count.
    return np.array([[*alone, *split[-1][1:]], *split])

  def _links(self):
    return []


@dataclasses.dataclass(frozen=True)
class Costs(costs_lib.Costs):
  """`costs.Costs`, of the device that trains and of its helpers after it."""

  @property
  def baseline(self) -> int:
    """The device that trains."""
    return 0

  def step(self, plan) -> float:
    """Seconds of a step: of each layer the slowest's, and the rest."""
    return self._rest(0) + sum(
      self.layer(path, plan.get(path)) for path in self.layers
    )

  def _work(self, path, counts):
    if counts is None:
      return [self.layers[path].alone[0]]
    return super()._work(path, counts)

  def _travel(self, path, counts):
    return 0.0  # in their times

  def _where(self):
    return 'helpers from 1 on'


def _helping(call, count, helper):
  """() -> a function that has a helper compute features, and waits for it."""

  def make():
    task = device_lib.Task.create(
      call.convolve, call.x, call.kernel, call.y, count
    )
    random = np.random.default_rng(0)
    x, kernel, dy = (
      (random.random(like.shape, np.float32) - 0.5).astype(like.dtype)
      for like in (task.x, task.kernel, task.y)
    )

    def run():
      helper.forward(task, x, kernel, True).result()
      # In turn, so that the last one ends last; results are in host memory.
      helper.backward(task, dy, not call.reads_images)[1].result()

    return run

  return make
