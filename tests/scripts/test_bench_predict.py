"""The benchmark of naming files: its peers, and a run of it."""

import importlib.util
import json
import math

import numpy as np
import pytest
from scipy import special

from scripts.bench import _predict_peers
from tests import launching, timm_peer


@pytest.mark.slow
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_a_peer_names_the_likeliest_of_its_network(dtype):
  timm_peer.require()
  import torch

  names = _predict_peers.torch_names('resnet18', dtype, 5)
  pixels = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), np.uint8)
  mean, std = (123.68, 116.78, 103.94), (58.4, 57.1, 57.4)
  images = ((pixels - np.array(mean)) / np.array(std)).transpose(0, 3, 1, 2)
  with torch.inference_mode():
    classes, probabilities = names(torch.from_numpy(pixels))
    wide = names.net.double()
    outputs = wide(torch.from_numpy(np.ascontiguousarray(images))).numpy()
  expected = special.softmax(outputs, -1)
  # Of 20 layers that round to 8 bits, or 24.
  tolerance = 0.1 if dtype == 'bfloat16' else 1e-3
  np.testing.assert_allclose(
    probabilities, np.take_along_axis(expected, classes.numpy(), -1), tolerance
  )
  np.testing.assert_allclose(probabilities, -np.sort(-expected, -1)[:, :5], tolerance)


@pytest.mark.slow
def test_onnx_runtime_computes_the_same():
  timm_peer.require()
  pytest.importorskip('onnx')
  pytest.importorskip('onnxruntime')
  import torch

  module = _predict_peers.torch_names('resnet18', 'float32', 5)
  pixels = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), np.uint8)
  _, probabilities = _predict_peers.onnx_names(module, 32)(pixels)
  with torch.inference_mode():
    expected = module(torch.from_numpy(pixels))[1].numpy()
  # Both in float32, in an order of their own.
  np.testing.assert_allclose(probabilities, expected, rtol=1e-3)


@pytest.mark.soak
def test_the_last_line_is_of_finite_ratios():
  flags = '--rounds=1 --files=4 --side=32 --sizes=4 --model=resnet18 --dtype=float32'.split()
  flags = *flags, '--peers=torch_eager,onnx'
  result = launching.python('-m', 'scripts.bench.predict', *flags, status=0)
  lines = result.stdout.splitlines()
  ratios = json.loads(lines[-1])
  assert all(math.isfinite(r) and r > 0 for r in ratios.values())
  has_torch = bool(importlib.util.find_spec('torch'))
  assert ('float32_network_over_torch' in ratios) == has_torch
  # ONNX Runtime is measured, or a line says why it is not.
  skipped = any(line.startswith('skipped: float32: onnx') for line in lines)
  assert ('float32_network_over_onnx' in ratios) != skipped
