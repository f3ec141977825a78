"""Random batches, made on the devices: input that costs the host nothing."""

from collections.abc import Callable, Iterator
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from anp_jax.config import emulation_keys
from anp_jax.data import index_shuffle
from anp_jax.data.input import batch_sampler, feed
from anp_jax.system import compile_cache


def batches(
  sampler: batch_sampler.BatchSampler,
  classes: int,
  placement: feed.Placement,
  vote: Callable[[], int] = int,
) -> Iterator[dict]:
  """Random batches, a pure function of the seed.

  Those of training depend on the step and the row too; those of evaluation on
  the position in the split, so that batches of any size show the same examples.

  Args:
    sampler: the rows and steps of the batches.
    classes: number of classes.
    placement: rows of each device.
    vote: function that is called once per batch; the step reduces it.

  Yields:
    Batches like those of `feed.on_device`.
  """
  # An emulated network does not look at the images.
  blank = emulation_keys.sleeps(sampler.config)
  make = _maker(sampler.config.data.image_size, classes, blank)

  def joined(shards):
    shape = (placement.size, *shards[0].shape[1:])
    return jax.make_array_from_single_device_arrays(shape, placement.sharding, shards)

  for batch_index in itertools.count(sampler.start):
    if batch_index == sampler.steps:
      return
    host = _host_arrays(sampler, batch_index)
    host['vote'] = np.full(len(sampler.rows), vote(), np.int32)
    batch = placement.put(host, sampler.rows)
    # Device by device: a program over all processes, started by this thread,
    # would meet those of the main thread in another order on each of them.
    words, examples = (batch.pop(name).addressable_shards for name in ('word', 'example'))
    shards = [make(w.data, e.data) for w, e in zip(words, examples, strict=True)]
    images, labels = zip(*shards)
    yield batch | {'image': joined(images), 'label': joined(labels)}


@functools.cache
def _maker(side, classes, blank):
  """A compiled function (words, examples) -> images and labels of a device."""
  shape = side, side, 3

  def make_one(key):
    image, label = jax.random.split(key)
    return (
      jnp.zeros(shape, np.uint8) if blank else jax.random.bits(image, shape, np.uint8),
      jax.random.randint(label, (), 0, classes),
    )

  def make(words, examples):
    keys = jax.vmap(jax.random.fold_in)(words, examples)
    return jax.vmap(make_one)(keys)

  return jax.jit(make, compiler_options=compile_cache.quick_compile_options())


def _host_arrays(sampler, batch_index):
  """The arrays of a batch that the host makes."""
  step, rows = sampler.step_and_rows(batch_index)
  examples, weights = rows, np.ones(len(rows), np.float32)
  if not sampler.training:
    examples = step * sampler.batch_size + rows
    weights = (examples < sampler.size).astype(np.float32)
  return {
    'word': _seed_words(sampler, np.broadcast_to(step, rows.shape)),
    'weight': weights,
    'row': rows.astype(np.int32),
    'example': examples.astype(np.int32),
  }


def _seed_words(sampler, steps):
  """(n, 2) uint32: the key from which each example's random key is folded, of its step."""
  words = np.stack(
    np.broadcast_arrays(sampler.config.seed, steps * sampler.training, sampler.training)
  )
  words, mix = words.astype(np.uint64), index_shuffle.mix
  return mix(mix(mix(words[0]) + words[1]) + words[2])[:, None].view(np.uint32)
