"""The plan of a set: the kinds of each file, and the action on it."""

import collections
import dataclasses

import numpy as np

from anp_jax import config as config_lib
from anp_jax.data.prepare import examine
from anp_jax.data.sources import image_folder

# The kinds of one file alone, and: there is no such file, its picture is small,
# other files have its bytes, its class has few examples.
KINDS = ('missing', *examine.KINDS, 'small', 'duplicate', 'leak', 'rare')

# Actions by kind, the default first. What cannot be trained on is not kept.
POLICIES = {
  'missing': ('skip', 'fail'),
  'corrupt': ('skip', 'fail'),
  'large': ('skip', 'fail'),
  'truncated': ('skip', 'convert', 'fail'),
  'placeholder': ('skip', 'keep', 'fail'),
  'format': ('convert', 'skip', 'fail'),
  'rotated': ('convert', 'keep', 'skip', 'fail'),
  'cmyk': ('convert', 'keep', 'skip', 'fail'),
  'alpha': ('keep', 'convert', 'skip', 'fail'),
  'grey': ('keep', 'convert', 'skip', 'fail'),
  'suffix': ('keep', 'skip', 'fail'),
  'small': ('keep', 'skip', 'fail'),
  'duplicate': ('keep', 'skip', 'fail'),
  'leak': ('skip', 'keep', 'fail'),
  'rare': ('keep', 'skip', 'fail'),
}
MEANINGS = {
  'missing': 'no such file',
  'corrupt': 'nothing of it can be decoded',
  'large': 'of more than --max_megapixels',
  'truncated': 'damaged, it decodes in part',
  'placeholder': 'a blank picture in few bytes',
  'format': 'of a kind that training does not read',
  'rotated': 'upright only by its EXIF orientation',
  'cmyk': 'of four inks',
  'alpha': 'transparent in places',
  'grey': 'of one channel',
  'suffix': 'its name says another format',
  'small': 'shorter side below --min_size',
  'duplicate': 'the bytes of an earlier file',
  'leak': 'the bytes of an evaluation file',
  'rare': 'of a class below --min_count',
}
# A file of several kinds: the last of these that any of them asks for.
ACTIONS = ('keep', 'convert', 'skip', 'fail')
KEEP, CONVERT, SKIP, FAIL = range(4)


@dataclasses.dataclass
class Split:
  """One split: its files, the findings in them, the actions on them.

  Attributes:
    name: in the prepared set.
    listing: of the files.
    sizes: (n,) int64, bytes of each file.
    shapes: (n, 2) int32, height and width, 0 where unknown.
    kinds: (n,) uint32, bit i for KINDS[i].
    digests: n SHA-256 of the files' bytes, b'' for a missing one.
    formats: n names, such as 'JPEG'.
    reasons: of damage, by index of the file.
    actions: (n,) uint8, indices of ACTIONS, from `decide`.
    equals: split and index that a duplicate or a leak equals, by its index.
  """

  name: str
  listing: image_folder.Listing
  sizes: np.ndarray
  shapes: np.ndarray
  kinds: np.ndarray
  digests: list[bytes]
  formats: list[str]
  reasons: dict[int, str]
  actions: np.ndarray | None = None
  equals: dict[int, tuple[str, int]] = dataclasses.field(default_factory=dict)

  def __len__(self) -> int:
    return len(self.listing.files)

  def of_kind(self, kind: str) -> np.ndarray:
    """Returns (n,) bool, True for the files of a kind."""
    return (self.kinds & bit(kind)) != 0

  @property
  def stored(self) -> np.ndarray:
    """Indices of the files that the set will hold, in their order."""
    return np.flatnonzero(self.actions <= CONVERT)

  @property
  def converted(self) -> np.ndarray:
    """Indices of the files that it will hold converted."""
    return np.flatnonzero(self.actions == CONVERT)


def bit(kind: str) -> int:
  """Returns the bit of `Split.kinds` that stands for a kind."""
  return 1 << KINDS.index(kind)


