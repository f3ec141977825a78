"""The cells of a study: its runs, and the config of each."""

from collections.abc import Callable, Iterable
import dataclasses
import hashlib
import itertools
import re

from anp_jax.tools.study import axes, named_strategies

RATE = 'optimizer.learning_rate'
WORKERS = 'strategy.simulate.workers'
# A study's own axes: not to be set for all its cells.
AXES = {
  'strategy.name': '--strategies',
  'seed': '--seeds',
  'ensemble.seeds': '--seeds',
  WORKERS: '--workers',
}
_LETTERS = 40  # of a value, in the name of a folder


@dataclasses.dataclass(frozen=True)
class Cell:
  """One run of a study.

  Attributes:
    strategy: config.strategy.name.
    nodes: processes, or the workers that one process simulates.
    devices: devices of each node.
    seed: config.seed.
    varied: (key, text) of the keys of --vary that it has, and of a model's keys.
    simulated: whether its nodes are workers that one process simulates.
    weak: whether config.batch_size is that of each node.
    tuned: (key, text) of the keys of --tune: a value to try, or the best.
    duration: config.duration of a run that only tunes; '': the config's.
    title: name in tables and figures; '': the strategy's.
    settings: (key, text) of the keys that its strategy sets in a file of --strategies.
  """

  strategy: str
  nodes: int
  devices: int
  seed: int
  varied: axes.Varied = ()
  simulated: bool = False
  weak: bool = False
  tuned: axes.Varied = ()
  duration: str = ''
  title: str = ''
  settings: axes.Varied = ()

  @property
  def rate(self) -> float | None:
    """The learning rate, where the study sets it; None: the config's."""
    rate = dict(self.settings + self.varied + self.tuned).get(RATE)
    return None if rate is None else float(rate)

  @property
  def label(self) -> str:
    """The name in tables, figures and folders."""
    return self.title or self.strategy

  @property
  def name(self) -> str:
    """The name of its folder."""
    parts = [
      re.sub(r'[^\w.]+', '-', self.label),
      'simulated' if self.simulated else '',
      f'{self.nodes}x{self.devices}',
      'tune-' + self.duration.replace(' ', '') if self.duration else '',
      *(f'{key}={_plain(text)}' for key, text in self.varied + self.tuned),
      'weak' if self.weak else '',
      f'seed{self.seed}',
    ]
    return '-'.join(filter(None, parts))

  @property
  def processes(self) -> int:
    """Processes of the run."""
    return 1 if self.simulated else self.nodes

  @property
  def defaults(self) -> dict[str, str]:
    """Overrides that those of the whole study replace, by dotted key."""
    return {'strategy.groups': str(self.nodes if self.nodes > 1 else self.devices)}

  @property
  def overrides(self) -> dict[str, str]:
    """Overrides of this cell, by dotted key."""
    keys = {'strategy.name': self.strategy, 'seed': str(self.seed)}
    if self.simulated:
      keys[WORKERS] = str(self.nodes)
    keys |= self.settings + self.varied + self.tuned
    if self.duration:
      keys['duration'] = self.duration
    return keys


def expand(
  strategies: Iterable[named_strategies.NamedStrategy],
  nodes: Iterable[int],
  devices: Iterable[int],
  seeds: Iterable[int],
  varied: Callable[[named_strategies.NamedStrategy, int], list[axes.Varied]] = lambda *_: [()],
) -> list[Cell]:
  """Returns every combination: whole grids seed by seed, small cells first.

  Args:
    strategies: strategies of the study.
    nodes: processes, or the workers that one process simulates.
    devices: devices of each node.
    seeds: seeds of the runs.
    varied: function from (strategy, nodes) to the combinations of further keys.
  """
  further = {(s, n): varied(s, n) for s in strategies for n in nodes}
  every = itertools.product(seeds, nodes, devices, strategies)
  return [
    Cell(s.name, n, d, seed, keys, title='' if s.label == s.name else s.label, settings=s.settings)
    for seed, n, d, s in every
    for keys in further[s, n]
  ]


def _plain(text):
  """A value as a part of a folder's name; different texts stay different."""
  plain = re.sub(r'[^\w.+-]+', '_', text)[:_LETTERS]
  if plain == text:
    return text
  return f'{plain}.{hashlib.sha256(text.encode()).hexdigest()[:8]}'
