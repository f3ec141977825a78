"""Which convolutions are split, and how many features each device computes."""

from collections.abc import Collection
from collections.abc import Mapping
from collections.abc import Sequence
import re

from anp_jax import config as config_lib
from anp_jax.parallel import apportionment as shares_lib

# Plans that split nothing: all devices take the first one's gradients; or each
# device, all being of one kind, has its own.
NOTHING, APART = 'nothing', 'apart'


class Shares:
  """The same shares for every convolution."""

  layers = ()  # that the network must have

  def __init__(self, shares: Sequence[float], layers: str):
    """Compiles the pattern.

    Args:
      shares: of each device, in proportion; () for equal ones.
      layers: regular expression; a layer is split if it is found in its path.
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


class Plan:
  """The features of each device, for each convolution that is split.

  Attributes:
    layers: paths of the layers that are split.
  """

  def __init__(self, counts: Mapping[str, Sequence[int]]):
    """Copies the features of each device, by layer."""
    self._counts = {k: tuple(v) for k, v in counts.items()}
    self.layers = tuple(self._counts)

  def of(self, layer: str) -> tuple[int, ...]:
    """Features of each device, of a layer that is split."""
    return self._counts[layer]

  def counts(
    self, layer: str, features: int, devices: int
  ) -> tuple[int, ...] | None:
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
    texts = [f'{k}={",".join(map(str, v))}' for k, v in self._counts.items()]
    return '; '.join(texts) or NOTHING


def parse(text: str) -> Plan:
  """Reads a plan such as 'conv1=250,250; conv2=1000,500'.

  Raises:
    ConfigError: if the text is not a plan.
  """
  counts = {}
  for part in [] if text in (NOTHING, APART) else text.split(';'):
    layer, _, numbers = part.strip().partition('=')
    is_valid = re.fullmatch(r'[^=\s]+=\d+(,\d+)*', part.strip())
    if not is_valid or layer in counts:
      raise config_lib.ConfigError(
        f"config.strategy.plan={text!r}: expected a text such as 'conv1=250,"
        f"250; conv2=1000,500', each layer once, {NOTHING!r} or {APART!r}"
      )
    counts[layer] = tuple(map(int, numbers.split(',')))
  return Plan(counts)


def check_layers(plan: Shares | Plan, layers: Collection[str]) -> None:
  """Refuses a plan of layers that the network does not have.

  Args:
    plan: of the run.
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


def from_config(config) -> Shares | Plan:
  """The plan of config.strategy, or its shares for all layers."""
  t = config.strategy
  return parse(t.plan) if t.plan else Shares(t.shares, t.split_layers)
