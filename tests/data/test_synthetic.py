"""Tests of synthetic: random batches that are made on the devices."""

import numpy as np

from anp_jax.data.input import batch_sampler, feed, random_batches
from tests import builders


def _synthetic(config, sharding, start=0, training=True, batch=8):
  """Batches of 20 examples of five classes."""
  placement = feed.Placement.create(sharding, batch)
  rows = placement.local_rows()
  sampler = batch_sampler.BatchSampler(config, 20, batch, rows, training, start)
  return random_batches.batches(sampler, 5, placement)


def _host(batch):
  return {k: np.asarray(v) for k, v in batch.items()}


def _same(a, b):
  assert a.keys() == b.keys()
  for name in a:
    np.testing.assert_array_equal(a[name], b[name], name)


def test_synthetic_is_a_pure_function_of_seed_and_step(config):
  config.data.image_size = 8
  expected = None
  # Few devices: each compiles a program of its own for each stream.
  for data, model in ((1, 1), (2, 2)):
    sharding = builders.batch_sharding(config, data, model)
    stream = _synthetic(config, sharding)
    batches = [_host(next(stream)) for _ in range(4)]
    expected = expected or batches
    for a, b in zip(batches, expected):
      _same(a, b)
  _same(_host(next(_synthetic(config, sharding, start=3))), expected[3])
  assert all(batch['weight'].all() for batch in expected)  # of 20 examples, over and over
  assert {k: (v.shape, v.dtype) for k, v in expected[0].items()} == {
    'image': ((8, 8, 8, 3), np.uint8),
    'label': ((8,), np.int32),
    'weight': ((8,), np.float32),
    'row': ((8,), np.int32),
    'vote': ((8,), np.int32),
  }
  assert expected[0]['row'].tolist() == list(range(8))
  config.seed += 1
  other = next(_synthetic(config, builders.batch_sharding(config, 1)))
  evaluation = next(_synthetic(config, builders.batch_sharding(config, 1), training=False))
  images = [b['image'] for b in [*expected, _host(other), _host(evaluation)]]
  for i, a in enumerate(images):
    for b in images[:i]:
      # Equal bytes: one of 256, give or take; 1,536 of them.
      assert (a == b).mean() < 0.03


def test_synthetic_evaluation_is_one_set_in_batches_of_any_size(config):
  config.data.image_size = 8
  examples = []
  for batch, steps, devices in ((20, 1, 1), (8, 3, 2)):
    sharding = builders.batch_sharding(config, devices)
    stream = _synthetic(config, sharding, training=False, batch=batch)
    batches = [_host(b) for b in stream]
    assert len(batches) == steps
    weights = np.concatenate([b['weight'] for b in batches])
    assert weights.tolist() == [1] * 20 + [0] * (len(weights) - 20)
    examples.append(
      {name: np.concatenate([b[name] for b in batches])[:20] for name in ('image', 'label')}
    )
  _same(examples[0], examples[1])


def test_synthetic_numbers_are_spread_evenly(config):
  config.data.image_size = 16
  batch = _host(next(_synthetic(config, builders.batch_sharding(config, 1), batch=64)))
  # 49,152 bytes: five standard deviations of their mean and of a bin.
  assert abs(batch['image'].mean() - 127.5) < 5 * 73.9 / np.sqrt(49152)
  counts = np.bincount(batch['image'].ravel(), minlength=256)
  assert np.abs(counts - 192).max() < 5 * np.sqrt(192)
  assert set(batch['label']) == set(range(5))
