"""Class names, and the adjective and the noun of each."""

from collections.abc import Iterable, Sequence
import dataclasses
import functools
import hashlib
import json
import os
import unicodedata

import numpy as np

from anp_jax import config as config_lib

_FACTORS = ('adjectives', 'nouns')
_GIVEN = 'adjectives or nouns are given'


@dataclasses.dataclass(frozen=True, init=False)
class Vocabulary:
  """Class names in order; Adjective-Noun Pairs where every name is one.

  Attributes:
    names: one per class, all different; an ANP is 'adjective_noun', with one
      underscore.
    adjectives: adjectives in the order of their ids, some perhaps of no class;
      empty for plain classes.
    nouns: nouns, likewise.
  """

  names: tuple[str, ...]
  adjectives: tuple[str, ...]
  nouns: tuple[str, ...]

  def __init__(
    self,
    names: tuple[str, ...],
    adjectives: Sequence[str] | None = None,
    nouns: Sequence[str] | None = None,
  ):
    """Checks the names, and that every factor of a class has an id.

    Args:
      names: one per class.
      adjectives: their order; None: those of the classes, sorted.
      nouns: likewise. Where both are None, the names tell whether they are
        pairs: each has the form of one, and an adjective or noun recurs.

    Raises:
      ConfigError: if a name, adjective or noun repeats or has a control character,
        if adjectives or nouns miss one of a class, or if they are not empty and the
        classes are plain.
    """
    _refuse_repeats(names, 'class ', 0)
    for name in (*names, *(adjectives or ()), *(nouns or ())):
      if has_control(name):
        raise config_lib.ConfigError(f'the name {name[:80]!r} holds a control character')
    is_anp = bool(adjectives or nouns)
    if adjectives is None and nouns is None:
      is_anp = all(map(_is_pair, names)) and _factors_recur(names)
    if is_anp:
      _refuse_plain(names, 'class ', 0, _GIVEN)
    orders = []
    for factor, words, order in zip(_FACTORS, _words(names, is_anp), (adjectives, nouns)):
      if order is None:
        order = sorted(set(words))
      elif is_anp:
        _refuse_repeats(order, f'{factor} ', 0)
        _refuse_missing(names, 'class ', 0, order, (factor, f'the {factor} given'))
      orders.append(tuple(order))
    values = {'names': names, 'adjectives': orders[0], 'nouns': orders[1]}
    vars(self).update(values)  # a frozen dataclass refuses assignments

  def __len__(self) -> int:
    return len(self.names)

  @property
  def is_anp(self) -> bool:
    """Whether every class has an adjective and a noun."""
    return bool(self.adjectives or self.nouns)

  @property
  def factors(self) -> tuple[tuple[str, tuple[str, ...], np.ndarray], ...]:
    """'adjective' and 'noun', each with its words and its ids; () for plain classes."""
    words = self.adjectives, self.nouns
    return tuple(zip(('adjective', 'noun'), words, self._ids)) if self.is_anp else ()

  def adjective_ids(self) -> np.ndarray:
    """(classes,) int32, read-only: the adjective of each class."""
    return self._ids[0]

  def noun_ids(self) -> np.ndarray:
    """(classes,) int32, read-only: the noun of each class."""
    return self._ids[1]

  def text(self) -> str:
    """A text such as '4 classes of 2 adjectives and 3 nouns'."""
    return counted(len(self), 'class') + self.factors_text()

  def factors_text(self) -> str:
    """A text such as ' of 2 adjectives and 3 nouns'; '' for plain classes."""
    if not self.is_anp:
      return ''
    adjectives = counted(len(self.adjectives), 'adjective')
    return f' of {adjectives} and {counted(len(self.nouns), "noun")}'

  def with_pairs(self, pairs: str) -> 'Vocabulary':
    """The same names as config.data.pairs says: only auto and no allow plain ones.

    Raises:
      ConfigError: if all are to be pairs and one has no such form.
    """
    if pairs == 'no':
      return Vocabulary(self.names, (), ())
    if pairs == 'auto' or self.is_anp:
      return self
    _refuse_plain(self.names, 'class ', 0, f'config.data.pairs={pairs}')
    return Vocabulary(self.names, *(tuple(sorted(set(w))) for w in _words(self.names, True)))

  def check_pairs(self, flag: str) -> None:
    """Raises ConfigError for a flag that needs pairs if the classes are plain."""
    if not self.is_anp:
      raise config_lib.ConfigError(
        f'{flag} is for adjective_noun pairs, and the classes are plain, such as {self.names[0]!r}'
      )

  def digest(self) -> str:
    """SHA-256 of the names, and of the factors where they are not sorted."""
    words = _words(self.names, self.is_anp)
    if (self.adjectives, self.nouns) == tuple(tuple(sorted(set(w))) for w in words):
      # A folder's name that is not UTF-8 holds surrogates.
      text = '\n'.join(self.names).encode(errors='surrogatepass')
    else:
      text = json.dumps([self.names, self.adjectives, self.nouns]).encode()
    return hashlib.sha256(text).hexdigest()

  def to_json(self) -> dict:
    """The value that `from_json` reads; the factors keep their order."""
    return {
      'classes': list(self.names),
      'adjectives': list(self.adjectives),
      'nouns': list(self.nouns),
    }

  @functools.cached_property
  def _ids(self):
    result = []
    orders = self.adjectives, self.nouns
    for words, order in zip(_words(self.names, self.is_anp), orders):
      index = {word: i for i, word in enumerate(order)}
      ids = np.array([index[word] for word in words], np.int32)
      ids.flags.writeable = False  # every caller gets the same array
      result.append(ids)
    return result


