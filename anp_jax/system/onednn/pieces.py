"""An operation as pieces, each computed by one call of oneDNN.

A piece, such as the convolution of some of a batch's images, is computed by one
thread, so that XLA's own threads can compute them. The threads of OpenMP, by
which oneDNN computes a call, compete with XLA's for the cores: a step of
ResNet-50 (32 x 64 px, float32, 2 cores) took 1.25 times as long with them. What
cannot be cut is one piece that OpenMP's threads compute.
"""

from collections.abc import Sequence
import ctypes
import math
from typing import Any, NamedTuple

from anp_jax.system.onednn import c_api, specs

_ALIGNMENT = 64  # bytes, of arrays within the shared memory
# Additions and multiplications for which no other thread is woken: some 10 us.
_FEW_FLOPS = 4e6
# Places of a piece's arrays: the operation's result, and memory that its
# pieces share.
RESULT, _SHARED = -2, -1


class Scratch:
  """Temporary memory of one call at a time, as large as any needed so far."""

  def __init__(self, api: c_api.Api):
    self.stream: Any = api.stream().value
    self._bytes = 0
    self._buffer: ctypes.Array | None = None

  def reserve(self, size: int) -> int:
    """Returns the address of at least that many bytes, aligned to a page."""
    page = 4096
    if self._buffer is None or size > self._bytes:
      # The smaller one goes before the larger one is made, which may fail.
      self._buffer = None
      self._buffer = ctypes.create_string_buffer(size + page)
      self._bytes = size
    return _aligned(ctypes.addressof(self._buffer), page)


class Piece(NamedTuple):
  """A part of an operation that one call of oneDNN computes.

  Attributes:
    primitive: primitive of oneDNN.
    places: for each array of the piece, the index of the operation's address, and
      the offset from it in bytes.
  """

  primitive: c_api.Primitive
  places: tuple[tuple[int, int], ...]

  def run(self, memory: Scratch, addresses: tuple[int, ...]) -> None:
    """Computes the piece.

    Args:
      memory: scratch memory that no other call uses.
      addresses: addresses from `Operation.addresses`.
    """
    self.primitive.run(
      memory.stream,
      *(addresses[i] + offset for i, offset in self.places),
      memory.reserve(self.primitive.scratch_bytes),
    )


class Operation:
  """An operation that one call from XLA's program computes.

  Attributes:
    threads: number of OpenMP threads per piece.
    at_once: number of pieces that may be computed at the same time.
    phases: lists of pieces. Those of a phase may run at once, in any order,
      when those of the phase before are done.
  """

  def __init__(self, api: c_api.Api, threads: int, at_once: int = 1):
    """Begins an operation without pieces."""
    self.api, self.threads, self.at_once = api, threads, at_once
    self.phases: list[list[Piece]] = []
    self._shared_bytes = 0

  def addresses(self, shared: Scratch, addresses: Sequence[int]) -> tuple[int, ...]:
    """Returns the addresses for pieces: those of the arrays and of shared memory.

    Args:
      shared: memory that no other call uses until all pieces are done.
      addresses: addresses of arguments and results, contiguous arrays with the shapes
        and the order of the spec.
    """
    return (*addresses, shared.reserve(self._shared_bytes))

  def run(self, *addresses: int) -> None:
    """Computes all pieces, one after another; see `addresses`."""
    shared, memory = Scratch(self.api), Scratch(self.api)
    places = self.addresses(shared, addresses)
    self.api.use_threads(self.threads)
    for phase in self.phases:
      for piece in phase:
        piece.run(memory, places)

  def share(self, size: int) -> tuple[int, int]:
    """Reserves bytes of the shared memory; returns their place."""
    place = _SHARED, self._shared_bytes
    self._shared_bytes += _aligned(size, _ALIGNMENT)
    return place


def count_parts(images: int, threads: int, flops: float) -> tuple[int, int]:
  """Returns the number of parts of a batch, and the threads per part.

  Args:
    images: batch size.
    threads: number of threads.
    flops: operations of the batch.
  """
  if threads == 1 or flops < _FEW_FLOPS:
    return 1, 1
  for parts in range(threads, 2 * threads):
    if images % parts == 0:
      return parts, 1
  return 1, threads


def part_of(spec: Any, parts: int) -> Any:
  """Returns the spec of one of equal parts of the batch."""
  image, result = ((shape[0] // parts, *shape[1:]) for shape in (spec.image, spec.result))
  return spec._replace(image=image, result=result)


def count_bytes(shape: Sequence[int], dtype: str) -> int:
  """Returns the bytes of an array."""
  return math.prod(shape) * (2 if dtype == 'bfloat16' else 4)


def compile_fast(
  api: c_api.Api, spec: specs.Spec, description: c_api.POINTER, arguments: Sequence[tuple]
) -> c_api.Primitive:
  """Returns a primitive; the arguments are `c_api.Primitive`'s.

  Raises:
    OneDnnError: if it is oneDNN's slow reference.
  """
  primitive = c_api.Primitive(api, description, arguments)
  if primitive.implementation.startswith('ref'):
    raise c_api.OneDnnError(f'{spec}: only {primitive.implementation}')
  return primitive


def describe_maps(api: c_api.Api, spec: Any) -> list[c_api.POINTER]:
  """Returns the descriptions of an operation's image and result."""
  return [describe_map(api, shape, spec.dtype) for shape in (spec.image, spec.result)]


def describe_map(api: c_api.Api, shape: Sequence[int], dtype: str) -> c_api.POINTER:
  """Describes an array (batch, height, width, channels)."""
  batch, height, width, channels = shape
  strides = (height * width * channels, 1, width * channels, channels)
  return api.array((batch, channels, height, width), dtype, strides)


def _aligned(size, alignment):
  return math.ceil(size / alignment) * alignment
