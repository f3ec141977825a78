"""A linear classifier, to probe features with."""

from typing import Any

from flax import linen as nn
import jax.numpy as jnp

from anp_jax.models import layers


class Linear(nn.Module):
  """Batch normalisation of all numbers of an example, and a linear classifier.

  Encoders differ in the scale of their features by orders of magnitude; normalised, one
  learning rate serves all, as in the linear probes of He et al. 2021 (arXiv
  2111.06377, appendix A). In evaluation all is one linear map.

  Attributes:
    num_classes: number of logits.
    group, momentum, axis_name: see `layers.BatchNorm`.
    dtype: dtype of the computation; logits are in param_dtype.
    platform: see `layers`.
  """

  num_classes: int
  group: int = 32
  momentum: float = 0.9
  axis_name: str | None = None
  dtype: Any = jnp.float32
  param_dtype: Any = jnp.float32
  platform: str = 'cpu'

  @nn.compact
  def __call__(self, images, train: bool):
    """(batch, ...) to logits (batch, classes)."""
    _, norm = layers.makers(self)
    x = norm(name='norm')(images.reshape(len(images), -1), train)
    return layers.head(self, nn.initializers.normal(0.01))(x)
