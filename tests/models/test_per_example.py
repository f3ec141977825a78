"""Random numbers of examples: their law, and their frequencies."""

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from anp_jax.models import convnext, efficientnet
from anp_jax.models.layers import example_randomness


class _Draws(nn.Module):
  rates: tuple = (0.0, 0.25, 0.5)
  dtype: str = 'float32'

  @nn.compact
  def __call__(self, x):
    factors = example_randomness.branch_factors(self, self.rates, True)
    return factors[..., 0, 0, 0]


def _apply(rows, key=0):
  x = np.ones(len(rows), np.float32)
  variables = {example_randomness.EXAMPLE: {'row': np.array(rows, np.int32)}}
  rngs = {example_randomness.EXAMPLE: jax.random.key(key)}
  return jax.device_get(jax.jit(_Draws().apply)(variables, x, rngs=rngs))


def test_they_are_of_the_row_and_the_key():
  factors = _apply(range(40))
  for rows in ([20, 3, 39], range(8, 24)):
    np.testing.assert_array_equal(_apply(rows), factors[:, list(rows)])
  assert (_apply(range(40), key=1) != factors).any()


def test_frequencies_and_means():
  factors = _apply(range(4000))
  for factor, rate in zip(factors, (0, 0.25, 0.5)):
    np.testing.assert_allclose(
      np.unique(factor), sorted({0, 1 / (1 - rate)} if rate else {1}), 1e-6
    )
    # The deviation of a share of 4,000 is at most 0.008: five of them.
    assert abs((factor == 0).mean() - rate) < 0.04
  # Branches are drawn apart.
  shares = np.corrcoef(factors[1:])
  assert np.abs(shares - np.eye(len(shares))).max() < 0.08


class _Dropout(nn.Module):
  @nn.compact
  def __call__(self, x):
    return example_randomness.dropout(self, x, 0.25)


def test_numbers_left_out_are_of_the_row_and_a_quarter():
  x = np.arange(1, 201, dtype=np.float32) * np.ones((40, 1), np.float32)

  def apply(rows):
    variables = {example_randomness.EXAMPLE: {'row': np.array(rows, np.int32)}}
    rngs = {example_randomness.EXAMPLE: jax.random.key(0)}
    return jax.device_get(jax.jit(_Dropout().apply)(variables, x[: len(rows)], rngs=rngs))

  result = apply(range(40))
  np.testing.assert_array_equal(apply([20, 3]), result[[20, 3]])
  is_out = result == 0
  np.testing.assert_allclose(result[~is_out], (x / 0.75)[~is_out], 1e-6)
  # The deviation of a share of 8,000 is 0.005: five of them.
  assert abs(is_out.mean() - 0.25) < 0.025
  assert not (is_out == is_out[0]).all()


def test_no_branch_is_left_out_in_evaluation_or_at_rate_0():
  for rates, train in (((0.5, 0.5), False), ((0.0, 0.0), True)):
    assert example_randomness.branch_factors(None, rates, train) == [None] * 2


@pytest.mark.parametrize(
  'network, want',
  [
    # To that of the last block.
    (convnext.ConvNeXt(10, stages=(1, 2, 1), drop_path=0.3, width=4), [0, 0.1, 0.2, 0.3]),
    (convnext.ConvNeXt(10, stages=(1,), drop_path=0.3, width=4), [0]),
    # By the share of all blocks that lie before one, as timm's: 15/16 for the last.
    (efficientnet.EfficientNet(10, drop_path=0.2), [0.2 * i / 16 for i in range(16)]),
  ],
)
def test_rates_rise_over_all_blocks(monkeypatch, network, want):
  rates = []

  def branch_factors(module, values, train):
    rates.extend(values)
    return [None] * len(values)

  monkeypatch.setattr(example_randomness, 'branch_factors', branch_factors)
  jax.eval_shape(lambda x: network.init(jax.random.key(0), x, True), jnp.zeros((1, 32, 32, 3)))
  np.testing.assert_allclose(rates, want, atol=1e-12)
