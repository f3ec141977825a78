"""Tables of published names: how libraries name and shape a network's tensors.

Our names are paths in the variables of a network of `models`, such as
'params/stage1_block2/conv1/kernel' and 'batch_stats/stem_norm/mean'. Published
kernels are (out, in, height, width), and dense ones (out, in).
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
import functools
from importlib import resources
import re
import tomllib
from typing import NamedTuple

import ml_collections
import numpy as np

TIMM, TRANSFORMERS = 'timm', 'transformers'
# Counts of training steps, which only a momentum of None would read.
UNUSED = 'num_batches_tracked'
_LEAVES = {
  'kernel': 'weight',
  'scale': 'weight',
  'bias': 'bias',
  'mean': 'running_mean',
  'var': 'running_var',
}
_BLOCK = re.compile(r'(?:stage(\d+)_)?block(\d+)/')
# Axes, by their number.
_TO_PUBLISHED = {4: (3, 2, 0, 1), 2: (1, 0)}
_FROM_PUBLISHED = {4: (2, 3, 1, 0), 2: (1, 0)}


class Row(NamedTuple):
  """The names of one kind of layer, see names.toml.

  Attributes:
    ours: module, or array, of our network.
    published: published name of it.
    layout: 'dense': a 1x1 kernel that may have two axes; 'map': (1, 1, 1, channels)
      for our (channels,); '': as the other tensors.
  """

  ours: str
  published: str
  layout: str = ''


class Naming(NamedTuple):
  """The names that a library gives to the tensors of a family of networks.

  Attributes:
    label: library, for people.
    filter: filter for images where no processor names one.
    prefixes: prefixes of a backbone's names; a file of a backbone alone has none.
    rows: table of names.
  """

  label: str
  filter: str
  prefixes: tuple[str, ...]
  rows: tuple[Row, ...]

  @property
  def classifier(self) -> str:
    """The published name of the classifier."""
    return next(row.published for row in self.rows if row.ours == 'head')

  def published(self, path: str, prefix: str = '') -> str:
    """Returns the published name of a tensor of ours.

    Args:
      path: path in a network's variables.
      prefix: prefix of the backbone.

    Raises:
      ValueError: if no row of the table has it.
    """
    module, _, leaf = path.partition('/')[2].rpartition('/')
    ending = f'.{_LEAVES[leaf]}' if leaf in _LEAVES else ''
    module = module if ending else f'{module}/{leaf}'
    for row in self.rows:
      if name := _translated(module, row.ours, row.published, -1):
        return f'{"" if module == "head" else prefix}{name}{ending}'
    raise ValueError(f'{path} is not in the table of {self.label}')

  def layout(self, path: str) -> str:
    """Returns the layout of a tensor of ours, by its path."""
    module = path.partition('/')[2].rpartition('/')[0]
    layouts = (row.layout for row in self.rows if _translated(module, row.ours, row.ours, 0))
    return next(layouts, '')

  def modules(self, names: Iterable[str]) -> Iterator[str]:
    """Yields our modules, or arrays, for those published names that are in the table."""
    for name in names:
      for prefix in self.prefixes:
        name = name.removeprefix(prefix)
      for published in (name, name.rpartition('.')[0]):
        yield from filter(None, (_translated(published, r.published, r.ours, 1) for r in self.rows))


@functools.cache
def _tables() -> dict[str, dict[str, Naming]]:
  """The namings of each family, by library."""
  text = resources.files('anp_jax.checkpoint.weights').joinpath('names.toml').read_text()
  namings = tomllib.loads(text)
  for kinds in namings.values():
    for kind, naming in kinds.items():
      rows = naming['rows'].items()
      naming['rows'] = tuple(
        Row(ours, *([names] if isinstance(names, str) else names)) for ours, names in rows
      )
      kinds[kind] = Naming(**naming)
  return namings


class Family:
  """Networks whose tensors have published names alike.

  Attributes:
    name: name for people.
    models: values of config.model.name.
    signature: our modules that tell the family and the naming of a file; 'a|b':
      either of two.
  """

  name: str
  models: Collection[str]
  signature: tuple[str, ...]

  @property
  def namings(self) -> Mapping[str, Naming]:
    """Its namings by library, such as TIMM."""
    return _tables()[self.name]

  def detect(self, names: Collection[str]) -> str | None:
    """Returns which of `namings` a file's tensors have, or None."""
    for kind, naming in self.namings.items():
      modules = set(naming.modules(name for name in names if not name.endswith('bias')))
      if all(modules & set(either.split('|')) for either in self.signature):
        return kind
    return None

  def published_names(self, paths: Iterable[str], kind: str, prefix: str = '') -> dict[str, str]:
    """Returns the published name of each tensor of a network.

    Args:
      paths: paths in the network's variables.
      kind: one of `namings`.
      prefix: prefix of transformers' backbone; '' in a bare model.
    """
    return {path: self.namings[kind].published(path, prefix) for path in paths}

  def to_published(self, path: str, value: np.ndarray, kind: str) -> np.ndarray:
    """Returns a tensor of ours with its axes as a naming has them."""
    layout = self.namings[kind].layout(path)
    if layout == 'map':
      return value[None, None, None]
    if path.endswith('/kernel'):
      value = value.transpose(_TO_PUBLISHED[value.ndim])
    return value[:, :, 0, 0] if layout == 'dense' and value.ndim == 4 else value

  def from_published(self, path: str, value: np.ndarray, kind: str) -> np.ndarray:
    """Returns a published tensor, by our path, with its axes in our order."""
    layout = self.namings[kind].layout(path)
    if layout == 'map':
      return value.reshape(-1)
    if layout == 'dense' and path.endswith('/kernel') and value.ndim == 2:
      value = value[:, :, None, None]
    if path.endswith('/kernel') and value.ndim in _FROM_PUBLISHED:
      return value.transpose(_FROM_PUBLISHED[value.ndim])
    return value

  def is_backbone(self, name: str, kind: str) -> bool:
    """Returns whether a published tensor is one below the classifier."""
    naming = self.namings[kind]
    for prefix in naming.prefixes:
      name = name.removeprefix(prefix)
    if name.startswith(f'{naming.classifier}.'):
      return False
    tops = (row.published.partition('.')[0] for row in naming.rows if row.ours != 'head')
    return any(_pattern(top).fullmatch(name.partition('.')[0]) for top in tops)

  def blocks(self, names: Iterable[str], kind: str) -> tuple[int, ...]:
    """Returns the number of blocks of each stage of a published network."""
    counts: dict[int, int] = {}
    for match in filter(None, map(_BLOCK.match, self.namings[kind].modules(names))):
      stage = int(match[1] or 0)
      # A block without any tensor counts, so that the error names them.
      counts[stage] = max(counts.get(stage, 0), int(match[2]))
    return tuple(counts[stage] for stage in sorted(counts))

  def describe(self, names: Iterable[str], kind: str) -> str:
    """Returns what network a file holds, for people."""
    return f'{", ".join(map(str, self.blocks(names, kind))) or "no"} blocks'

  def network(self, path: str, shapes: dict, kind: str, saved_config: dict) -> dict:
    """Returns the values of the config for a file's network.

    Args:
      path: path of the file.
      shapes: shapes of its tensors by name.
      kind: naming of its tensors.
      saved_config: config.json of transformers or timm; {} without.

    Raises:
      ConfigError: if it is none of `models`.
    """
    raise NotImplementedError

  def mismatch(
    self, config: ml_collections.ConfigDict, paths: Iterable[str], kind: str, saved_config: dict
  ) -> str:
    """Returns why a file's network is another, whatever its tensors; ''.

    Args:
      config: config of the run that begins.
      paths: paths in its network's variables.
      kind: naming of the file's tensors.
      saved_config: config.json of transformers or timm; {} without.
    """
    del config, paths, kind, saved_config
    return ''

  def architecture(self, config: ml_collections.ConfigDict) -> dict:
    """Returns the fields of transformers' config that say what network it is."""
    raise NotImplementedError

  def prefix(self, config: ml_collections.ConfigDict, kind: str) -> str:
    """Returns what a library puts before the names of a config's backbone."""
    return f'{self.architecture(config)["model_type"]}.' if kind == TRANSFORMERS else ''


def _translated(name: str, source: str, target: str, shift: int) -> str:
  """A name of one column in the other; '' if the row is not its own.

  Args:
    name: name whose numbers are digits.
    source: the row's name in the same column.
    target: the row's name in the other column.
    shift: what is added to a number '#'.
  """
  match = _pattern(source).fullmatch(name)
  if not match:
    return ''
  numbers = iter(match.groups())
  return re.sub('[#@]', lambda mark: str(int(next(numbers)) + shift * (mark[0] == '#')), target)


@functools.cache
def _pattern(source):
  return re.compile(re.sub(r'\\#|@', r'(\\d+)', re.escape(source)))
