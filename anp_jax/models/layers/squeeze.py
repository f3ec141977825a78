"""Squeeze and excitation."""

from collections.abc import Callable

from flax import linen as nn
import jax
import jax.numpy as jnp


def squeeze_excite(x: jax.Array, conv: Callable, squeezed: int, activation: Callable) -> jax.Array:
  """Multiplies each channel by a number from the means of all.

  Hu et al. 2017 (arXiv 1709.01507). To be called within a compact method, whose
  module gets the layers `se_fc1` and `se_fc2`.

  Args:
    x: (batch, height, width, channels).
    conv: constructor of a 1x1 convolution, (features, use_bias=..., name=...).
    squeezed: channels of the first convolution.
    activation: function after the first convolution.

  Returns:
    Like x.
  """
  wide = jnp.promote_types(x.dtype, jnp.float32)
  means = x.mean((1, 2), keepdims=True, dtype=wide)
  squeeze = conv(squeezed, use_bias=True, name='se_fc1')
  excite = conv(x.shape[-1], use_bias=True, name='se_fc2')
  gates = nn.sigmoid(excite(activation(squeeze(means))))
  return x * gates.astype(x.dtype)
