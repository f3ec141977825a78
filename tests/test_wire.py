"""What a worker and a server send each other: memory that is used again."""

import gc

import jax
import numpy as np

from anp_jax.strategies import wire


def _address(array):
  return array.__array_interface__['data'][0]


def test_memory_is_used_again_once_nothing_is_made_of_it():
  buffers = wire._Buffers()
  first = buffers.take(4096)
  first[:] = 7
  where = _address(first)
  part = first.view(np.float32)[10:20].reshape(2, 5)
  kept = part.copy()
  del first
  gc.collect()
  # A part of it, of another dtype and shape, is still in use.
  second = buffers.take(4096)
  assert _address(second) != where
  second[:] = 0
  np.testing.assert_array_equal(part, kept)
  del part
  gc.collect()
  assert _address(buffers.take(4096)) == where
  assert buffers.take(4096).shape == (4096,)


def test_memory_that_a_device_may_share_is_not_written_to():
  """On CPUs JAX may take an array as it is."""
  buffers = wire._Buffers()
  host = buffers.take(2**20)
  host[:] = 3
  on_device = jax.device_put(host)
  del host
  gc.collect()
  buffers.take(2**20)[:] = 4
  assert int(on_device.sum()) == 3 * 2**20


def test_no_more_than_a_few_wait():
  buffers = wire._Buffers()
  taken = [buffers.take(64) for _ in range(3 * wire._SPARE)]
  assert len({_address(a) for a in taken}) == len(taken)
  del taken
  gc.collect()
  assert len(buffers._free[64]) == wire._SPARE
