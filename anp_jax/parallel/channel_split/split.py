"""Split plans: the features of each convolution that each device computes."""

from collections.abc import Collection, Mapping, Sequence
import re

from ml_collections import ConfigDict

from anp_jax import config as config_lib
from anp_jax.parallel import apportionment

NOTHING = 'nothing'  # the plan without split layers


class Shares:
  """The same shares for every convolution.

  Attributes:
    layers: empty; see `Split`.
  """

  layers: tuple[str, ...] = ()

  def __init__(self, shares: Sequence[float], layers: str):
    """Compiles the pattern.

    Args:
      shares: share of each device, in proportion; () for equal shares.
      layers: regular expression that is searched for in a layer's path.
    """
    self._shares = tuple(shares)
    self._layers = re.compile(layers)

  def counts(self, layer: str, features: int, devices: int) -> tuple[int, ...] | None:
    """Features of each device; None for a layer that is not split."""
    if devices == 1 or not self._layers.search(layer):
      return None
    return apportionment.apportion(features, self._shares or (1,) * devices)


class Split:
  """The features of each device, for each convolution that is split.

  Attributes:
    layers: paths of the layers that the plan names.
  """

  def __init__(self, divisions: Mapping[str, Sequence[int]]):
    """Copies the features of each device by layer."""
    self.layers = tuple(divisions)
    self._counts = {layer: tuple(counts) for layer, counts in divisions.items()}

  def counts(self, layer: str, features: int, devices: int) -> tuple[int, ...] | None:
    """Features of each device; None for a layer that is not split.

    Raises:
      ConfigError: if the plan is for other numbers of features or devices.
    """
    counts = self._counts.get(layer)
    if counts is None or devices == 1:
      return None
    if len(counts) != devices or sum(counts) != features:
      raise config_lib.ConfigError(
        f'config.strategy.plan: {layer}={",".join(map(str, counts))}: expected '
        f'{devices} numbers, {features} in all'
      )
    return counts

  def __str__(self):
    """The text that `parse` reads."""
    texts = [f'{k}={",".join(map(str, counts))}' for k, counts in self._counts.items()]
    return '; '.join(texts) or NOTHING


def parse(text: str) -> Split:
  """Reads a plan such as 'conv1=250,250; conv2=1000,500'.

  Raises:
    ConfigError: if the text is not a plan.
  """
  divisions: dict[str, Sequence[int]] = {}
  for part in [] if text == NOTHING else text.split(';'):
    layer, _, numbers = part.strip().partition('=')
    is_valid = re.fullmatch(r'[^=\s]+=\d+(,\d+)*', part.strip())
    if not is_valid or layer in divisions:
      raise config_lib.ConfigError(
        f'config.strategy.plan={text!r}: expected a text such as '
        f"'conv1=250,250; conv2=1000,500', each layer once, or {NOTHING!r}"
      )
    divisions[layer] = tuple(map(int, numbers.split(',')))
  return Split(divisions)


def check_layers(plan: Shares | Split, layers: Collection[str]) -> None:
  """Refuses a plan of layers that the network does not have.

  Args:
    plan: plan of the run.
    layers: paths of the network's convolutions.

  Raises:
    ConfigError: naming the layer and the nearest one of the network.
  """
  for layer in plan.layers:
    if layer not in layers:
      raise config_lib.ConfigError(
        f'config.strategy.plan: the network has no convolution {layer!r}'
        f'{config_lib.nearest(layer, sorted(layers))}'
      )


def from_config(config: ConfigDict) -> Shares | Split:
  """The plan of config.strategy, or its shares for all layers."""
  t = config.strategy
  return parse(t.plan) if t.plan else Shares(t.shares, t.split_layers)
