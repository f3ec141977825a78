"""The work of a training step: operations, bytes and parameters."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Layer:
  """A layer with a kernel, in the order of the forward pass.

  Attributes:
    path: path of its parameters.
    flops: operations of the forward pass per image.
    parameters: numbers in the kernel and in the layers that follow it, up to the
      next one with a kernel (biases, normalisation).
    inputs, outputs: numbers per image that the layer reads and writes.
    is_convolution: whether `channel_split` can divide it.
    gathered: numbers per image that the devices gather after the layer.
    reads: path of the layer whose gathered map is read; '': none.
  """

  path: str
  flops: float
  parameters: int
  inputs: int
  outputs: int
  is_convolution: bool
  gathered: int = 0
  reads: str = ''


@dataclasses.dataclass(frozen=True)
class Workload:
  """The operations of a step, and the memory that it needs.

  Attributes:
    name: name of the network.
    dtype: dtype of the computation.
    layers: layers with kernels, in the order of the forward pass.
    image_flops: multiplications and additions of products per image, forward and
      backward.
    image_bytes: memory traffic per image, if element-wise work is fused; without
      weights.
    step_bytes: memory traffic of weights and optimizer, which does not depend on
      the batch.
    kernels: separate passes of a step, see `memory_traffic`.
    statistics: numbers in the statistics of batch norm.
    state_bytes: bytes of parameters, statistics, optimizer state and averages.
    param_bytes: bytes of the parameters.
    examples: images per epoch.
    total_images: images of the whole run.
  """

  name: str
  dtype: str
  layers: tuple[Layer, ...]
  image_flops: float
  image_bytes: float
  step_bytes: float
  kernels: int
  statistics: int
  state_bytes: int
  param_bytes: int
  examples: int
  total_images: int

  @property
  def parameters(self) -> int:
    """Numbers in the parameters."""
    return sum(layer.parameters for layer in self.layers)
