"""Windows that slide over maps: where they lie, what is in them, and back."""

from collections.abc import Callable, Sequence
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

# Pixels of padding before and after, for height and for width.
Pads = tuple[tuple[int, int], tuple[int, int]]
Padding = Any  # an int, a str or pairs of ints, see `pads`


class Windows(NamedTuple):
  """The size, stride and padding of windows that slide over a map.

  Attributes:
    shape: (height, width) of a window, pixels.
    stride: pixels, both ways.
    pads: padding of the map.
  """

  shape: tuple[int, int]
  stride: int
  pads: Pads


def pads(padding: Padding, shape: Sequence[int], window: Sequence[int], stride: int) -> Pads:
  """Padding in pixels, from any of the ways to say it.

  Args:
    padding: pixels on each side; 'SAME' (as many results as pixels over the
      stride, an odd pixel at the end), 'VALID' (none); or pairs
      ((top, bottom), (left, right)).
    shape: (height, width) of the map.
    window: (height, width) of the window.
    stride: pixels, both ways.

  Raises:
    ValueError: for another text, or where the window has no room.
  """
  if isinstance(padding, str):
    if padding not in ('SAME', 'VALID'):
      raise ValueError(f"padding is 'SAME', 'VALID' or pixels, not {padding!r}")
    pairs = lax.padtype_to_pads(tuple(shape), window, (stride, stride), padding)
  elif isinstance(padding, (int, np.integer)):
    pairs = ((padding, padding),) * 2
  else:
    pairs = padding
  (top, bottom), (left, right) = pairs
  result = (int(top), int(bottom)), (int(left), int(right))
  if any(n + sum(pad) < w for n, pad, w in zip(shape, result, window)):
    raise ValueError(
      f'a map of {tuple(shape)} pixels with {result} around it has no room for '
      f'a window of {tuple(window)}'
    )
  return result


def size(map_shape: Sequence[int], windows: Windows) -> tuple[int, int]:
  """(height, width) of the result of windows over a map (height, width)."""
  rows, columns = (
    (n + sum(pad) - w) // windows.stride + 1
    for n, w, pad in zip(map_shape, windows.shape, windows.pads)
  )
  return rows, columns


def slices(x: jax.Array, windows: Windows, fill: float) -> list[jax.Array]:
  """The pixels at each place of the window, place by place, row by row.

  Args:
    x: (batch, height, width, channels).
    windows: windows that slide over it.
    fill: value of the padding.

  Returns:
    An array (batch, height', width', channels) for each place of the window.
  """
  rows, columns = size(x.shape[1:3], windows)
  stride = windows.stride
  padded = jnp.pad(x, ((0, 0), *windows.pads, (0, 0)), constant_values=fill)
  return [
    padded[:, i : i + stride * (rows - 1) + 1 : stride, j : j + stride * (columns - 1) + 1 : stride]
    for i in range(windows.shape[0])
    for j in range(windows.shape[1])
  ]


def gather_back(
  term: Callable,
  arrays: Sequence[jax.Array],
  fills: Sequence[float],
  map_shape: Sequence[int],
  windows: Windows,
) -> jax.Array:
  """The transpose of `slices`: adds what each place sends to its pixel.

  Pixels of one phase (row and column modulo the stride) get their sums from
  the same places of the window, so each phase is added up at the result's
  resolution and written once; adding padded arrays at full resolution moves
  `window**2` times the map. What is sent is padded once and read in slices: a
  CPU pads nine times as slowly where each place sends an array of its own.

  Args:
    term: maps (i, j, *slices of arrays) to what place (i, j) of the window sends.
    arrays: (batch, height', width', channels), at the result's resolution.
    fills: values beyond the edges of each array, which send nothing.
    map_shape: (batch, height, width, channels).
    windows: windows over the map; padding gets what it is sent and is cut off.

  Returns:
    (batch, height, width, channels).
  """
  batch, height, width, channels = map_shape
  window, stride = windows.shape, windows.stride
  out = size((height, width), windows)
  # By how many results a pixel lies before the first that it is sent to.
  depth = [(w - 1) // stride for w in window]
  # Rows of a phase in the padded map, and at least as many as are sent.
  rows, columns = (
    max(-(-(n + sum(pad)) // stride), m + d)
    for n, pad, m, d in zip((height, width), windows.pads, out, depth)
  )
  edges = ((0, 0), (depth[0], rows - out[0]), (depth[1], columns - out[1]), (0, 0))
  padded = [jnp.pad(a, edges, constant_values=fill) for a, fill in zip(arrays, fills)]

  def phase(a, b):
    terms = []
    for i in range(a, window[0], stride):
      for j in range(b, window[1], stride):
        down, right = depth[0] - i // stride, depth[1] - j // stride
        cuts = [p[:, down : down + rows, right : right + columns] for p in padded]
        terms.append(term(i, j, *cuts))
    if not terms:  # the stride is larger than the window
      return jnp.zeros((batch, rows, columns, channels), arrays[-1].dtype)
    return functools.reduce(jnp.add, terms)

  padded_map = jnp.stack(
    [jnp.stack([phase(a, b) for b in range(stride)], 3) for a in range(stride)], 2
  ).reshape(batch, rows * stride, columns * stride, channels)
  (top, _), (left, _) = windows.pads
  return padded_map[:, top : top + height, left : left + width]
