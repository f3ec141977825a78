"""Gradients that are corrected for what changed since their weights were read.

Zheng et al. (ICML 2017, arXiv 1609.08326), DC-ASGD: the gradient of the weights
now is about g + H (now - read), and the diagonal of the Hessian H about
lambda g g, element by element. With DC-ASGD-a lambda is divided by the root of
a mean of g g, which decays.

Where workers look ahead, the weights now are those to which the update's own
momentum moves: the point that `look_ahead` predicted as its worker read. So the
error of the prediction alone is corrected, and nothing for one worker.
"""

import dataclasses

import jax.numpy as jnp

_EPSILON = 1e-7  # of the paper


@dataclasses.dataclass(frozen=True)
class Settings:
  """What decides the correction; JSON values for the log.

  Attributes:
    strength: lambda; 0: nothing is corrected.
    decay: of the mean of squares; 0: lambda is not divided.
  """

  strength: float = 0.0
  decay: float = 0.0


def settings(config) -> Settings:
  """Returns the settings of a run."""
  s = config.strategy
  return Settings(s.delay_compensation, s.delay_decay)


def describe(delay: Settings, versions: int, megabytes: float) -> str:
  """Returns the end of the line about the servers.

  Args:
    delay: the settings.
    versions: of the weights that may be under way.
    megabytes: of one of them, of all servers.
  """
  if not delay.strength:
    return ''
  kind = f', adaptive with {delay.decay:g}' if delay.decay else ''
  return (
    f', delays compensated with {delay.strength:g}{kind}: at most {versions} '
    f'versions of the weights are kept, {versions * megabytes:.3g} MB'
  )


def correct(delay: Settings, gradient, drift, square):
  """Returns the corrected gradient, and the new mean of squares.

  Args:
    delay: the settings, of a strength above 0.
    gradient: array.
    drift: like it, weights now less those that were read.
    square: like it, the mean of squares; None where decay is 0.
  """
  strength = jnp.asarray(delay.strength, gradient.dtype)
  if delay.decay:
    square = delay.decay * square + (1 - delay.decay) * gradient * gradient
    strength = strength / jnp.sqrt(square + _EPSILON)
  return gradient + strength * gradient * gradient * drift, square
