"""Batch norm and mean pools by oneDNN, and a cache of all operations."""

import ctypes
import functools
import math

from anp_jax.system.onednn import c_api, onednn_convolution, pieces, specs


class BatchNorm(pieces.Operation):
  """One direction of a batch norm; see `BatchNormSpec`.

  The addresses of `run`: forward: x, scale, shift, y, mean, variance, mask.
  backward: x, mean, variance, y's gradient, scale, mask, and the gradients of
  x, scale and shift, the last two for each group. The mask exists with a ReLU.

  Attributes:
    mask_bytes: bytes per group that the ReLU keeps for its gradient; 0 without one.
  """

  def __init__(self, api: c_api.Api, spec: specs.BatchNormSpec, threads: int):
    """Compiles the operation for a number of threads.

    Raises:
      OneDnnError: if oneDNN has only its slow reference, or none.
    """
    groups, rows, channels = spec.shape
    # A group's sums are over all of its rows, and cannot be cut.
    at_once = groups % threads == 0
    super().__init__(api, *((1, threads) if at_once else (threads, 1)))
    api.use_threads(self.threads)
    map_shape = (1, rows, 1, channels)
    x = pieces.describe_map(api, map_shape, spec.dtype)
    flags = c_api.SCALE | c_api.SHIFT | (c_api.RELU if spec.relu else 0)
    settings = ctypes.c_float(spec.epsilon), ctypes.c_uint(flags)
    forward = description = api.describe(
      'batch_normalization_forward', ctypes.c_int(c_api.FORWARD_TRAINING), x, x, *settings
    )
    if spec.direction == 'backward':
      description = api.describe(
        'batch_normalization_backward', ctypes.c_int(c_api.BACKWARD), x, x, x, *settings, forward
      )
    vector = api.array((channels,), 'float32', (1,))
    mask = api.query(forward, c_api.WORKSPACE)
    self.mask_bytes = api.size(mask)
    map_bytes = pieces.count_bytes((rows, channels), spec.dtype)
    # Each argument's name, description, and bytes from group to group.
    each = 4 * channels
    if spec.direction == 'forward':
      arguments = [
        (c_api.ARG_SRC, x, map_bytes),
        (c_api.ARG_SCALE, vector, 0),
        (c_api.ARG_SHIFT, vector, 0),
        (c_api.ARG_DST, x, map_bytes),
        (c_api.ARG_MEAN, vector, each),
        (c_api.ARG_VARIANCE, vector, each),
      ]
    else:
      arguments = [
        (c_api.ARG_SRC, x, map_bytes),
        (c_api.ARG_MEAN, vector, each),
        (c_api.ARG_VARIANCE, vector, each),
        (c_api.ARG_DIFF_DST, x, map_bytes),
        (c_api.ARG_SCALE, vector, 0),
        (c_api.ARG_DIFF_SRC, x, map_bytes),
        (c_api.ARG_DIFF_SCALE, vector, each),
        (c_api.ARG_DIFF_SHIFT, vector, each),
      ]
    if spec.relu:
      place = len(arguments) if spec.direction == 'forward' else 5
      arguments.insert(place, (c_api.ARG_WORKSPACE, mask, self.mask_bytes))
    primitive = pieces.compile_fast(
      api, spec, description, [argument[:2] for argument in arguments]
    )
    of_groups = [
      pieces.Piece(
        primitive, tuple((i, group * stride) for i, (*_, stride) in enumerate(arguments))
      )
      for group in range(groups)
    ]
    self.phases = [of_groups] if at_once else [[piece] for piece in of_groups]


class MeanPool(pieces.Operation):
  """One direction of a mean over windows; see `MeanPoolSpec`.

  The addresses of `run`: a map and its means, or their gradients the other way.
  """

  def __init__(self, api: c_api.Api, spec: specs.MeanPoolSpec, threads: int):
    """Compiles the operation for a number of threads.

    Raises:
      OneDnnError: if oneDNN has only its slow reference, or none.
    """
    flops = math.prod(spec.result) * spec.window**2
    parts, each = pieces.count_parts(spec.image[0], threads, flops)
    super().__init__(api, each, threads // each)
    api.use_threads(each)
    part = pieces.part_of(spec, parts)
    image, result = pieces.describe_maps(api, part)
    top, bottom, left, right = spec.pads
    window = [
      c_api.dimensions(values)
      for values in (
        (spec.stride, spec.stride),
        (spec.window, spec.window),
        (0, 0),
        (top, left),
        (bottom, right),
      )
    ]
    algorithm = ctypes.c_int(c_api.MEAN_WITH_PADDING)
    forward = description = api.describe(
      'pooling_forward', ctypes.c_int(c_api.FORWARD_TRAINING), algorithm, image, result, *window
    )
    arguments = [(c_api.ARG_SRC, image), (c_api.ARG_DST, result)]
    shapes = part.image, part.result
    if spec.direction == 'backward':
      description = api.describe('pooling_backward', algorithm, image, result, *window, forward)
      arguments = [(c_api.ARG_DIFF_DST, result), (c_api.ARG_DIFF_SRC, image)]
      shapes = part.result, part.image
    primitive = pieces.compile_fast(api, spec, description, arguments)
    source, target = (pieces.count_bytes(shape, spec.dtype) for shape in shapes)
    self.phases = [
      [
        pieces.Piece(primitive, ((0, i * source), (pieces.RESULT, i * target)))
        for i in range(parts)
      ]
    ]


_OPERATIONS = {
  specs.ConvolutionSpec: onednn_convolution.Convolution,
  specs.BatchNormSpec: BatchNorm,
  specs.MeanPoolSpec: MeanPool,
}


@functools.cache
def create(api: c_api.Api, text: str, threads: int) -> pieces.Operation:
  """Returns the operation of a name, cached for each number of threads.

  Raises:
    OneDnnError: if oneDNN cannot compute it.
  """
  spec = specs.parse(text)
  return _OPERATIONS[type(spec)](api, spec, threads)
