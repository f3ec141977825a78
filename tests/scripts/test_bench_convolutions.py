"""The benchmark of convolutions: its layers, programs and sums."""

import importlib
import json
import math
import pathlib
import subprocess
import sys
import types

import numpy as np
import pytest

from anp_jax.system import onednn

_BENCH = pathlib.Path(__file__).resolve().parents[2] / 'scripts' / 'bench'


@pytest.fixture
def bench(monkeypatch):
  monkeypatch.syspath_prepend(str(_BENCH))
  return importlib.import_module('convolutions')


def test_layers_have_the_published_operations(bench):
  counts = bench.layers(bench._cases.CASES['resnet50_224'])
  assert sum(counts.values()) == 53
  # He et al.: 4.09e9 multiplications an image with the stride in the 3x3
  # convolution, 2.05e6 of them in the classifier; published to three digits.
  products = sum(n * layer.flops for layer, n in counts.items()) / (2 * 8)
  assert products == pytest.approx(4.09e9 - 2.05e6, rel=2e-3)
  (first,) = [layer for layer in counts if layer.is_first]
  assert str(first) == '224x224x3, 7x7/2 to 64'
  assert first.passes == ('forward', 'weight gradient')


def test_layers_of_a_gray_image(bench):
  first, second = bench.layers(bench._cases.CASES['lenet'])
  assert first == ((64, 28, 28, 1), (5, 5, 1, 20), 1, 0, True)
  assert second == ((64, 12, 12, 20), (5, 5, 20, 50), 1, 0, False)
  assert second.flops == 2 * 64 * 8 * 8 * 50 * 5 * 5 * 20
  assert second.passes == ('forward', 'input gradient', 'weight gradient')


def _expected(x, kernel, dy, stride, padding):
  """The three passes in float64, window by window."""
  x, kernel, dy = (a.astype(np.float64) for a in (x, kernel, dy))
  edge = (padding, padding)
  x = np.pad(x, ((0, 0), edge, edge, (0, 0)))
  y, dx, dkernel = np.zeros(dy.shape), np.zeros(x.shape), np.zeros(kernel.shape)
  size = len(kernel)
  for i, j in np.ndindex(dy.shape[1:3]):
    rows = slice(i * stride, i * stride + size)
    columns = slice(j * stride, j * stride + size)
    window = x[:, rows, columns]
    y[:, i, j] = np.einsum('nhwc,hwcf->nf', window, kernel)
    dx[:, rows, columns] += np.einsum('nf,hwcf->nhwc', dy[:, i, j], kernel)
    dkernel += np.einsum('nhwc,nf->hwcf', window, dy[:, i, j])
  inside = slice(padding, dx.shape[1] - padding)
  return y, dx[:, inside, inside], dkernel


