"""Compares a library's results with NumPy's: exits 0, or 3 with a line.

python -m anp_jax.system.onednn.self_test PATH
"""

import sys
from typing import NamedTuple

import ml_dtypes
import numpy as np

from anp_jax.system.onednn import c_api, library, onednn_convolution, operations, specs

# Of the largest value; float32 sums of 200 terms, bfloat16's 8 bits.
_TOLERANCES = {'float32': 2e-5, 'bfloat16': 2e-2}
_BATCH, _SIDE, _CHANNELS = 4, 9, 24
_MOST_THREADS = 2  # for which the larger operations are cut into pieces


def main(arguments: list[str]) -> int:
  """Tests the library at a path; returns the exit code."""
  try:
    opened = library.Library(arguments[0])
    for dtype in opened.dtypes:
      for check in (_check_convolutions, _check_norms, _check_mean_pool):
        check(opened.api, dtype, min(_MOST_THREADS, opened.threads))
  except (OSError, c_api.OneDnnError, AssertionError) as e:
    print(str(e).partition('\n')[0])
    return library.FAULTY
  return 0


class _Case(NamedTuple):
  """A convolution of square images."""

  size: int
  stride: int
  side: int = _SIDE
  channels: int = _CHANNELS
  features: int = 40


# The last one is cut wherever a convolution can be.
_CASES = (_Case(3, 1), _Case(3, 2), _Case(1, 1), _Case(1, 1, 15, 256, 256))


def _check_convolutions(api, dtype, threads):
  for case in _CASES:
    _check_convolution(api, dtype, threads, case)


def _check_convolution(api, dtype, threads, case):
  size, stride, before, channels, features = case
  pad = size // 2
  side = (before + 2 * pad - size) // stride + 1
  x, kernel, dy = (
    _random(i, shape, dtype)
    for i, shape in enumerate(
      (
        (_BATCH, before, before, channels),
        (size, size, channels, features),
        (_BATCH, side, side, features),
      )
    )
  )
  y, dx, dkernel = (np.zeros_like(a) for a in (dy, x, kernel))
  wide_x, wide_kernel, wide_dy = (a.astype('float64') for a in (x, kernel, dy))
  padded = np.pad(wide_x, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
  want_y, want_dx = np.zeros(y.shape), np.zeros(padded.shape)
  want_dkernel = np.zeros(kernel.shape)
  end = stride * (side - 1) + 1
  for i in range(size):
    for j in range(size):
      window = np.s_[:, i : i + end : stride, j : j + end : stride]
      want_y += padded[window] @ wide_kernel[i, j]
      want_dx[window] += wide_dy @ wide_kernel[i, j].T
      want_dkernel[i, j] = np.einsum('bhwc,bhwf->cf', padded[window], wide_dy, optimize=True)
  want_dx = want_dx[:, pad : pad + before, pad : pad + before]
  for direction, arrays, want in (
    ('forward', (x, kernel, y), want_y),
    ('backward_data', (dy, kernel, dx), want_dx),
    ('backward_weights', (x, dy, dkernel), want_dkernel),
  ):
    spec = specs.ConvolutionSpec(
      direction, dtype, x.shape, kernel.shape, y.shape, stride, (pad,) * 4
    )
    _run(onednn_convolution.Convolution(api, spec, threads), arrays)
    _compare(f'{direction} {size}x{size}/{stride}', dtype, arrays[-1], want)
  factor, summand = (_random(i, (features,), 'float32') for i in (3, 4))
  want = np.maximum(want_y * factor + summand + wide_dy, 0)
  spec = spec._replace(direction='forward', after=('norm', 'add', 'relu'))
  result = dy.copy()  # of what it is added to
  arrays = x, kernel.astype('float32'), factor, summand, result, result
  _run(onednn_convolution.Convolution(api, spec, threads), arrays)
  _compare(f'norm after {size}x{size}/{stride}', dtype, result, want)


def _check_norms(api, dtype, threads):
  for groups in (1, 2):
    _check_norm(api, dtype, threads, groups)


def _check_norm(api, dtype, threads, groups):
  rows, channels, epsilon = 75, _CHANNELS, 1e-5
  x, dy = (_random(i, (groups, rows, channels), dtype) for i in range(2))
  scale, shift = (_random(i, (channels,), 'float32') for i in (3, 4))
  wide, wide_dy = x.astype('float64'), dy.astype('float64')
  mean, variance = wide.mean(1, keepdims=True), wide.var(1, keepdims=True)
  unit = (wide - mean) / np.sqrt(variance + epsilon)
  want_y = np.maximum(unit * scale + shift, 0)
  want_dy = np.where(want_y > 0, wide_dy, 0)
  sums = want_dy.mean(1, keepdims=True)
  sums_unit = (want_dy * unit).mean(1, keepdims=True)
  want_dx = (want_dy - sums - unit * sums_unit) * (scale / np.sqrt(variance + epsilon))
  forward, backward = (
    operations.BatchNorm(
      api, specs.BatchNormSpec(direction, dtype, x.shape, epsilon, True), threads
    )
    for direction in ('forward', 'backward')
  )
  y, dx = np.zeros_like(x), np.zeros_like(x)
  vectors = np.zeros((4, groups, channels), 'float32')
  mask = np.zeros((groups, forward.mask_bytes), 'uint8')
  _run(forward, (x, scale, shift, y, *vectors[:2], mask))
  _compare('norm', dtype, y, want_y)
  _run(backward, (x, *vectors[:2], dy, scale, mask, dx, *vectors[2:]))
  _compare("norm's gradient", dtype, dx, want_dx)
  _compare("scale's gradient", dtype, vectors[2], sums_unit[:, 0] * rows)


def _check_mean_pool(api, dtype, threads):
  window, side = 3, _SIDE - 2
  x, dy = (_random(i, (_BATCH, n, n, _CHANNELS), dtype) for i, n in enumerate((_SIDE, side)))
  y, dx = np.zeros_like(dy), np.zeros_like(x)
  want_y, want_dx = np.zeros(y.shape), np.zeros(x.shape)
  for i in range(window):
    for j in range(window):
      place = np.s_[:, i : i + side, j : j + side]
      want_y += x.astype('float64')[place] / window**2
      want_dx[place] += dy.astype('float64') / window**2
  for direction, arrays, want in (('forward', (x, y), want_y), ('backward', (dy, dx), want_dx)):
    spec = specs.MeanPoolSpec(direction, dtype, x.shape, y.shape, window, 1, (0,) * 4)
    _run(operations.MeanPool(api, spec, threads), arrays)
    _compare(f'mean pool {direction}', dtype, arrays[-1], want)


def _random(seed, shape, dtype):
  # Whole numbers of sixteenths: bfloat16 holds them, and no sum is near zero
  # where a ReLU would decide by rounding.
  values = np.random.default_rng(seed).integers(-16, 17, shape) / 16
  return values.astype(ml_dtypes.bfloat16 if dtype == 'bfloat16' else dtype)


def _run(operation, arrays):
  operation.run(*(a.ctypes.data for a in arrays))


def _compare(what, dtype, result, want):
  error = np.abs(result.astype('float64') - want).max() / np.abs(want).max()
  assert error <= _TOLERANCES[dtype], f'{what}, {dtype}: error {error:.1e}'


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
