"""Convolutions, batch norm and mean pools by oneDNN, one object for each shape.

An operation is named by a text, which a compiled program carries: so programs
can be kept on disk, and one that is read from there makes its operations again.
"""

import ast
import ctypes
import functools
import math
from typing import NamedTuple

from anp_jax.system.onednn import c_api

# XLA's name for a call of any of these.
TARGET = 'anp_onednn'
_ALIGNMENT = 64  # bytes, of arrays within the scratch memory


class ConvolutionSpec(NamedTuple):
  """A convolution's shapes.

  Attributes:
    direction: 'forward', 'backward_data' or 'backward_weights'.
    dtype: of all arrays; float32 or bfloat16. Sums are in float32.
    image: (batch, height, width, channels).
    kernel: (height, width, channels of a group, features).
    result: (batch, height', width', features).
    stride: pixels, both ways.
    pads: (top, bottom, left, right), none below zero.
    groups: of channels, each convolved with its share of the features.
    waits: whether `run` gets one more address after the arguments', where it
      reads nothing: XLA makes such an argument before it runs the call.
  """

  direction: str
  dtype: str
  image: tuple[int, ...]
  kernel: tuple[int, ...]
  result: tuple[int, ...]
  stride: int
  pads: tuple[int, ...]
  groups: int = 1
  waits: bool = False


class BatchNormSpec(NamedTuple):
  """A batch norm of groups, with or without the ReLU after it.

  Attributes:
    direction: 'forward' or 'backward'.
    dtype: of x and y; float32 or bfloat16. All else is float32.
    shape: (groups, rows, channels); each group has statistics of its own.
    epsilon: added to the variance.
    relu: whether y is what a ReLU makes of it.
  """

  direction: str
  dtype: str
  shape: tuple[int, int, int]
  epsilon: float
  relu: bool


class MeanPoolSpec(NamedTuple):
  """Means over windows of a map; padding counts as zeros.

  Attributes:
    direction: 'forward' or 'backward'.
    dtype: of all arrays; float32 or bfloat16.
    image: (batch, height, width, channels).
    result: (batch, height', width', channels).
    window: pixels a side.
    stride: pixels, both ways.
    pads: (top, bottom, left, right).
  """

  direction: str
  dtype: str
  image: tuple[int, ...]
  result: tuple[int, ...]
  window: int
  stride: int
  pads: tuple[int, ...]


Spec = ConvolutionSpec | BatchNormSpec | MeanPoolSpec


class Scratch:
  """Temporary memory of one call at a time, as large as any needed so far."""

  def __init__(self, api: c_api.Api):
    self.stream = api.stream().value
    self._bytes, self._buffer = -1, None

  def reserve(self, size: int) -> int:
    """Returns the address of at least that many bytes, aligned to a page."""
    page = 4096
    if size > self._bytes:
      # The smaller one goes before the larger one is made, which may fail.
      self._bytes, self._buffer = -1, None
      self._buffer = ctypes.create_string_buffer(size + page)
      self._bytes = size
    return _aligned(ctypes.addressof(self._buffer), page)


class Convolution:
  """One direction of a convolution; see `ConvolutionSpec`.

  Attributes:
    implementation: oneDNN's name for how it is computed.
  """

  def __init__(self, api: c_api.Api, spec: ConvolutionSpec):
    """Compiles it.

    Raises:
      OneDnnError: if oneDNN has none for these shapes, or only its slow
        reference.
    """
    shape, strides = _kernel(spec)
    plain_kernel = api.array(shape, spec.dtype, strides)
    any_kernel = api.array(shape, spec.dtype, None)
    description = _describe_convolution(api, spec, any_kernel)
    self._writes_kernel = spec.direction == 'backward_weights'
    self._waits = spec.waits
    # oneDNN's own layout of the kernel, into or from which it is copied.
    kernel = api.query(
      description,
      c_api.DIFF_WEIGHTS if self._writes_kernel else c_api.WEIGHTS,
    )
    image, result = _maps(api, spec)
    arguments = {
      'forward': [
        (c_api.ARG_SRC, image), (c_api.ARG_WEIGHTS, kernel),
        (c_api.ARG_DST, result),
      ],
      'backward_data': [
        (c_api.ARG_DIFF_DST, result), (c_api.ARG_WEIGHTS, kernel),
        (c_api.ARG_DIFF_SRC, image),
      ],
      'backward_weights': [
        (c_api.ARG_SRC, image), (c_api.ARG_DIFF_DST, result),
        (c_api.ARG_DIFF_WEIGHTS, kernel),
      ],
    }[spec.direction]  # fmt: skip
    self._place = 2 if self._writes_kernel else 1  # of the kernel
    self._primitive = _fast(api, spec, description, arguments)
    self.implementation = self._primitive.implementation
    self._reorder, self._kernel_bytes = None, 0
    scratch = self._primitive.scratch_bytes
    if not api.equal(kernel, plain_kernel):
      source, target = plain_kernel, kernel
      if self._writes_kernel:
        source, target = kernel, plain_kernel
      self._reorder = c_api.Primitive(
        api,
        api.describe_reorder(source, target),
        [(c_api.ARG_SRC, source), (c_api.ARG_DST, target)],
      )
      self._kernel_bytes = _aligned(api.size(kernel), _ALIGNMENT)
      scratch = max(scratch, self._reorder.scratch_bytes)
    self._scratch_bytes = self._kernel_bytes + scratch

  def run(self, memory: Scratch, *addresses: int) -> None:
    """Computes the results, from the arguments' addresses to theirs.

    forward: image, kernel, result. backward_data: the result's gradient,
    kernel, the image's gradient. backward_weights: image, the result's
    gradient, the kernel's gradient.

    Args:
      memory: that no other call uses.
      *addresses: of contiguous arrays in the shapes and the order of the spec.
    """
    if self._waits:
      addresses = (*addresses[:-2], addresses[-1])
    kernel = memory.reserve(self._scratch_bytes)
    scratch = kernel + self._kernel_bytes
    if self._reorder is None:
      self._primitive.run(memory.stream, *addresses, scratch)
      return
    place = self._place
    places = (*addresses[:place], kernel, *addresses[place + 1 :], scratch)
    if self._writes_kernel:
      self._primitive.run(memory.stream, *places)
      self._reorder.run(memory.stream, kernel, addresses[place], scratch)
    else:
      self._reorder.run(memory.stream, addresses[place], kernel, scratch)
      self._primitive.run(memory.stream, *places)


