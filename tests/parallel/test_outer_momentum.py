"""The outer momentum of groups, where the learning rate is zero."""

import jax.numpy as jnp
import pytest

from anp_jax.parallel.local_sgd import local_sgd_step as local_step
from tests import builders


def test_slow_momentum_keeps_what_was_trained_before_a_rate_of_zero():
  """Wang et al. divide by the rate: the limit of no further moves."""
  config = builders.config({'strategy.name': 'local_sgd', 'strategy.outer': 'momentum'})
  strategy = local_step.LocalStep(config, None)
  mean, old = {'w': jnp.asarray([3.0])}, {'w': jnp.asarray([1.0])}
  outer = {'weights': old, 'momentum': {'w': jnp.asarray([2.0])}}
  weights, outer = strategy._outer_step(mean, outer, jnp.asarray(0.0))
  assert weights['w'] == 3 and outer['weights']['w'] == 3
  assert outer['momentum']['w'] == pytest.approx(1.8)
