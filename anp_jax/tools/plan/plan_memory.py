"""The memory that a device needs for a step."""

import dataclasses

from anp_jax.config import strategy as strategy_lib
from anp_jax.costs import device_step, steps

# Of a device's memory that a run may use: on a GPU what main.py sets as
# XLA_CLIENT_MEM_FRACTION.
_USABLE = {'tensor': 0.85, 'vector': 0.85, 'tpu': 0.95, 'cpu': 0.9}
# Temporary arrays, over the activations that the backward pass needs: XLA's
# own count of ResNet-50 for an H200 (32 images of 224 px in bfloat16: 2,007 MB,
# docs/log.md) less state and gradients, over the activations.
_TEMPORARY = 1.15
_PIXEL_BYTES = 3


@dataclasses.dataclass(frozen=True)
class Memory:
  """Bytes of one device.

  Attributes:
    state: bytes of parameters, statistics, optimizer and averages.
    gradients: bytes of gradients, and of parameters gathered for a step.
    image: bytes per image: activations, temporary arrays, two batches of input.
    images: images at a time.
    limit: bytes that a run may use.
  """

  state: float
  gradients: float
  image: float
  images: float
  limit: float

  @property
  def total(self) -> float:
    """All bytes."""
    return self.state + self.gradients + self.image * self.images

  @property
  def fits(self) -> bool:
    """Whether a run fits."""
    return self.total <= self.limit

  @property
  def most_images(self) -> int:
    """Images at a time that would fit."""
    rest = self.limit - self.state - self.gradients
    return max(0, int(rest // self.image))


def count(setting: steps.Setting, images: float) -> Memory:
  """Counts the memory of a device that computes `images` in a step."""
  workload, config, size = setting.workload, setting.config, setting.cluster.size
  strategy = strategy_lib.find(config)
  divided = size // strategy.groups(config, size) if setting.is_sharded else 1
  # One after another; the gradients of all are there until they are used.
  passes = strategy.passes(config, size)
  gradients = passes * workload.param_bytes / divided
  if divided > 1:
    gradients += workload.param_bytes  # gathered for the step
  state = strategy.state_bytes(config, workload, size, divided)
  at_once = images / passes / config.accumulate
  # The backward pass needs what each layer reads and writes.
  activations = sum(x.inputs + x.outputs for x in workload.layers)
  image = _TEMPORARY * activations * device_step.width(workload.dtype)
  image += 2 * _PIXEL_BYTES * config.data.image_size**2
  limit = setting.device.gigabytes * 1e9 * _USABLE[setting.device.kind]
  return Memory(state, gradients, image, at_once, limit)
