"""Convolutions by oneDNN, one object for each direction and shape."""

import contextlib
import ctypes
import math

from anp_jax.system.onednn import c_api, pieces, specs

# Bytes of a kernel from which several threads copy it, and channels at whose
# multiples it is cut: oneDNN's layouts have blocks of 2 to 64 channels.
_LARGE_KERNEL, _BLOCK = 2**18, 64
# Elements of the parts' kernel gradients, as a share of the maps' elements, up to
# which the parts are added: reading and writing them takes time too.
_LARGEST_SUM = 0.4


class Convolution(pieces.Operation):
  """One direction of a convolution; see `ConvolutionSpec`.

  The addresses of `run`: forward: image, kernel, result. backward_data: the
  result's gradient, kernel, the image's gradient. backward_weights: image, the
  result's gradient, the kernel's gradient. With a norm after it: image, kernel,
  factors, summands, the result as it is added to (if it is), result.

  Attributes:
    implementation: oneDNN's name for how it is computed.
  """

  def __init__(self, api: c_api.Api, spec: specs.ConvolutionSpec, threads: int):
    """Compiles the operation for a number of threads.

    Raises:
      OneDnnError: if oneDNN has only its slow reference for these shapes, or none.
    """
    parts, each = pieces.count_parts(spec.image[0], threads, _flops(spec))
    maps = math.prod(spec.image) + math.prod(spec.result)
    if spec.direction == 'backward_weights' and parts > 1:
      if parts * math.prod(spec.kernel) > _LARGEST_SUM * maps:
        parts, each = 1, threads
    super().__init__(api, each, threads // each)
    self._spec, self._count = spec, parts
    self._part = part = pieces.part_of(spec, parts)
    self._strides = [pieces.count_bytes(shape, spec.dtype) for shape in (part.image, part.result)]
    shape, strides = _kernel(spec)
    dtype = 'float32' if spec.after else spec.dtype
    self._plain_kernel = api.array(shape, dtype, strides)
    self._kernel_shape = shape
    api.use_threads(each)
    if spec.direction == 'backward_weights':
      self._add_weight_gradient()
    else:
      self._add_pass()

  def _add_pass(self):
    """The forward pass, or the gradient of the image."""
    api, spec = self.api, self._spec
    # oneDNN's own layout of the kernel, into which it is copied.
    description = self._describe(spec.dtype)
    kernel, place = api.query(description, c_api.WEIGHTS), (1, 0)
    if spec.after or not api.equal(kernel, self._plain_kernel):
      place = self.share(api.size(kernel))
      self._add_slices(self._copy, self._plain_kernel, [(1, 0)], kernel, place)
    image, result = pieces.describe_maps(api, self._part)
    if spec.direction == 'forward':
      names = c_api.ARG_SRC, c_api.ARG_WEIGHTS, c_api.ARG_DST
      ends, strides = (image, result), self._strides
    else:
      names = c_api.ARG_DIFF_DST, c_api.ARG_WEIGHTS, c_api.ARG_DIFF_SRC
      ends, strides = (result, image), self._strides[::-1]
    arguments = list(zip(names, (ends[0], kernel, ends[1])))
    summands = ()
    if spec.after:
      arguments.append((c_api.ARG_BIAS, _vector(api, spec)))
      summands = ((3, 0),)
    primitive = self._compile(description, arguments)
    self.phases.append(
      [
        pieces.Piece(
          primitive, ((0, i * strides[0]), place, (pieces.RESULT, i * strides[1]), *summands)
        )
        for i in range(self._count)
      ]
    )

  def _add_weight_gradient(self):
    """That of each share of the images, then their sum in this order."""
    api, spec = self.api, self._spec
    # Until they are added they are not rounded.
    dtype = spec.dtype if self._count == 1 else 'float32'
    description = self._describe(dtype)
    kernel = api.query(description, c_api.DIFF_WEIGHTS)
    if self._count == 1 and api.equal(kernel, self._plain_kernel):
      places = [(pieces.RESULT, 0)]
    else:
      places = [self.share(api.size(kernel)) for _ in range(self._count)]
    names = c_api.ARG_SRC, c_api.ARG_DIFF_DST, c_api.ARG_DIFF_WEIGHTS
    arrays = *pieces.describe_maps(api, self._part), kernel
    primitive = self._compile(description, list(zip(names, arrays)))
    image, result = self._strides
    self.phases.append(
      [
        pieces.Piece(primitive, ((0, i * image), (1, i * result), place))
        for i, place in enumerate(places)
      ]
    )
    if places != [(pieces.RESULT, 0)]:
      make = self._sum if self._count > 1 else self._copy
      self._add_slices(make, kernel, places, self._plain_kernel, (pieces.RESULT, 0))

  def _describe(self, kernel_dtype):
    """Describes oneDNN's primitive, with a kernel in any layout."""
    kernel = self.api.array(self._kernel_shape, kernel_dtype, None)
    return _describe_convolution(self.api, self._part, kernel)

  def _compile(self, description, arguments):
    primitive = pieces.compile_fast(self.api, self._part, description, arguments)
    self.implementation = primitive.implementation
    return primitive

  def _add_slices(self, make, source, sources, target, place):
    """Adds what fills a kernel: a piece for each thread where it is large.

    Args:
      make: (source, target), which returns a primitive.
      source: description of each kernel that is read.
      sources: their places.
      target: description of the one that is written.
      place: its place.
    """
    shape, starts, axis, each = self._kernel_shape, [(0, 0)], 0, 0
    if 4 * math.prod(shape) >= _LARGE_KERNEL and self._spec.groups == 1:
      for axis in (0, 1):
        each, rest = divmod(shape[axis], self._count)
        if rest or each % _BLOCK:
          continue
        sizes = [*shape[:axis], each, *shape[axis + 1 :]]
        # Where a layout has other blocks along an axis, oneDNN cannot cut it there.
        with contextlib.suppress(c_api.OneDnnError):
          cuts = [
            [self.api.slice(array, sizes, axis, i * each) for i in range(self._count)]
            for array in (source, target)
          ]
          starts = list(zip(*([start for _, start in cut] for cut in cuts)))
          (source, _), (target, _) = (cut[0] for cut in cuts)
          break
    primitive = make(source, target)
    step = 4 * each if axis == 0 else 0  # bytes from slice to slice of factors
    self.phases.append(
      [
        pieces.Piece(
          primitive,
          (
            *((i, offset + read) for i, offset in sources),
            (place[0], place[1] + written),
            *([(2, i * step)] if self._spec.after else ()),
          ),
        )
        for i, (read, written) in enumerate(starts)
      ]
    )

  def _copy(self, source, target):
    arguments = [(c_api.ARG_SRC, source), (c_api.ARG_DST, target)]
    factors = bool(self._spec.after)
    if factors:  # as many as there are, whatever a slice reads of them
      arguments.append((c_api.ARG_FACTORS, _vector(self.api, self._spec)))
    return c_api.Primitive(self.api, self.api.describe_reorder(source, target, factors), arguments)

  def _sum(self, source, target):
    return c_api.Primitive(
      self.api,
      self.api.describe_sum([source] * self._count, target),
      [(c_api.ARG_SOURCES + i, source) for i in range(self._count)] + [(c_api.ARG_DST, target)],
    )


def _flops(spec):
  return 2 * math.prod(spec.result) * math.prod(spec.kernel[:3])


def _describe_convolution(api, spec, kernel):
  """Describes oneDNN's primitive, with a kernel as described."""
  image, result = pieces.describe_maps(api, spec)
  top, bottom, left, right = spec.pads
  strides, dilations = (spec.stride, spec.stride), (0, 0)
  window = [
    c_api.dimensions(values) for values in (strides, dilations, (top, left), (bottom, right))
  ]
  direct = ctypes.c_int(c_api.DIRECT)
  backward = spec.direction != 'forward'
  # A gradient's is only a hint, of the dtypes of a forward pass.
  hint = api.array(_kernel(spec)[0], spec.dtype, None) if backward else kernel
  forward = api.describe(
    'convolution_forward',
    ctypes.c_int(c_api.FORWARD_INFERENCE if spec.after else c_api.FORWARD_TRAINING),
    direct,
    image,
    hint,
    _vector(api, spec) if spec.after else None,
    result,
    *window,
    after=spec.after[1:],
  )
  if not backward:
    return forward
  bias = () if spec.direction == 'backward_data' else (None,)
  return api.describe(
    f'convolution_{spec.direction}', direct, image, kernel, *bias, result, *window, forward
  )


def _vector(api, spec):
  """Describes a number for each feature."""
  return api.array(spec.kernel[-1:], 'float32', (1,))


def _kernel(spec):
  """Shape and strides, in oneDNN's order of axes, of a kernel as XLA has it."""
  height, width, channels, features = spec.kernel
  strides = (1, features, width * channels * features, channels * features)
  if spec.groups == 1:
    return (features, channels, height, width), strides
  each = features // spec.groups
  return (spec.groups, each, channels, height, width), (each, *strides)