def from_json(value: dict) -> Vocabulary:
  """The vocabulary that `to_json` gave as `value`.

  Raises:
    ValueError: for lists of anything but names.
  """
  lists = [value[name] for name in ('classes', 'adjectives', 'nouns')]
  for names in lists:
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
      raise ValueError('expected lists of names')
  return Vocabulary(*map(tuple, lists))


def from_spec(spec: str, pairs: str = 'auto') -> Vocabulary:
  """The vocabulary that config.data.lists names.

  Args:
    spec: one path or three: 'anps.txt' or 'anps.txt,adjectives.txt,nouns.txt'.
      ~ is expanded; a path holds no comma.
    pairs: config.data.pairs.

  Raises:
    ConfigError: for another number of paths, and as `from_lists`.
  """
  paths = [os.path.expanduser(path.strip()) for path in spec.split(',')]
  if len(paths) not in (1, 3) or not all(paths):
    raise config_lib.ConfigError(
      f'config.data.lists is {spec!r}, expected one path or three: '
      "'anps.txt' or 'anps.txt,adjectives.txt,nouns.txt'"
    )
  anps, adjectives, nouns = paths if len(paths) == 3 else (*paths, '', '')
  return from_lists(anps, adjectives, nouns, pairs)


def from_lists(anps: str, adjectives: str = '', nouns: str = '', pairs: str = 'auto') -> Vocabulary:
  """A vocabulary whose ids are line numbers of text files, from 0.

  A file is UTF-8 with one name a line. Blanks around names and empty lines at
  the end do not count; a line may end in CRLF.

  The classes are pairs if more than half of the lines are and an adjective or
  noun of these recurs, or if adjectives or nouns are given; then every line
  must be a pair. Otherwise they are plain, so that 't_shirt, dress, hat' is a
  list of three garments.

  Args:
    anps: path of the class names.
    adjectives: path of the adjectives in order; '': those of the pairs, sorted.
    nouns: likewise.
    pairs: config.data.pairs; auto: as above.

  Raises:
    ConfigError: if a file cannot be read or is empty; with FILE:LINE, if a line
      is empty, repeats, cannot be the name of a folder, is no pair where pairs
      are expected, or has an adjective or noun that its list misses.
  """
  names = _read_names(anps)
  if adjectives or nouns:
    _refuse_plain(names, f'{anps}:', 1, _GIVEN)
  elif pairs == 'auto':
    refuse_mixed(names, f'{anps}:', 1)
  elif pairs != 'no':
    _refuse_plain(names, f'{anps}:', 1, f'config.data.pairs={pairs}')
  orders: list[tuple[str, ...] | None] = []
  for factor, path in zip(_FACTORS, (adjectives, nouns)):
    order = _read_names(path) if path else None
    if order:
      _refuse_missing(names, f'{anps}:', 1, order, (factor, path))
    orders.append(order)
  return Vocabulary(names, *orders).with_pairs(pairs)


def from_names(names: Iterable[str], place: str, pairs: str = 'auto') -> Vocabulary:
  """The vocabulary of names that a set has, in their order as texts.

  Where most names are pairs, all must be, as in a list.

  Args:
    names: class names in any order.
    place: what messages call the set.
    pairs: config.data.pairs.

  Raises:
    ConfigError: naming the first that is no pair among pairs.
  """
  names = tuple(sorted(names))
  if pairs == 'auto':
    refuse_mixed(names, f'{place}: class ')
  return Vocabulary(names)


def look_alikes(names: Iterable[str]) -> list[tuple[str, str]]:
  """Pairs of names that differ by case or Unicode form only."""
  first_of: dict[str, str] = {}
  firsts = [(first_of.setdefault(_form(name), name), name) for name in names]
  return [(first, name) for first, name in firsts if first != name]


def nearest(name: str, names: Iterable[str]) -> str:
  """The end of an error line: a name that may be meant; '' without one."""
  for other in names:
    if _form(other) == _form(name) and other != name:
      return f'; {ascii(name)} and {ascii(other)} differ by case or Unicode form only'
  return config_lib.nearest(name, names)


