"""Memory that a device needs for a step."""

import dataclasses

from anp_jax.tools.plan import strategies

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
    state: parameters, statistics, optimizer and averages.
    gradients: and parameters gathered for a step.
    image: of each image: activations, temporary arrays, two batches of input.
    images: at a time.
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
    """Whether a run has room."""
    return self.total <= self.limit

  @property
  def most_images(self) -> int:
    """Images at a time that would fit."""
    rest = self.limit - self.state - self.gradients
    return max(0, int(rest // self.image))


def count(setting: strategies.Setting, images: float) -> Memory:
  """Counts what a device holds that computes `images` in a step."""
  workload, config = setting.workload, setting.config
  name, size = config.strategy.name, setting.cluster.size
  # Groups of `local_sgd` hold a state each, divided over the group's devices.
  groups = config.strategy.groups if name == 'local_sgd' else 1
  divided = max(1, size // groups) if setting.is_sharded else 1
  state = workload.state_bytes / divided
  gradients = workload.param_bytes / divided
  # One after another; the gradients of all are there until they are used.
  passes = max(1, groups // size)
  if name == 'invariant':
    passes = max(1, config.strategy.logical_shards // size)
  gradients *= passes
  if divided > 1:
    gradients += workload.param_bytes  # gathered for the step
  if name == 'parameter_server':
    # Optimizer state is with the servers, in a host's memory.
    state = workload.param_bytes + 4 * workload.statistics
  if name == 'local_sgd':
    state *= passes
    if config.strategy.outer != 'average':
      # Weights of the last exchange, and a momentum like them.
      state += 2 * workload.param_bytes / divided
  at_once = images / passes / config.accumulate
  image = _TEMPORARY * workload.activation_bytes
  image += 2 * _PIXEL_BYTES * config.data.image_size**2
  limit = setting.device.gigabytes * 1e9 * _USABLE[setting.device.kind]
  return Memory(state, gradients, image, at_once, limit)
