"""Parts of training of a user's own, which configs name by module and attribute."""

import dataclasses

import jax
import jax.numpy as jnp
import optax

from anp_jax.training import heads


def plain_descent(learning_rate, scale=1.0):
  """Gradient descent, `scale` times as fast."""
  return optax.chain(optax.scale(scale), optax.scale_by_learning_rate(learning_rate))


def linear(progress):
  """A learning rate that falls linearly to nothing, over its peak."""
  return 1 - progress


@dataclasses.dataclass(frozen=True)
class Hinge(heads.Head):
  """An output for each class, taught by a multi-class hinge loss."""

  @property
  def outputs(self):
    """Numbers an image that the network gives."""
    return self.classes

  def logits(self, outputs):
    """The outputs, which rank the classes."""
    return outputs

  def scores(self, outputs):
    """Probabilities by name."""
    return {'anp': jax.nn.softmax(outputs)}

  def loss(self, outputs, targets):
    """(batch,) mean margins by which other classes are too near."""
    right = (outputs * targets).sum(-1, keepdims=True)
    return jnp.maximum(0, 1 - targets + outputs - right).mean(-1)