class BatchNorm:
  """One direction of a batch norm; see `BatchNormSpec`.

  Attributes:
    mask_bytes: of a group, what the ReLU keeps for its gradient.
  """

  def __init__(self, api: c_api.Api, spec: BatchNormSpec):
    """Compiles it.

    Raises:
      OneDnnError: if oneDNN has none, or only its slow reference.
    """
    groups, rows, channels = spec.shape
    map_shape = (1, rows, 1, channels)
    x = _map(api, map_shape, spec.dtype)
    flags = c_api.SCALE | c_api.SHIFT | (c_api.RELU if spec.relu else 0)
    settings = ctypes.c_float(spec.epsilon), ctypes.c_uint(flags)
    forward = description = api.describe(
      'batch_normalization_forward', ctypes.c_int(c_api.FORWARD_TRAINING),
      x, x, *settings,
    )  # fmt: skip
    if spec.direction == 'backward':
      description = api.describe(
        'batch_normalization_backward', ctypes.c_int(c_api.BACKWARD),
        x, x, x, *settings, forward,
      )  # fmt: skip
    vector = api.array((channels,), 'float32', (1,))
    mask = api.query(forward, c_api.WORKSPACE) if spec.relu else None
    self.mask_bytes = api.size(mask) if spec.relu else 0
    map_bytes = rows * channels * (2 if spec.dtype == 'bfloat16' else 4)
    # Of each argument, name, description, and bytes from group to group.
    each = 4 * channels
    if spec.direction == 'forward':
      arguments = [
        (c_api.ARG_SRC, x, map_bytes), (c_api.ARG_SCALE, vector, 0),
        (c_api.ARG_SHIFT, vector, 0), (c_api.ARG_DST, x, map_bytes),
        (c_api.ARG_MEAN, vector, each), (c_api.ARG_VARIANCE, vector, each),
      ]  # fmt: skip
    else:
      arguments = [
        (c_api.ARG_SRC, x, map_bytes), (c_api.ARG_MEAN, vector, each),
        (c_api.ARG_VARIANCE, vector, each),
        (c_api.ARG_DIFF_DST, x, map_bytes), (c_api.ARG_SCALE, vector, 0),
        (c_api.ARG_DIFF_SRC, x, map_bytes),
        (c_api.ARG_DIFF_SCALE, vector, each),
        (c_api.ARG_DIFF_SHIFT, vector, each),
      ]  # fmt: skip
    if spec.relu:
      place = len(arguments) if spec.direction == 'forward' else 5
      arguments.insert(place, (c_api.ARG_WORKSPACE, mask, self.mask_bytes))
    self._strides = [stride for *_, stride in arguments]
    self._groups = groups
    self._primitive = _fast(
      api, spec, description, [argument[:2] for argument in arguments]
    )

  def run(self, memory: Scratch, *addresses: int) -> None:
    """Computes the results, from the arguments' addresses to theirs.

    forward: x, scale, shift, y, mean, variance, mask. backward: x, mean,
    variance, y's gradient, scale, mask, and the gradients of x, scale and
    shift, those of the last two for each group. The mask is there with a ReLU.

    Args:
      memory: that no other call uses.
      *addresses: of contiguous arrays.
    """
    scratch = memory.reserve(self._primitive.scratch_bytes)
    for group in range(self._groups):
      places = [a + group * s for a, s in zip(addresses, self._strides)]
      self._primitive.run(memory.stream, *places, scratch)


