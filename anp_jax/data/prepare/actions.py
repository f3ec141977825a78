"""The kinds of each file of a set, and the action on it."""

import collections
import functools

import numpy as np

from anp_jax import config as config_lib
from anp_jax.config import errors
from anp_jax.data.prepare import examine
from anp_jax.data.sources import image_folder

# Each kind of file: its actions, the default first, and what it means. What
# cannot be trained on is not kept.
_KINDS = {
  'missing': ('skip fail', 'no such file'),
  'corrupt': ('skip fail', 'nothing of it can be decoded'),
  'large': ('skip fail', 'of more than --max_megapixels'),
  'truncated': ('skip convert fail', 'damaged, it decodes in part'),
  'placeholder': ('skip keep fail', 'a blank picture in few bytes'),
  'format': ('convert skip fail', 'no 8-bit JPEG, PNG, GIF or BMP'),
  'rotated': ('convert keep skip fail', 'upright only by its EXIF orientation'),
  'cmyk': ('convert keep skip fail', 'of four inks'),
  'alpha': ('keep convert skip fail', 'transparent in places'),
  'grey': ('keep convert skip fail', 'of one channel'),
  'suffix': ('keep skip fail', 'its name says another format'),
  'small': ('keep skip fail', 'shorter side below --min_size'),
  'duplicate': ('keep skip fail', 'the bytes of an earlier file'),
  'conflict': ('keep skip fail', 'the bytes of a file of another class'),
  'leak': ('skip keep fail', 'the bytes of an evaluation file'),
  'rare': ('keep skip fail', 'of a class below --min_count'),
}
KINDS = tuple(_KINDS)
POLICIES = {kind: actions.split() for kind, (actions, _) in _KINDS.items()}
MEANINGS = {kind: meaning for kind, (_, meaning) in _KINDS.items()}
# A file of several kinds: the last of these that any of them asks for.
ACTIONS = ('keep', 'convert', 'skip', 'fail')
CONVERT = ACTIONS.index('convert')


class Split:
  """One split: its files, the findings in them, the actions on them.

  Attributes:
    name: name in the prepared set.
    listing: files of the split.
    findings: finding of each file.
    sizes: (n,) int64, bytes of each file.
    sides: (n,) int64, pixels of each file's shorter side.
    shorter_side: pixels to which longer ones of these are reduced; 0: none is.
    kinds: for each of KINDS, (n,) bool, True for the files of this kind.
    actions: (n,) uint8, indices of ACTIONS, from `decide`.
    equals: split and index of the equal file that stays, by the index of a duplicate or leak.
  """

  def __init__(
    self,
    name: str,
    listing: image_folder.Listing,
    findings: list[examine.Finding],
    shorter_side: int = 0,
  ):
    self.name, self.listing, self.findings = name, listing, findings
    self.shorter_side = shorter_side
    self.sides = np.array([min(f.height, f.width) for f in findings], np.int64)
    self.sizes = np.array([f.size for f in findings], np.int64)
    self.kinds = {kind: np.array([kind in f.kinds for f in findings], bool) for kind in KINDS}
    self.actions = np.zeros(len(findings), np.uint8)
    self.equals: dict[int, tuple[Split, int]] = {}

  def counts(self) -> dict[str, int]:
    """Returns the number of files listed, stored, converted and reduced, and of each kind."""
    stored, converted = len(self.stored), int((self.actions == CONVERT).sum())
    counts = {'listed': len(self.findings), 'stored': stored, 'converted': converted}
    if self.shorter_side:
      counts['reduced'] = int(self.is_reduced[self.stored].sum())
    return counts | {kind: int(is_kind.sum()) for kind, is_kind in self.kinds.items()}

  @functools.cached_property  # read for every file
  def is_reduced(self) -> np.ndarray:
    """(n,) bool, True for the files that are stored smaller than they are."""
    return (self.sides > self.shorter_side) & (self.shorter_side > 0)

  def stored_bytes(self) -> int:
    """Returns about how many bytes the files of the set will have; converted ones, their own."""
    shares = np.where(self.is_reduced, self.shorter_side / np.maximum(self.sides, 1), 1.0) ** 2
    return int((self.sizes * shares)[self.stored].sum())

  @property
  def stored(self) -> np.ndarray:
    """Indices of the files that the set will hold, in their order."""
    return np.flatnonzero(self.actions <= CONVERT)


