"""Gradients of wide depthwise kernels: laws in dy, with both of its signs."""

import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from anp_jax.models import layers
from anp_jax.models.layers import depthwise
from anp_jax.system import onednn
from tests import layer_references as references, onednn_here


@pytest.mark.parametrize('number', [-3, -1e-30, 0, 1e-30, 3])
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_what_edges_are_padded_with_is_zero(number, dtype):
  """Where oneDNN is absent, too: only dy's first number has this sign."""
  dy = jnp.ones((2, 3, 4, 5), dtype).at[0, 0, 0, 0].set(number)
  zero = depthwise._zero_after(dy)
  assert zero == 0 and zero.dtype == dtype


def _kernel_gradient(size, stride):
  """(x, kernel, dy) to the gradient of the kernel, jitted."""

  def compute(x, kernel, dy):
    _, pull = jax.vjp(
      lambda k: layers.convolve(x, k, stride, size // 2, onednn.PLATFORM, x.shape[-1]), kernel
    )
    return pull(dy)[0]

  return jax.jit(compute)


@onednn_here.needed
@pytest.mark.parametrize('sign', [-1, 1])
@pytest.mark.parametrize('size, stride', [(7, 1), (5, 2)])
@pytest.mark.parametrize('sides', [(4, 3), (14, 11)])
def test_gradient_with_either_sign_of_the_first_number(sides, size, stride, sign):
  """Edges are padded with what is computed of dy's first number: it must be 0.

  Scaled by powers of two, and with images in another order, it is the same sum.
  """
  seed = zlib.crc32(repr((sides, size, stride)).encode())
  random = np.random.default_rng(seed)
  x = random.normal(size=(3, *sides, 16)).astype('f4')
  kernel = random.normal(size=(size, size, 1, 16)).astype('f4')
  shape = 3, *(-(-side // stride) for side in sides), 16
  dy = random.normal(size=shape).astype('f4')
  dy[0, 0, 0, 0] = sign * 3
  program = _kernel_gradient(size, stride)
  assert onednn_here.calls(program, x, kernel, dy)
  got = program(x, kernel, dy)
  edges = ((size // 2, size // 2),) * 2
  _, _, want = references.convolution(x, kernel, stride, edges, 16, dy)
  atol = 5e-6 * np.abs(want).max()
  np.testing.assert_allclose(got, want, rtol=0, atol=atol)
  np.testing.assert_array_equal(program(x, kernel, -4 * dy), -4 * got)
  order = [2, 0, 1]
  np.testing.assert_allclose(program(x[order], kernel, dy[order]), want, rtol=0, atol=atol)
