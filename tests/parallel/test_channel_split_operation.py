"""Split convolutions and their gradients, against NumPy's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from anp_jax.models import layers
from anp_jax.parallel import mesh as mesh_lib
from anp_jax.parallel.channel_split import parts as parts_lib, split_operation
from tests import builders, layer_references, programs, splitting

P = mesh_lib.P


def _on_devices(function, counts, in_specs):
  """What each of the devices that have these counts of channels computes."""
  mesh = splitting.mesh(1, len(counts))
  return programs.mapped(function, mesh, in_specs, P(mesh_lib.MODEL))


@pytest.mark.parametrize(
  'counts',
  [(6,), (4, 2), (1, 3, 0, 2), builders.soak((0, 6)), builders.slow((2, 0, 1, 0, 1, 1, 0, 1))],
)
@pytest.mark.parametrize('size, stride, padding', [(3, 1, 1), (1, 2, 0)])
def test_result_and_gradients_are_those_of_the_whole(
  x64, monkeypatch, counts, size, stride, padding
):
  # Maps of a test are small, and would be sent with zeros.
  monkeypatch.setattr(split_operation, '_SMALL', 0)

  def convolve(x, kernel):
    return layers.convolve(x, kernel, stride, padding)

  random = np.random.default_rng(0)
  x = random.normal(size=(4, 7, 7, 3))
  kernel = random.normal(size=(size, size, 3, 6))
  dy = random.normal(size=(4, *[-(-7 // stride)] * 2, 6))

  def split(x, kernel, dy):
    y, pull = jax.vjp(lambda *a: parts_lib.Parts().convolve(convolve, *a, counts), x, kernel)
    dx, dw = pull(dy)
    return y[None], dx[None], dw[None]

  results = _on_devices(split, counts, P())(x, kernel, dy)
  y, dx, dw = map(np.asarray, results)
  expected, expected_dx, expected_dw = layer_references.convolution(
    x, kernel, stride, [(padding, padding)] * 2, dy=dy
  )
  begin = 0
  for device, count in enumerate(counts):
    # Every device has the whole result and the whole gradient of x ...
    splitting.assert_same((y[device], dx[device]), (expected, expected_dx))
    # ... and the kernel's gradient for its own channels.
    local = np.zeros_like(expected_dw)
    local[..., begin : begin + count] = expected_dw[..., begin : begin + count]
    splitting.assert_same(dw[device], local)
    begin += count


@pytest.mark.parametrize(
  'counts, small',
  [
    ((4, 2), 0),
    ((4, 2), 2**14),
    ((1, 3, 0, 2), 0),
    builders.slow((1, 3, 0, 2), 2**14),
    builders.slow((0, 0, 6, 0), 0),
  ],
)
def test_a_sum_of_which_each_has_its_own_channels(x64, monkeypatch, counts, small):
  """The gradient of a convolution's operand, and that of a vector."""
  monkeypatch.setattr(split_operation, '_SMALL', small)
  random = np.random.default_rng(0)
  # Each device has another gradient of the operand.
  gradients = random.normal(size=(len(counts), 2, 3, 3, 6))
  vector = random.normal(size=6)

  def own(gradient, vector):
    part = split_operation.own_part(vector, counts)
    gathered = split_operation.whole(part, counts)
    _, pull = jax.vjp(
      lambda x: split_operation.operand(x, gradient[0], counts), jnp.zeros((2, 3, 3, max(counts)))
    )
    _, pull_vector = jax.vjp(lambda v: split_operation.own_part(v, counts), vector)
    parts = part, *pull(gradient[0]), *pull_vector(part)
    return jax.tree.map(lambda x: x[None], (gathered, *parts))

  own_parts = _on_devices(own, counts, (P(mesh_lib.MODEL), P()))
  gathered, parts, sums, back = own_parts(gradients, vector)
  end = 0
  for device, count in enumerate(counts):
    cut, end = slice(end, end + count), end + count
    np.testing.assert_array_equal(gathered[device], vector)
    np.testing.assert_array_equal(back[device], vector)
    np.testing.assert_array_equal(parts[device, :count], vector[cut])
    splitting.assert_same(sums[device, ..., :count], gradients.sum(0)[..., cut])
    assert not parts[device, count:].any() and not sums[device, ..., count:].any()
