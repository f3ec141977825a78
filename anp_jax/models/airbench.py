"""A small convolutional network that learns CIFAR-10 in few epochs.

Jordan 2024, "94 % on CIFAR-10 in 3.29 seconds on a single GPU" (arXiv 2404.00498).
"""

from flax import linen as nn
import jax.numpy as jnp
import numpy as np

from anp_jax.models import layers

_PATTERNS = np.array([[1, 1, 1, 1], [1, 1, -1, -1], [1, -1, 1, -1], [1, -1, -1, 1]]) / 2
_COLOURS = np.array([[0.57, 0.59, 0.57], [0.69, 0.03, -0.72], [0.44, -0.80, 0.40]])
# Variance of CIFAR-10's patches along each colour and pattern, pixels of unit variance.
_VARIANCES = np.array(
  [[10.04, 0.40, 0.34, 0.055], [0.76, 6e-3, 4e-3, 2e-4], [0.17, 2e-3, 1.5e-3, 1.2e-4]]
)
_WIDTHS = 64, 256, 256  # channels of each group
# As PyTorch starts a convolution, but for the outputs that are copies at first.
_KERNEL_INIT = layers.Initializer('uniform', 1 / 3, 'fan_in', is_identity=True)


def whitening_kernel(least: float = 5e-4) -> np.ndarray:
  """A kernel (2, 2, 3, 24) whose outputs have unit variance on photographs, and their negatives.

  The principal components of the patches of photographs are, to a few per cent, products of a
  pattern and a colour: the same for all sets, so they are constants here, where the paper
  computes them from the training set.

  Args:
    least: summand of the variances, which bounds the factor of noise.
  """
  factors = 1 / np.sqrt(_VARIANCES + least)
  kernel = np.einsum('pi,kc,kp->ickp', _PATTERNS, _COLOURS, factors).reshape(2, 2, 3, 12)
  return np.concatenate([kernel, -kernel], -1).astype(np.float32)


class Airbench94(layers.NormalisedNetwork):
  """Whitened patches, three groups of two convolutions, maximum over each map, classifier."""

  @nn.compact
  def __call__(self, images, train: bool):
    """(batch, height, width, 3) normalised to logits (batch, classes).

    Raises:
      ConfigError: for images under 9 pixels a side.
    """
    self.check_side(images, 9, 'airbench94')
    conv, norm = layers.makers(self)
    kernel = jnp.asarray(whitening_kernel(), self.dtype)
    x = layers.convolve(images.astype(self.dtype), kernel, 1, 'VALID', self.platform)
    bias = layers.parameter(self, 'whitened_bias', layers.ZEROS, (x.shape[-1],))
    x = layers.gelu(layers.add_bias(x, bias.astype(self.dtype), self.platform))
    for i, features in enumerate(_WIDTHS, 1):
      first, second = (
        conv(features, 3, kernel_init=_KERNEL_INIT, name=f'stage{i}_conv{j}') for j in (1, 2)
      )
      x = layers.max_pool(first(x), 2, 2, 0, self.platform)
      x = layers.gelu(norm(name=f'stage{i}_norm1')(x, train))
      x = layers.gelu(layers.conv_norm(second, norm(name=f'stage{i}_norm2'), x, train))
    x = x.max((1, 2)).astype(self.param_dtype)
    return layers.head(self, layers.Initializer('uniform', 1 / 3, 'fan_in'))(x) / 9