def policy(text: str) -> dict[str, str]:
  """Returns the action for every kind, from 'kind=action,kind=action'.

  Raises:
    ConfigError: for an unknown kind, or an action that it does not allow.
  """
  result = {kind: actions[0] for kind, actions in POLICIES.items()}
  for item in filter(None, text.split(',')):
    kind, _, action = item.partition('=')
    errors.check_choice(f'--policy: {kind!r}', kind, POLICIES)
    if action not in POLICIES[kind]:
      expected = f'{kind}={" or ".join(POLICIES[kind])}'
      raise config_lib.ConfigError(f'--policy: {item!r}, expected {expected}')
    result[kind] = action
  return result


def decide(splits: list[Split], policy: dict[str, str], min_size: int, min_count: int) -> None:
  """Sets the actions, and the kinds that depend on more than one file.

  A duplicate has the bytes of an earlier file of its split, a leak is a file
  of the first split with the bytes of one of the second; files of the same bytes and
  other classes are in conflict. They are searched for among the files that their own
  kinds do not leave out, and rare classes, with fewer than `min_count` examples in the
  first split, among the rest.

  Args:
    splits: for training, and for evaluation if there is one.
    policy: action on each kind, from `policy`.
    min_size: pixels of the shorter side below which a file is small.
    min_count: examples below which a class is rare.
  """
  for split in splits:
    split.kinds['small'] |= (split.sides > 0) & (split.sides < min_size)
    _apply(policy, split)
  for split in splits:
    _mark_equal('duplicate', split, split)
  if len(splits) == 2:
    _mark_equal('leak', *splits)
  _mark_conflicts(splits)
  for split in splits:
    _apply(policy, split)
  train = splits[0].listing
  counts = np.bincount(train.labels[splits[0].stored], minlength=len(train.vocabulary))
  for split in splits:
    is_rare = (counts < min_count)[split.listing.labels]
    split.kinds['rare'] |= is_rare & (split.actions <= CONVERT)
    _apply(policy, split)


def shards(split: Split, size: int) -> list[np.ndarray]:
  """Divides the stored files of a split into shards of about `size` bytes.

  Converted and reduced files count with their bytes before that, so that the division
  is known before any is decoded.

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
  for kind, is_kind in split.kinds.items():
    split.actions[is_kind] = np.maximum(split.actions[is_kind], ACTIONS.index(policy[kind]))


def _mark_equal(kind, split, other):
  """Marks files of a split that have the bytes of an earlier file, or of the other split's."""
  firsts = {other.findings[j].digest: j for j in reversed(other.stored.tolist())}
  for i in split.stored.tolist():
    j = firsts.get(split.findings[i].digest)
    if j is not None and (split is not other or j != i):
      split.kinds[kind][i] = True
      split.equals[i] = (other, j)


def _mark_conflicts(splits):
  """Marks all files whose bytes are also those of a file of another class."""
  firsts: dict[bytes, dict[int, tuple]] = collections.defaultdict(dict)  # by class
  for split in splits:
    for i in split.stored.tolist():
      firsts[split.findings[i].digest].setdefault(split.listing.labels[i], (split, i))
  for split in splits:
    for i in split.stored.tolist():
      places = firsts[split.findings[i].digest]
      if len(places) > 1:
        split.kinds['conflict'][i] = True
        label = split.listing.labels[i]
        split.equals.setdefault(i, next(at for other, at in places.items() if other != label))


def count(splits: list[Split]) -> dict[str, int]:
  """Returns the number of files of each kind that there is."""
  counts = {kind: sum(int(split.kinds[kind].sum()) for split in splits) for kind in KINDS}
  return {kind: number for kind, number in counts.items() if number}
