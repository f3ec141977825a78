"""A file in memory with the blocks of a state at one step."""

from collections.abc import Sequence
import json
import mmap
import os
import struct
from typing import NamedTuple
import zlib

import jax
import numpy as np

from anp_jax.cluster import generation
from anp_jax.system import host_memory

_HEADER = struct.Struct('<QQ')  # position and length of the table, which is written last
_NONE = -1, -1  # version of an empty slot
_MAX_CHECKSUM = 2**32 - 1


class Piece(NamedTuple):
  """A block of an array.

  Attributes:
    leaf: number of the array in the state's tree.
    bounds: first and last excluded position in each dimension.
    data: values of the block.
  """

  leaf: int
  bounds: tuple[tuple[int, int], ...]
  data: np.ndarray | jax.Array


class Slot:
  """A file in memory with the blocks of one step.

  Attributes:
    version: step of what is in it, -1 without one, and generation that wrote it.
  """

  def __init__(self, name: str, descriptor: int | None):
    self._name, self._descriptor = name, descriptor
    self._table: dict = self._read_table()
    self.version: tuple[int, int] = tuple(self._table.get('version', _NONE))

  @property
  def step(self) -> int:
    """Step of what is in it; -1 without one."""
    return self.version[0]

  @property
  def size(self) -> int:
    """Bytes of memory that it takes."""
    return 0 if self._descriptor is None else os.fstat(self._descriptor).st_size

  def write(self, version: tuple[int, int], pieces: Sequence[Piece]) -> None:
    """Replaces the content in place; it is none until all is there.

    A restart waits meanwhile. Arrays of devices come to the host one by one, and are
    deleted.

    Raises:
      OSError: if memory is full; the content stays.
    """
    *starts, end = np.cumsum([_HEADER.size, *(piece.data.nbytes for piece in pieces)]).tolist()
    longest = _table(version, pieces, starts, [_MAX_CHECKSUM] * len(pieces))
    with generation.writing:
      file = self._reserved(end + len(longest))
      self.version = _NONE
      _store(file, 0, bytes(_HEADER.size))
      checksums = []
      for piece, start in zip(pieces, starts, strict=True):
        block = np.ascontiguousarray(piece.data).reshape(-1).view(np.uint8).data
        _store(file, start, block)
        checksums.append(zlib.crc32(block))
        del block  # it holds the piece's memory
        if isinstance(piece.data, jax.Array):
          piece.data.delete()  # with what it has fetched to the host
      table = _table(version, pieces, starts, checksums)
      _store(file, end, table)
      _store(file, 0, _HEADER.pack(end, len(table)))
    self._table, self.version = json.loads(table), version

  def read(self) -> list[Piece]:
    """Returns the blocks, as views until it is written or cleared; none if one has changed."""
    assert self._descriptor is not None
    pieces = []
    memory = mmap.mmap(self._descriptor, 0, prot=mmap.PROT_READ)
    for leaf, bounds, dtype, offset, length, checksum in self._table['blocks']:
      block = np.frombuffer(memory, np.uint8, length, offset)
      if zlib.crc32(block.data) != checksum:
        return []
      shape = [stop - start for start, stop in bounds]
      pieces.append(Piece(leaf, pairs(bounds), block.view(np.dtype(dtype)).reshape(shape)))
    return pieces

  def clear(self) -> None:
    """Gives the memory back."""
    if self._descriptor is not None:
      os.ftruncate(self._descriptor, 0)
    self.version = _NONE

  def _reserved(self, size):
    """The file, with as many bytes of memory at least."""
    if self._descriptor is None:
      # The next generation of this process inherits it.
      self._descriptor = os.memfd_create(f'anp_jax {self._name}')
      generation.keep(self._name, self._descriptor)
    if (missing := size - self.size) > 0:
      # An error here, not a signal later.
      if missing > (left := host_memory.available()):
        raise OSError(f'{missing / 1e6:,.0f} MB are needed, and {left / 1e6:,.0f} MB are left')
      os.posix_fallocate(self._descriptor, 0, size)
    return self._descriptor

  def _read_table(self):
    if self._descriptor is None:
      return {}
    generation.keep(self._name, self._descriptor)
    header = os.pread(self._descriptor, _HEADER.size, 0)
    if len(header) < _HEADER.size:
      return {}
    position, length = _HEADER.unpack(header)
    return json.loads(os.pread(self._descriptor, length, position)) if length else {}


def _table(version, pieces, starts, checksums):
  blocks = [
    [piece.leaf, piece.bounds, piece.data.dtype.name, start, piece.data.nbytes, checksum]
    for piece, start, checksum in zip(pieces, starts, checksums, strict=True)
  ]
  return json.dumps({'version': version, 'blocks': blocks}).encode()


def _store(file, start, data):
  """Writes bytes; a mapped file would cost its pages' faults at each copy."""
  rest = memoryview(data)
  while rest:  # the system writes 2 GB at most
    written = os.pwrite(file, rest, start)
    rest, start = rest[written:], start + written


def pairs(bounds: Sequence[Sequence[int]]) -> tuple[tuple[int, int], ...]:
  """Returns bounds as they were before they were JSON."""
  return tuple((start, stop) for start, stop in bounds)
