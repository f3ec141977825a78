"""TensorFlow's antialiased resize in NumPy, to the bit: its float32 operations in their order."""

import numpy as np


def triangle(image: np.ndarray, side: int) -> np.ndarray:
  """Returns an image resized by the triangle filter, as TensorFlow does with antialias.

  Args:
    image: (height, width, 3) uint8.
    side: pixels a side of the result.

  Returns:
    (side, side, 3) float32.
  """
  height, width = image.shape[:2]
  rows = _gathered(image, *_triangle_shares(height, side))
  columns = np.ascontiguousarray(rows.transpose(1, 0, 2))
  return _gathered(columns, *_triangle_shares(width, side)).transpose(1, 0, 2)


def _gathered(lines, first, shares):
  """Sums of lines (n, ...) from `first` (m,) on, times `shares` (m, k)."""
  last = len(lines) - 1
  total = np.zeros((len(first), *lines.shape[1:]), np.float32)
  term = np.empty_like(total)
  for k, share in enumerate(shares.T):
    used = lines[np.minimum(first + k, last)]
    np.multiply(used, share[:, None, None], out=term)
    total += term
  return total


def _triangle_shares(size, side):
  f = np.float32
  inverse = f(1) / (f(side) / f(size))
  wide = max(inverse, f(1))
  centre = (np.arange(side).astype(f) + f(0.5)) * inverse
  first = np.ceil(centre - wide - f(0.5)).astype(np.int64)
  end = np.floor(centre + wide - f(0.5)).astype(np.int64)
  first, end = np.clip(first, 0, size - 1), np.clip(end, 0, size - 1) + 1
  pixels = first[:, None] + np.arange((end - first).max())
  off = np.abs((pixels.astype(f) + f(0.5) - centre[:, None]) * (f(1) / wide))
  shares = np.where(off < 1, f(1) - off, f(0))
  shares[pixels >= end[:, None]] = 0
  total = np.zeros(side, f)
  for column in shares.T:
    total += column
  return first, shares * (f(1) / total)[:, None]
