"""The cells of a study: which runs there are, and what each of them is told."""

from collections.abc import Iterable
import dataclasses
import itertools
import re

from anp_jax import config as config_lib
from anp_jax import validation

# A study's own axes: not to be set for all its cells.
AXES = {'strategy.name': '--strategies', 'seed': '--seeds'}


@dataclasses.dataclass(frozen=True)
class Cell:
  """One run of a study.

  Attributes:
    strategy: config.strategy.name.
    nodes: processes.
    devices: of each node.
    seed: config.seed.
  """

  strategy: str
  nodes: int
  devices: int
  seed: int

  @property
  def name(self) -> str:
    """Of its folder."""
    return f'{self.strategy}-{self.nodes}x{self.devices}-seed{self.seed}'

  @property
  def workers(self) -> int:
    """Devices on all nodes."""
    return self.nodes * self.devices

  @property
  def overrides(self) -> dict[str, str]:
    """What its config says of its own, by dotted key."""
    return {'strategy.name': self.strategy, 'seed': str(self.seed)}


def expand(
  strategies: Iterable[str],
  nodes: Iterable[int],
  devices: Iterable[int],
  seeds: Iterable[int],
) -> list[Cell]:
  """Every combination; whole grids seed by seed, small cells first."""
  axes = itertools.product(seeds, nodes, devices, strategies)
  return [Cell(s, n, d, seed) for seed, n, d, s in axes]


def numbers(flag: str, text: str, least: int) -> tuple[int, ...]:
  """A list such as '1,2,4', sorted, each once.

  Args:
    flag: named where the text is refused.
    text: as typed.
    least: below which a number is refused.

  Raises:
    ConfigError: naming the flag, the text and what was expected.
  """
  parts = [p.strip() for p in text.split(',')]
  if not all(re.fullmatch('[0-9]{1,9}', p) and int(p) >= least for p in parts):
    raise config_lib.ConfigError(
      f'{flag}={text!r}: expected whole numbers from {least}, such as '
      f'{least},{least + 1}'
    )
  return tuple(sorted({int(p) for p in parts}))


def strategies(text: str) -> tuple[str, ...]:
  """A list of strategies such as 'sync,local', in its order, each once.

  Raises:
    ConfigError: for one that there is not, with those there are.
  """
  names = tuple(dict.fromkeys(p.strip() for p in text.split(',')))
  for name in names:
    if name not in validation.STRATEGIES:
      raise config_lib.ConfigError(
        f'--strategies: no strategy {name!r} (have: '
        f'{", ".join(validation.STRATEGIES)})'
        f'{config_lib.nearest(name, validation.STRATEGIES)}'
      )
  return names
