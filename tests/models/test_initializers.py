"""Random starts: their distributions, and that no network leaves them to XLA."""

import math

import jax
import numpy as np
import pytest

from anp_jax.models import layers
from tests import builders, programs, small_networks

_SHAPE = (3, 3, 64, 256)  # 147,456 numbers; fan-in 576, fan-out 2304


@pytest.mark.parametrize(
  ('initializer', 'std', 'largest'),
  [
    (layers.Initializer('normal', 0.01), 0.01, None),
    (layers.Initializer('normal', 2.0, 'fan_in'), math.sqrt(2 / 576), None),
    (layers.Conv(256, 3).kernel_init, math.sqrt(2 / 2304), None),
    # Of a standard normal distribution cut at 2: 1 - 4 phi(2) / (2 Phi(2) - 1).
    (layers.Initializer('truncated_normal', 0.02), 0.02 * 0.8796256610, 0.04),
    (
      layers.Initializer('truncated_normal', 2.0, 'fan_in'),
      math.sqrt(2 / 576),
      2 * math.sqrt(2 / 576) / 0.8796256610,
    ),
    (layers.Initializer('uniform', 1 / 3, 'fan_out'), math.sqrt(1 / 3 / 2304), math.sqrt(1 / 2304)),
  ],
)
def test_both_ways_to_draw_have_the_distribution(initializer, std, largest):
  drawn = initializer.draw((0, 1), _SHAPE)
  assert drawn.dtype == np.float32
  for values in (drawn, np.asarray(initializer(jax.random.key(0), _SHAPE))):
    # Five deviations of the mean and of the variance of so many numbers (normal: the widest).
    assert abs(values.mean()) < 5 * std / math.sqrt(values.size)
    assert abs(values.var() / std**2 - 1) < 5 * math.sqrt(2 / values.size)
    if largest:
      assert 0.99 * largest < np.abs(values).max() <= 1.0001 * largest


def test_a_draw_depends_on_its_seed_alone():
  initializer = layers.kernel_init
  first = initializer.draw((7, 1, 2), _SHAPE)
  assert np.array_equal(first, initializer.draw((7, 1, 2), _SHAPE))
  for seed in ((8, 1, 2), (7, 1, 3), (7, 2, 1)):
    correlation = np.corrcoef(first.ravel(), initializer.draw(seed, _SHAPE).ravel())[0, 1]
    assert abs(correlation) < 5 / math.sqrt(first.size)


def test_constants_are_constant():
  assert (layers.ONES.draw((0,), (3, 2)) == np.ones((3, 2))).all()
  assert (layers.ZEROS(None, (3,)) == np.zeros(3)).all()


@pytest.mark.parametrize(('inputs', 'features'), [(3, 5), (5, 3), (4, 4)])
def test_first_outputs_of_an_identity_are_its_inputs(inputs, features):
  initializer = layers.Initializer('uniform', 1 / 3, 'fan_in', is_identity=True)
  shape, equal = (3, 3, inputs, features), min(inputs, features)
  x = np.random.default_rng(0).standard_normal((2, 6, 7, inputs)).astype(np.float32)
  for kernel in (initializer.draw((0,), shape), initializer(jax.random.key(0), shape)):
    y = jax.lax.conv_general_dilated(
      x, kernel, (1, 1), 'SAME', dimension_numbers=('NHWC', 'HWIO', 'NHWC')
    )
    np.testing.assert_array_equal(y[..., :equal], x[..., :equal])
    assert np.abs(y[..., equal:]).min(initial=1.0) > 0  # the others are random


@pytest.mark.parametrize('name', ['lenet', 'airbench94', 'linear', *small_networks.NAMES])
def test_the_initial_state_of_a_network_is_not_drawn_by_xla(name):
  size = {'lenet': 28, 'airbench94': 32}.get(name, 16)
  config = builders.config(
    {'model.name': name, 'batch_size': 4, 'model.norm_group': 2, 'data.image_size': size}
  )
  program = programs.build(config, 1)
  weights = program.init.weights(program.abstract_replica)
  lowered = jax.jit(program.init_fn).lower(weights)
  assert 'threefry' not in lowered.as_text() and 'erf_inv' not in lowered.as_text()
  # What JAX draws has the same shapes and dtypes.
  drawn = jax.eval_shape(program.init_fn, {})
  assert jax.tree.map(lambda x: (x.shape, x.dtype), program.new_state()) == jax.tree.map(
    lambda x: (x.shape, x.dtype), drawn
  )


def test_parameters_are_drawn_in_their_dtype(x64):
  config = builders.config({'model.name': 'linear', 'batch_size': 32, 'data.image_size': 4})
  config.model.param_dtype = 'float64'
  params = programs.build(config, 1).new_state().params
  assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(np.float64)}
