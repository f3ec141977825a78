"""Windows that slide over maps: where they lie, what is in them, and back."""

from collections.abc import Callable
from collections.abc import Sequence
import functools
import numbers

from jax import lax
import jax.numpy as jnp

# Pixels of padding before and after, for height and for width.
Pads = tuple[tuple[int, int], tuple[int, int]]


def pads(
  padding: int | str | Sequence, shape: Sequence[int], window, stride: int
) -> Pads:
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
    strides = (stride, stride)
    around = lax.padtype_to_pads(tuple(shape), window, strides, padding)
  elif isinstance(padding, numbers.Integral):
    around = ((padding, padding),) * 2
  else:
    around = padding
  (top, bottom), (left, right) = around
  around = (int(top), int(bottom)), (int(left), int(right))
  if any(n + sum(pad) < w for n, pad, w in zip(shape, around, window)):
    raise ValueError(
      f'a map of {tuple(shape)} pixels with {around} around it has no room for '
      f'a window of {tuple(window)}'
    )
  return around


def size(shape, window, stride: int, around: Pads) -> tuple[int, int]:
  """(height, width) of the result of windows over a map of `shape`."""
  rows, columns = (
    (n + sum(pad) - w) // stride + 1 for n, w, pad in zip(shape, window, around)
  )
  return rows, columns


def slices(x, window, stride: int, around: Pads, fill: float) -> list:
  """What each place of the window sees, place by place, row by row.

  Args:
    x: (batch, height, width, channels).
    window: (height, width).
    stride: pixels, both ways.
    around: padding.
    fill: value of the padding.

  Returns:
    height * width arrays (batch, height', width', channels).
  """
  rows, columns = size(x.shape[1:3], window, stride, around)
  padded = jnp.pad(x, ((0, 0), *around, (0, 0)), constant_values=fill)
  return [
    padded[
      :,
      i : i + stride * (rows - 1) + 1 : stride,
      j : j + stride * (columns - 1) + 1 : stride,
    ]
    for i in range(window[0])
    for j in range(window[1])
  ]


def gather_back(
  part: Callable, arrays, fills, shape, window, stride: int, around: Pads
) -> jnp.ndarray:
  """The transpose of `slices`: adds what each place sends to its pixel.

  Pixels of one phase (row and column modulo the stride) get their sums from
  the same places of the window, so each phase is added up at the result's
  resolution and written once; adding padded arrays at full resolution moves
  `window**2` times the map. What is sent is padded once and read in slices: a
  CPU pads nine times as slowly where each place sends an array of its own.

  Args:
    part: (i, j, *slices of arrays) to what place (i, j) of the window sends.
    arrays: (batch, height', width', channels), of the result's resolution.
    fills: of each array, a value beyond its edge that sends nothing.
    shape: (batch, height, width, channels) of the map.
    window: (height, width).
    stride: pixels, both ways.
    around: padding, whose pixels get what they are sent and are cut off.

  Returns:
    (batch, height, width, channels).
  """
  batch, height, width, channels = shape
  out = size((height, width), window, stride, around)
  # By how many results a pixel lies before the first that it is sent to.
  deep = [(w - 1) // stride for w in window]
  # Rows of a phase in the padded map, and at least as many as are sent.
  rows, columns = (
    max(-(-(n + sum(pad)) // stride), m + d)
    for n, pad, m, d in zip((height, width), around, out, deep)
  )
  edges = (
    (0, 0),
    (deep[0], rows - out[0]),
    (deep[1], columns - out[1]),
    (0, 0),
  )
  padded = [
    jnp.pad(a, edges, constant_values=fill) for a, fill in zip(arrays, fills)
  ]

  def phase(a, b):
    sent = []
    for i in range(a, window[0], stride):
      for j in range(b, window[1], stride):
        down, right = deep[0] - i // stride, deep[1] - j // stride
        parts = [p[:, down : down + rows, right : right + columns]
                 for p in padded]  # fmt: skip
        sent.append(part(i, j, *parts))
    if not sent:  # the stride is larger than the window
      return jnp.zeros((batch, rows, columns, channels), arrays[-1].dtype)
    return functools.reduce(jnp.add, sent)

  whole = jnp.stack(
    [jnp.stack([phase(a, b) for b in range(stride)], 3) for a in range(stride)],
    2,
  ).reshape(batch, rows * stride, columns * stride, channels)
  (top, _), (left, _) = around
  return whole[:, top : top + height, left : left + width]
