"""A file in memory with the blocks of a state at one step."""

from collections.abc import Sequence
import json
import mmap
import os
import struct
from typing import NamedTuple
import zlib

import numpy as np

from anp_jax.cluster import generation
from anp_jax.system import host_memory

_HEADER = struct.Struct('<QQ')  # position and length of the table, which is written last
_NONE = -1, -1  # version of an empty slot
_MAX_READ = 2**30  # bytes; the system reads less than 2 GiB at once


class Piece(NamedTuple):
  """A block of an array.

  Attributes:
    leaf: number of the array in the state's tree.
    bounds: first and last excluded position in each dimension.
    data: values of the block.
  """

  leaf: int
  bounds: tuple[tuple[int, int], ...]
  data: np.ndarray


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

  def write(self, version: tuple[int, int], pieces: Sequence[Piece]) -> None:
    """Replaces the content; it is none until all is there.

    Raises:
      OSError: if memory is full.
    """
    if self._descriptor is None:
      # The next generation of this process inherits it.
      self._descriptor = os.memfd_create(f'anp_jax {self._name}')
      generation.keep(self._name, self._descriptor)
    self.version = _NONE
    blocks = [np.ascontiguousarray(piece.data).reshape(-1).view(np.uint8) for piece in pieces]
    offsets = np.cumsum([_HEADER.size, *map(len, blocks)]).tolist()
    table = json.dumps(
      {
        'version': version,
        'blocks': [
          [p.leaf, p.bounds, p.data.dtype.name, offset, len(block), zlib.crc32(block.data)]
          for p, block, offset in zip(pieces, blocks, offsets[:-1], strict=True)
        ],
      }
    ).encode()
    size = offsets[-1] + len(table)
    if (missing := size - os.fstat(self._descriptor).st_size) > 0:
      # An error here, not a signal later.
      if missing > (left := host_memory.available()):
        raise OSError(f'{missing / 1e6:,.0f} MB are needed, and {left / 1e6:,.0f} MB are left')
      os.posix_fallocate(self._descriptor, 0, size)
    with mmap.mmap(self._descriptor, size) as memory:
      memory[: _HEADER.size] = bytes(_HEADER.size)
      for block, offset in zip(blocks, offsets[:-1], strict=True):
        # NumPy lets other threads run meanwhile.
        np.frombuffer(memory, np.uint8, len(block), offset)[:] = block
      memory[offsets[-1] : size] = table
      memory[: _HEADER.size] = _HEADER.pack(offsets[-1], len(table))
    self._table, self.version = json.loads(table), version

  def read(self) -> list[Piece]:
    """Returns the blocks; none if one of them has changed."""
    assert self._descriptor is not None
    pieces = []
    for leaf, bounds, dtype, offset, length, checksum in self._table['blocks']:
      block = b''.join(
        os.pread(self._descriptor, min(_MAX_READ, length - start), offset + start)
        for start in range(0, length, _MAX_READ)
      )
      if zlib.crc32(block) != checksum:
        return []
      shape = [stop - start for start, stop in bounds]
      data = np.frombuffer(block, np.dtype(dtype)).reshape(shape)
      pieces.append(Piece(leaf, pairs(bounds), data))
    return pieces

  def clear(self) -> None:
    """Gives the memory back."""
    if self._descriptor is not None:
      os.ftruncate(self._descriptor, 0)
    self.version = _NONE

  def _read_table(self):
    if self._descriptor is None:
      return {}
    generation.keep(self._name, self._descriptor)
    header = os.pread(self._descriptor, _HEADER.size, 0)
    if len(header) < _HEADER.size:
      return {}
    position, length = _HEADER.unpack(header)
    return json.loads(os.pread(self._descriptor, length, position)) if length else {}


def pairs(bounds: Sequence[Sequence[int]]) -> tuple[tuple[int, int], ...]:
  """Returns bounds as they were before they were JSON."""
  return tuple((start, stop) for start, stop in bounds)
