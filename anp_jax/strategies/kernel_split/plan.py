"""Which convolutions are split, and how many features each device computes."""

from collections.abc import Sequence
import re

from anp_jax.strategies import shares as shares_lib


class Shares:
  """The same shares for every convolution."""

  def __init__(self, shares: Sequence[float], layers: str):
    """Makes it.

    Args:
      shares: of each device, in proportion; () for equal ones.
      layers: regular expression, searched for in a layer's path; others are
        not split.
    """
    self._shares = tuple(shares)
    self._layers = re.compile(layers)

  def counts(
    self, layer: str, features: int, devices: int
  ) -> tuple[int, ...] | None:
    """Features of each device; None for a layer that is not split."""
    if devices == 1 or not self._layers.search(layer):
      return None
    return shares_lib.apportion(features, self._shares or (1,) * devices)