def has_control(text: str) -> bool:
  """Whether a text has control characters, which a terminal would obey."""
  return not text.isprintable() and any(unicodedata.category(c) == 'Cc' for c in text)


def plural(noun: str) -> str:
  """The plural of a noun, such as 'classes'."""
  return noun + ('es' if noun.endswith('s') else 's')


def counted(number: int, noun: str) -> str:
  """A number of things: '1 class', '1,000 classes'."""
  return f'{number:,} {noun if number == 1 else plural(noun)}'


def read_lines(path: str) -> list[str]:
  """Lines of a UTF-8 text file without their ends, LF or CRLF.

  Args:
    path: text file; a byte order mark at its start is dropped.

  Returns:
    At least one line; without the blank ones at the end of the file.

  Raises:
    ConfigError: if the file cannot be read, is not UTF-8 or has only blanks.
  """
  try:
    with open(path, 'rb') as f:
      data = f.read()
    text = data.decode()
  except UnicodeDecodeError as e:
    line = data.count(b'\n', 0, e.start) + 1
    raise config_lib.ConfigError(f'{path}:{line}: byte 0x{data[e.start]:02x} is not UTF-8') from e
  except (OSError, ValueError) as e:  # ValueError: a NUL in the path
    raise config_lib.ConfigError(f'cannot read {path}: {e}') from e
  # Not splitlines(), which also divides at U+0085, U+2028 and others.
  lines = text.removeprefix('\ufeff').split('\n')
  lines = [line.removesuffix('\r') for line in lines]
  while lines and not lines[-1].strip(' \t'):
    lines.pop()
  if not lines:
    raise config_lib.ConfigError(f'{path} is empty')
  return lines


def _form(name):
  return unicodedata.normalize('NFKC', name).casefold()


def _is_pair(name):
  adjective, _, noun = name.partition('_')
  return bool(adjective and noun) and '_' not in noun


def _words(names, is_anp):
  """The adjective of each class, and the noun of each class; empty for plain classes."""
  if not is_anp or not names:
    return (), ()
  return tuple(zip(*(name.split('_') for name in names)))


def _factors_recur(names):
  """Whether names in the form of pairs share an adjective or a noun."""
  # class_1, class_2 and so on: numbered, no pairs.
  adjectives, nouns = _words(names, True)
  if all(noun.isdecimal() for noun in nouns):
    return False
  return min(len({*adjectives}), len({*nouns})) < len(names)


def _read_names(path):
  names = tuple(line.strip(' \t') for line in read_lines(path))
  for number, name in enumerate(names, 1):
    fault = _fault(name)
    if fault:
      raise config_lib.ConfigError(f'{path}:{number}: {fault}')
  _refuse_repeats(names, f'{path}:', 1)
  return names


def _fault(name):
  """Why a name cannot be that of a class folder; '' if it can."""
  if not name:
    return 'the line is empty; it would shift the ids of those below'
  if name in ('.', '..') or '/' in name or len(name.encode()) > 255:
    return f'{name[:80]!r} cannot be the name of a folder'
  if has_control(name):
    return f'{name[:80]!r} holds a control character'
  return ''


# A message begins with `prefix` and the number of a name, counted from `first`:
# a line of a file, or a class.


def _refuse_repeats(names, prefix, first):
  number_of = {}
  for i, name in enumerate(names, first):
    if number_of.setdefault(name, i) != i:
      raise config_lib.ConfigError(f'{prefix}{i}: {name!r} repeats {prefix}{number_of[name]}')


def _refuse_plain(names, prefix, first, why):
  for i, name in enumerate(names, first):
    if not _is_pair(name):
      raise config_lib.ConfigError(
        f'{prefix}{i}: {name!r} is not an adjective_noun pair (one underscore, '
        f'text on both sides), but {why}'
      )


def refuse_mixed(names: Sequence[str], prefix: str, first: int = 0) -> None:
  """Raises ConfigError where most names are pairs whose factors recur, and some are not.

  Args:
    names: class names in order.
    prefix: beginning of the message, before the number of a name.
    first: number of the first name.
  """
  likely = [*filter(_is_pair, names)]
  if 2 * len(likely) > len(names) and _factors_recur(likely):
    no_pairs = 'if none is meant to be a pair: config.data.pairs=no'
    _refuse_plain(names, prefix, first, f'{len(likely)} of {len(names)} are ({no_pairs})')


def _refuse_missing(names, prefix, first, order, source):
  """Raises ConfigError where a class has a word that `order`, from (factor, place), lacks."""
  factor, place = source
  words = set(order)
  for i, word in enumerate(_words(names, True)[_FACTORS.index(factor)]):
    if word not in words:
      raise config_lib.ConfigError(
        f'{prefix}{first + i}: {factor[:-1]} {word!r} of {names[i]!r} is not in '
        f'{place}{config_lib.nearest(word, order)}'
      )
