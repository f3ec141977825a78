"""TensorFlow's ways to resize an image, in NumPy, to the bit.

The float32 operations are TensorFlow's, in their order.
"""

import numpy as np


def area(image: np.ndarray, side: int) -> np.ndarray:
  """The mean over areas, as TensorFlow's ResizeArea computes it.

  Args:
    image: (height, width, 3) uint8, both sides at least `side`.
    side: pixels a side of the result.

  Returns:
    (side, side, 3) float32.
  """
  height, width = image.shape[:2]
  columns = np.ascontiguousarray(image.transpose(1, 0, 2))
  across = _gathered(columns, *_area_shares(width, side))
  rows = np.ascontiguousarray(across.transpose(1, 0, 2))
  f = np.float32
  pixels = f(height) / f(side) * (f(width) / f(side))
  return _gathered(rows, *_area_shares(height, side)) * (f(1) / pixels)


def bilinear(image: np.ndarray, side: int) -> np.ndarray:
  """Between the four nearest pixels, as TensorFlow's ResizeBilinear."""
  height, width = image.shape[:2]
  (top, bottom, down), (left, right, across) = (_neighbours(n, side) for n in (height, width))
  image = image.astype(np.float32)
  down, across = down[:, None, None], across[:, None]
  rows = []
  for rows_at in (top, bottom):
    first, second = image[rows_at][:, left], image[rows_at][:, right]
    rows.append(first + (second - first) * across)
  return rows[0] + (rows[1] - rows[0]) * down


def triangle(image: np.ndarray, side: int) -> np.ndarray:
  """The triangle filter, as TensorFlow's resize with antialias."""
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


def _area_shares(size, side):
  """The first pixel of each result's stretch, and the share of each pixel."""
  f = np.float32
  scale = f(size) / f(side)
  places = np.arange(side)
  start = places.astype(f) * scale
  end = (places + 1).astype(f) * scale
  first = np.floor(start).astype(np.int64)
  count = np.ceil(end).astype(np.int64) - first
  pixels = first[:, None] + np.arange(count.max())
  low, high = pixels.astype(f), (pixels + 1).astype(f)
  start, end = start[:, None], end[:, None]
  cut_off = high > end
  shares = np.where(
    low < start, np.where(cut_off, scale, high - start), np.where(cut_off, end - low, f(1))
  )
  return first, np.where(pixels < first[:, None] + count[:, None], shares, f(0))


def _neighbours(size, side):
  f = np.float32
  scale = f(size) / f(side)
  place = (np.arange(side).astype(f) + f(0.5)) * scale - f(0.5)
  low = np.floor(place)
  lower = np.maximum(low.astype(np.int64), 0)
  upper = np.minimum(np.ceil(place).astype(np.int64), size - 1)
  return lower, upper, place - low


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
