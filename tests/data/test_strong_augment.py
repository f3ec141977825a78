"""RandAugment and random erasing in a training step: after the cut, by seed, step and row."""

import jax
import numpy as np
import optax
import pytest

from anp_jax import config as config_lib
from anp_jax.data.input import batch_sampler, strong_augment
from anp_jax.parallel import mesh as mesh_lib
from tests import builders, image_sources, programs

_ROWS = 16


@pytest.fixture
def strong(config):
  config.data.augment, config.data.erase = 'strong_crop', 0.5
  config.batch_size = _ROWS
  return config


def _augmented(config, images, key, rows):
  return np.asarray(jax.jit(lambda *x: strong_augment.augmented(config, *x))(images, key, rows))


def test_the_row_decides_and_not_the_device(strong):
  batch, key = programs.batch(0, _ROWS, 16), jax.random.key(1)
  images, rows = batch['image'], batch['row']
  want = _augmented(strong, images, key, rows)
  assert ((want != images).any((1, 2, 3))).sum() > 8
  spec = jax.P(mesh_lib.BATCH)
  for devices in (2, 4, 8):
    mesh = mesh_lib.create(strong, jax.devices()[:devices])
    program = programs.mapped(
      lambda x, rows: strong_augment.augmented(strong, x, key, rows), mesh, (spec, spec), spec
    )
    for order in (slice(None), slice(None, None, -1)):
      arrays = programs.put((images[order], rows[order]), mesh)
      np.testing.assert_array_equal(program(*arrays), want[order])
  assert (_augmented(strong, images, jax.random.key(2), rows) != want).any()


def test_a_step_sees_what_is_shown(strong):
  """Its loss is that of the network on these images."""
  strong.model.name, strong.data.image_size, strong.data.resize = 'lenet', 16, 16
  program = programs.build(strong, 2)
  batch, state = programs.batch(0, _ROWS, 16), program.new_state()
  d = strong.data
  logits = []
  images = strong_augment.of_steps(strong, batch['image'], np.zeros(_ROWS, int), batch['row'])
  for image in (batch['image'], images):
    pixels = ((image - np.array(d.mean)) / np.array(d.std)).astype(np.float32)
    logits.append(program.model.apply({'params': state.params}, pixels, True))
  plain, want = (
    optax.softmax_cross_entropy_with_integer_labels(x, batch['label']).mean() for x in logits
  )
  mesh = program.spec.mesh
  _, values = program.train_step(state, programs.put(batch, mesh))
  loss = np.asarray(values)[0]
  # float32 sums in another order.
  assert loss == pytest.approx(float(want), rel=1e-5) and abs(loss - float(plain)) > 1e-3


def test_the_host_cuts_alike(strong):
  """Its batches have the plain cut: the device does the rest."""
  source = image_sources.Source(image_sources.pixels_of_many_sizes())
  images = []
  for cut in ('strong_pad', 'pad'):
    strong.data.augment = cut
    images.append([b['image'] for b in image_sources.batches(strong, source, 2)])
  np.testing.assert_array_equal(*images)


def test_nothing_changes_where_both_are_off_and_no_features(strong):
  images = programs.batch(0, _ROWS, 16)['image']
  arguments = jax.random.key(0), np.arange(_ROWS)
  features = images.astype(np.float32)
  assert strong_augment.augmented(strong, features, *arguments) is features
  strong.data.rand_augment_ops, strong.data.erase = 0, 0.0
  np.testing.assert_array_equal(_augmented(strong, images, *arguments), images)


def test_another_version_of_the_stream_is_not_trained_on(strong):
  strong.data.stream = 1
  sampler = strong, 10, 2, np.arange(2)
  builders.assert_refused(
    'config.data.stream=1: expected 2', batch_sampler.BatchSampler, *sampler, True
  )
  batch_sampler.BatchSampler(*sampler, training=False)  # what it has learnt is evaluated


def test_the_keys_apply_to_strong_augmentation_only():
  keys = {'data.erase', 'data.rand_augment_ops', 'data.rand_augment_magnitude'}
  for cut, its in (
    ('crop', {'data.crop_area', 'data.crop_ratio'}),
    ('scale', {'data.scale_range'}),
    ('pad', set()),
  ):
    flat = config_lib.flat(builders.config({'data.augment': cut}))
    assert its <= set(flat) and not keys & set(flat)
    flat = config_lib.flat(builders.config({'data.augment': f'strong_{cut}'}))
    assert its | keys <= set(flat)
    assert flat['data.rand_augment_ops'] == 2 and flat['data.erase'] == 0.25