def policy(text: str) -> dict[str, str]:
  """Returns the action for every kind, from 'kind=action,kind=action'.

  Raises:
    ConfigError: for an unknown kind, or an action that it does not allow.
  """
  result = {kind: actions[0] for kind, actions in POLICIES.items()}
  for item in filter(None, text.split(',')):
    kind, _, action = item.partition('=')
    if kind not in POLICIES:
      raise config_lib.ConfigError(
        f'--policy: unknown kind {kind!r}{config_lib.nearest(kind, POLICIES)}'
      )
    if action not in POLICIES[kind]:
      raise config_lib.ConfigError(
        f'--policy: {item!r}, expected {kind}=' + ' or '.join(POLICIES[kind])
      )
    result[kind] = action
  return result


def decide(splits: list[Split], policy: dict[str, str], min_size: int, min_count: int) -> None:
  """Sets the actions, and the kinds that depend on more than one file.

  A duplicate has the bytes of an earlier file of its split, a leak is a file
  of the first split with the bytes of one of the second. Both are searched for
  among the files that their own kinds do not leave out, and rare classes, with
  fewer than `min_count` examples in the first split, among the rest.

  Args:
    splits: for training, and for evaluation if there is one.
    policy: of `policy`.
    min_size: pixels of the shorter side below which a file is small.
    min_count: examples below which a class is rare.
  """
  for split in splits:
    sides = split.shapes.min(1)
    small = (sides > 0) & (sides < min_size)
    split.kinds[small] |= bit('small')
    split.actions = np.zeros(len(split), np.uint8)
    _apply(policy, split)
  firsts = [_mark_duplicates(split) for split in splits]
  if len(splits) == 2:
    _mark_leaks(splits[0], splits[1], firsts[1])
  for split in splits:
    _apply(policy, split)
  classes = len(splits[0].listing.vocabulary)
  counts = np.bincount(splits[0].listing.labels[splits[0].stored], minlength=classes)
  for split in splits:
    rare = (counts < min_count)[split.listing.labels]
    rare &= split.actions <= CONVERT
    split.kinds[rare] |= bit('rare')
    _apply(policy, split)


def shards(split: Split, size: int) -> list[np.ndarray]:
  """Divides the stored files of a split into shards of about `size` bytes.

  Converted files count with their bytes before conversion, so that the division
  is known before any is converted.

  Returns:
    Indices of files, consecutive and none empty.
  """
  stored = split.stored
  ends = np.cumsum(split.sizes[stored])
  count = max(1, round(ends[-1] / size))
  # The middle of each file falls into one of `count` equal parts.
  middles = ends - split.sizes[stored] / 2
  numbers = np.minimum(middles * count // ends[-1], count - 1)
  return np.split(stored, np.flatnonzero(np.diff(numbers)) + 1)


def _apply(policy, split):
  for i, kind in enumerate(KINDS):
    action = ACTIONS.index(policy[kind])
    holds = (split.kinds >> i) & 1 != 0
    split.actions[holds] = np.maximum(split.actions[holds], action)


def _mark_duplicates(split):
  """Marks the duplicates; returns the first index of each digest."""
  firsts = {}
  for i in split.stored.tolist():
    first = firsts.setdefault(split.digests[i], i)
    if first != i:
      split.kinds[i] |= bit('duplicate')
      split.equals[i] = (split.name, first)
  return firsts


def _mark_leaks(train, evaluation, firsts):
  for i in train.stored.tolist():
    j = firsts.get(train.digests[i])
    if j is not None:
      train.kinds[i] |= bit('leak')
      train.equals[i] = (evaluation.name, j)


def count(split: Split) -> dict[str, int]:
  """Returns the number of files of each kind."""
  return {kind: int(split.of_kind(kind).sum()) for kind in KINDS}


def failures(splits: list[Split], policy: dict[str, str]) -> collections.Counter:
  """Returns the number of files of each kind that forbids the set."""
  result = collections.Counter()
  for split in splits:
    for kind, number in count(split).items():
      if number and policy[kind] == 'fail':
        result[kind] += number
  return result