def _dense(kernel, groups):
  """A kernel of all channels, with zeros where groups do not meet."""
  rows, columns, channels, features = kernel.shape
  result = np.zeros((rows, columns, groups, channels, groups, features // groups))
  for g in range(groups):
    result[:, :, g, :, g] = np.split(kernel, groups, -1)[g]
  return result.reshape(rows, columns, groups * channels, features)


def _of_groups(dense, groups):
  """The inverse of `_dense`, for a gradient."""
  parts = [np.split(a, groups, 2) for a in np.split(dense, groups, -1)]
  return np.concatenate([parts[g][g] for g in range(groups)], -1)


def test_layers_of_a_network_with_groups(bench):
  counts = bench.layers(bench._cases.CASES['resnext50_32x4d_64'])
  grouped = {layer: n for layer, n in counts.items() if layer.groups > 1}
  assert sum(grouped.values()) == 16  # one a block
  assert {layer.groups for layer in grouped} == {32}
  first = next(iter(grouped))
  assert str(first) == '16x16x128, 3x3 to 128, 32 groups'
  # Each result has a channel's share of the filters: 9 x 128 / 32 products.
  assert first.flops == 2 * 32 * 16 * 16 * 128 * 36


@pytest.mark.parametrize('groups', [1, 4])
@pytest.mark.parametrize('who', ['cpu', onednn.PLATFORM, 'torch'])
def test_programs_compute_the_passes_they_are_named_for(bench, who, groups):
  layer = bench.Layer((2, 9, 9, 8), (3, 3, 8 // groups, 16), 2, 1, False)
  if who == 'torch':
    pytest.importorskip('torch')
    programs = bench.torch_passes(layer, 'float32')
    orders = (0, 2, 3, 1), (0, 2, 3, 1), (2, 3, 1, 0)
  else:
    if who == onednn.PLATFORM and not onednn.find():
      pytest.skip(onednn.missing_reason() or 'no oneDNN')
    programs = bench.our_passes(layer, 'float32', who)
    orders = [(0, 1, 2, 3)] * 3
  x, kernel, dy = bench.arrays(layer)
  *maps, dkernel = _expected(x, _dense(kernel, groups), dy, 2, 1)
  expected = *maps, _of_groups(dkernel, groups)
  assert list(programs) == list(layer.passes)
  for program, order, values in zip(programs.values(), orders, expected):
    result = np.asarray(program()).transpose(order)
    # Sums of up to 144 terms of float32's 6e-8, the terms being about 1.
    np.testing.assert_allclose(result, values, rtol=1e-4, atol=1e-4)


def test_a_weight_gradient_is_timed_alone(bench):
  calls = []
  call = bench.alone(lambda *arguments: calls.append(arguments))
  spec = onednn.ConvolutionSpec(
    'backward_weights', 'float32', (1, 4, 4, 8), (3, 3, 8, 8), (1, 4, 4, 8), 1, (1, 1, 1, 1)
  )
  call(spec._replace(waits=True), 'result', 'x', 'dy', 'dx')
  call(spec, 'result', 'x', 'dy')
  assert calls == [(spec, 'result', 'x', 'dy')] * 2


class Worker:
  """Answers without computing: so many seconds a pass."""

  def __init__(self, **seconds):
    self._seconds = seconds

  def ask(self, what, **question):
    if what == 'prepare':
      return {}
    return {'seconds': self._seconds[what.partition(' ')[0]]}


def test_totals_count_each_layer_as_often_as_it_occurs(bench, monkeypatch, capsys):
  # 2 x 10 x 10 results of 5 x 2 products: 2,000 x 2 operations, and the same
  # with half of the features.
  wide = bench.Layer((2, 10, 10, 5), (1, 1, 5, 2), 1, 0, False)
  narrow = wide._replace(kernel=(1, 1, 5, 1), is_first=True)
  monkeypatch.setattr(bench, 'layers', lambda case: {wide: 3, narrow: 1})
  workers = {
    'ours': Worker(forward=1e-6, input=2e-6, weight=4e-6),
    'torch': Worker(forward=2e-6, input=2e-6, weight=2e-6),
  }
  ratios = {}
  flags = types.SimpleNamespace(rounds=2, seconds=0)
  bench._measure('tiny', 'bfloat16', workers, flags, ratios)
  lines = capsys.readouterr().out.splitlines()
  assert lines[0].startswith('convolutions of tiny, bfloat16')
  cells = [line.split() for line in lines]
  # Names, then GF/s of both, and how many times as fast ours is.
  assert cells[2] == ['10x10x5,', '1x1', 'to', '2', '3', 'forward', '4.0', '2.0', '2.00']
  assert not any('to 1 ' in line and 'input' in line for line in lines)
  # 3 layers of 4,000 operations, and for two of the passes 1 of 2,000.
  assert cells[-4] == ['all', 'layers', 'forward', '3.5', '1.8', '2.00']
  # Ours: 3 x 7 and 5 us, PyTorch's: 3 x 6 and 4 us.
  count = 3 * 3 * 4000 + 2 * 2000
  assert cells[-1] == [
    'all',
    'layers',
    'all',
    f'{count / 26e3:.1f}',
    f'{count / 22e3:.1f}',
    f'{22 / 26:.2f}',
  ]
  assert ratios == pytest.approx(
    {
      'tiny_bfloat16_forward_over_torch': 2,
      'tiny_bfloat16_input_gradient_over_torch': 1,
      'tiny_bfloat16_weight_gradient_over_torch': 0.5,
      'tiny_bfloat16_all_over_torch': 22 / 26,
    }
  )


@pytest.mark.slow
def test_the_last_line_is_of_finite_ratios():
  result = subprocess.run(
    [
      sys.executable,
      str(_BENCH / 'convolutions.py'),
      '--cases=tiny',
      '--rounds=2',
      '--seconds=0.001',
      '--dtype=float32',
    ],
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert not result.returncode, result.stderr
  ratios = json.loads(result.stdout.splitlines()[-1])
  assert ('tiny_float32_all_over_xla' in ratios) == bool(onednn.find())
  assert all(math.isfinite(r) and r > 0 for r in ratios.values())