class MeanPool:
  """One direction of a mean over windows; see `MeanPoolSpec`."""

  def __init__(self, api: c_api.Api, spec: MeanPoolSpec):
    """Compiles it.

    Raises:
      OneDnnError: if oneDNN has none, or only its slow reference.
    """
    image, result = _maps(api, spec)
    top, bottom, left, right = spec.pads
    window = [
      c_api.dimensions(values)
      for values in (
        (spec.stride, spec.stride), (spec.window, spec.window), (0, 0),
        (top, left), (bottom, right),
      )
    ]  # fmt: skip
    algorithm = ctypes.c_int(c_api.MEAN_WITH_PADDING)
    forward = description = api.describe(
      'pooling_forward', ctypes.c_int(c_api.FORWARD_TRAINING), algorithm,
      image, result, *window,
    )  # fmt: skip
    arguments = [(c_api.ARG_SRC, image), (c_api.ARG_DST, result)]
    if spec.direction == 'backward':
      description = api.describe(
        'pooling_backward', algorithm, image, result, *window, forward
      )
      arguments = [(c_api.ARG_DIFF_DST, result), (c_api.ARG_DIFF_SRC, image)]
    self._primitive = _fast(api, spec, description, arguments)

  def run(self, memory: Scratch, *addresses: int) -> None:
    """Computes a map's means, or the map's gradient from theirs.

    Args:
      memory: that no other call uses.
      *addresses: of the argument and the result, contiguous arrays.
    """
    scratch = memory.reserve(self._primitive.scratch_bytes)
    self._primitive.run(memory.stream, *addresses, scratch)


_KINDS = {
  'convolution': (ConvolutionSpec, Convolution),
  'norm': (BatchNormSpec, BatchNorm),
  'mean_pool': (MeanPoolSpec, MeanPool),
}


def name(spec: Spec) -> str:
  """Returns the text that names an operation in a compiled program."""
  (kind,) = (
    k for k, (spec_type, _) in _KINDS.items() if type(spec) is spec_type
  )
  return f'{kind} {tuple(spec)!r}'


def parse(text: str) -> Spec:
  """Returns what `name` was given."""
  kind, _, fields = text.partition(' ')
  return _KINDS[kind][0](*ast.literal_eval(fields))


@functools.cache
def create(api: c_api.Api, text: str, threads: int):
  """Returns the operation of a name; it is made once a number of threads.

  Raises:
    OneDnnError: if oneDNN has none.
  """
  del threads  # oneDNN asks the calling thread's OpenMP.
  operation = _KINDS[text.partition(' ')[0]][1]
  return operation(api, parse(text))


def _describe_convolution(api, spec, kernel):
  """Describes oneDNN's primitive, with a kernel in any layout."""
  image, result = _maps(api, spec)
  top, bottom, left, right = spec.pads
  strides, dilations = (spec.stride, spec.stride), (0, 0)
  window = [
    c_api.dimensions(values)
    for values in (strides, dilations, (top, left), (bottom, right))
  ]
  direct = ctypes.c_int(c_api.DIRECT)
  forward = api.describe(
    'convolution_forward', ctypes.c_int(c_api.FORWARD_TRAINING), direct,
    image, kernel, None, result, *window,
  )  # fmt: skip
  if spec.direction == 'forward':
    return forward
  bias = () if spec.direction == 'backward_data' else (None,)
  return api.describe(
    f'convolution_{spec.direction}', direct, image, kernel, *bias, result,
    *window, forward,
  )  # fmt: skip


def _fast(api, spec, description, arguments):
  """The primitive, or OneDnnError if it is oneDNN's slow reference."""
  primitive = c_api.Primitive(api, description, arguments)
  if primitive.implementation.startswith('ref'):
    raise c_api.OneDnnError(f'{spec}: only {primitive.implementation}')
  return primitive


def _maps(api, spec):
  """The descriptions of a convolution's image and result."""
  return [_map(api, shape, spec.dtype) for shape in (spec.image, spec.result)]


def _map(api, shape, dtype):
  """Describes an array (batch, height, width, channels)."""
  batch, height, width, channels = shape
  strides = (height * width * channels, 1, width * channels, channels)
  return api.array((batch, channels, height, width), dtype, strides)


def _kernel(spec):
  """Shape and strides, in oneDNN's order of axes, of a kernel as XLA has it."""
  height, width, channels, features = spec.kernel
  strides = (1, features, width * channels * features, channels * features)
  if spec.groups == 1:
    return (features, channels, height, width), strides
  each = features // spec.groups
  return (spec.groups, each, channels, height, width), (each, *strides)


def _aligned(size, alignment):
  return math.ceil(size / alignment) * alignment
