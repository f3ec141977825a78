"""Few collectives in place of many: what is joined, and that it is the same."""

import functools

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

from anp_jax.parallel import buckets, mesh as mesh_lib

P = mesh_lib.P


def _kinds(sizes, dtype='float32'):
  return [jnp.zeros(n, dtype) for n in sizes]


@pytest.mark.parametrize(
  'sizes, want',
  [
    ((), []),
    ((5,), [[5]]),
    # 160 bytes fill a bucket; the last one is full at 10.
    ((10, 20, 20, 1, 1, 1), [[10], [20, 20], [1, 1, 1]]),
    ((10, 20, 20, 1, 2, 1, 1), [[10], [20, 20, 1], [2, 1, 1]]),
    ((100, 100, 100), [[100], [100], [100]]),
    ((30, 30, 30, 3), [[30], [30, 30], [3]]),
  ],
)
def test_buckets_fill_from_the_last_which_is_small(sizes, want):
  result = buckets.buckets(_kinds(sizes), 160)
  assert [[x.size for x in bucket] for bucket in result] == want


def test_dtypes_are_not_mixed():
  arrays = [*_kinds((1, 2)), *_kinds((3,), 'bfloat16'), *_kinds((4, 5))]
  result = buckets.buckets(arrays, 10**6)
  assert [[x.size for x in b] for b in result] == [[1, 2], [3], [4, 5]]


@pytest.mark.parametrize('devices', [1, 2, 4, 8])
@pytest.mark.parametrize('size', [1, 100, 10**9])
def test_sums_are_those_of_the_arrays(devices, size):
  mesh = jax.sharding.Mesh(jax.devices()[:devices], mesh_lib.DATA)
  random = np.random.default_rng(0)
  # Small integers: their sums are exact in any order.
  fused = [random.integers(-9, 9, (devices, n)).astype('float32') for n in (1, 7, 30, 2, 64)]

  @jax.jit
  @functools.partial(jax.shard_map, mesh=mesh, in_specs=P(mesh_lib.DATA), out_specs=P())
  def sums(parts):
    return buckets.fused(lambda x: lax.psum(x, mesh_lib.DATA), [p[0] for p in parts], size)

  for got, x in zip(sums(fused), fused, strict=True):
    np.testing.assert_array_equal(got, x.sum(0))
