"""A linear classifier, to probe features with."""

from collections.abc import Callable, Sequence
import itertools
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
import ml_collections

from anp_jax.models import layers


class Linear(layers.NormalisedNetwork):
  """Batch normalisation of all numbers of an example, and a linear classifier.

  Encoders differ in the scale of their features by orders of magnitude; normalised, one
  learning rate serves all, as in the linear probes of He et al. 2021 (arXiv
  2111.06377, appendix A). In evaluation all is one linear map.
  """

  @nn.compact
  def __call__(self, images, train: bool):
    """(batch, ...) to logits (batch, classes)."""
    _, norm = layers.makers(self)
    x = norm(name='norm')(images.reshape(images.shape[0], -1), train)
    return layers.head(self, layers.Initializer('normal', 0.01))(x)


def is_fused(config: ml_collections.ConfigDict, head: Any) -> bool:
  """Whether logits are sums of what several files of features contribute.

  Args:
    config: the run's config.
    head: its `training.heads.Head`.
  """
  is_sum = config.model.name == 'linear' and head.is_linear
  return is_sum and len(config.data.get('widths', ())) > 1


def contributions(
  logits_of: Callable[[jax.Array], jax.Array], images: jax.Array, stats: Any, widths: Sequence[int]
) -> jax.Array:
  """What each file of features adds to the logit of each class.

  A logit of this network less that of the mean example is the sum over features of
  weight times (value - mean), the values that Lundberg and Lee 2017 (arXiv 1705.07874,
  section 4.1) derive for a linear model. Here they are summed by file, and given
  relative to the mean of all classes, since a softmax sees no more.

  Args:
    logits_of: the trained network: images to logits.
    images: (batch, 1, 1, width) features.
    stats: the network's other collections.
    widths: features of each file.

  Returns:
    (batch, files, classes).
  """
  means = stats['batch_stats']['norm']['mean'].astype(images.dtype)
  logits = logits_of(images)
  parts = []
  for start, end in itertools.pairwise(itertools.accumulate(widths, initial=0)):
    part = logits - logits_of(images.at[..., start:end].set(means[start:end]))
    parts.append(part - part.mean(-1, keepdims=True))
  return jnp.stack(parts, 1)
