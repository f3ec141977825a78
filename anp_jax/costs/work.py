"""What a step computes, holds and sends, in numbers."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Layer:
  """A layer with a kernel, in the order of the forward pass.

  Attributes:
    path: of its parameters.
    flops: of the forward pass of one image.
    parameters: numbers in the kernel, and in what follows it up to the next
      layer with a kernel (biases, normalisation).
    inputs, outputs: numbers of one image that the layer reads and writes.
    is_convolution: whether `channel_split` can divide it.
    gathered: numbers of one image that its devices then gather.
    reads: path of the layer that gathered what it reads; '': none did.
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
  """What a step costs, and what a device has to hold for it.

  Attributes:
    name: of the network.
    dtype: of the computation.
    layers: with kernels, in the order of the forward pass.
    image_flops: multiplications and additions of products, forward and
      backward, of one image.
    image_bytes: that one image moves through the device's memory, if
      element-wise work is fused; without weights.
    step_bytes: that a step moves whatever the batch: weights and optimizer.
    kernels: separate passes of a step, see `memory_traffic`.
    parameters, statistics: numbers in them.
    state_bytes: of parameters, statistics, optimizer state and averages.
    param_bytes: of the parameters.
    activation_bytes: that the backward pass of one image needs.
    examples: images an epoch.
    total_images: images of the whole run.
  """

  name: str
  dtype: str
  layers: tuple[Layer, ...]
  image_flops: float
  image_bytes: float
  step_bytes: float
  kernels: int
  parameters: int
  statistics: int
  state_bytes: int
  param_bytes: int
  activation_bytes: float
  examples: int
  total_images: int
