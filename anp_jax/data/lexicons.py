"""Published lexicons of Adjective-Noun Pairs: their sentiment and emotions.

VSO (Borth et al. 2013) and MVSO (Jou et al. 2015) score pairs by how positive
they are; MVSO also spreads each over the 24 emotions of Plutchik's wheel.
"""

from collections.abc import Iterator
import dataclasses
import re

import numpy as np

from anp_jax import config as config_lib
from anp_jax.data import vocabulary

# Plutchik's wheel: eight families, each of three intensities.
FAMILIES = {
  'joy': ('ecstasy', 'joy', 'serenity'),
  'trust': ('admiration', 'trust', 'acceptance'),
  'fear': ('terror', 'fear', 'apprehension'),
  'surprise': ('amazement', 'surprise', 'distraction'),
  'sadness': ('grief', 'sadness', 'pensiveness'),
  'disgust': ('loathing', 'disgust', 'boredom'),
  'anger': ('rage', 'anger', 'annoyance'),
  'anticipation': ('vigilance', 'anticipation', 'interest'),
}
EMOTIONS = 24

_NUMBER = re.compile(r'[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?', re.I)
# A word without the underscore that joins a pair, blanks or control characters.
# VSO has brave_9/11, so that a pair here need not be the name of a folder.
_WORD = r'[^\s_,\[\]\x00-\x1f\x7f-\x9f]+'
_PAIR = re.compile(f'{_WORD}_{_WORD}')
_TAIL = r' \[sentiment: ([^\[\]]*)\] \[#(?:images|imgs): [0-9,]+\][ \t]*'
_VSO_ADJECTIVE = re.compile(rf'[0-9]+\. {_WORD}{_TAIL}')
_VSO_PAIR = re.compile(rf'[ \t]+({_PAIR.pattern}){_TAIL}')
_VSO_MARK = '[sentiment:'
# Scores lie in [-limit, limit]. VSO adds a score of the adjective and one of
# the noun, each in [-1, 1]. The published English MVSO has six outside [-2, 2],
# from -2.363 to 2.16.
_VSO_LIMIT = 2.0
_MVSO_LIMIT = 3.0
# Published values are rounded: 24 of them, each to three digits, are off by
# 0.0014 in their sum as a rule (0.0005 * sqrt(24 / 3)) and never by over 0.012.
_SUM_TOLERANCE = 1e-2


@dataclasses.dataclass(frozen=True)
class Lexicons:
  """The tables that a command was given for its classes.

  Attributes:
    sentiments: score of each pair; None: no table.
    emotions: names of emotions, and the distribution of each pair; None: no table.
    notes: lines that say what the tables lack.
  """

  sentiments: dict[str, float] | None = None
  emotions: tuple[tuple[str, ...], dict[str, np.ndarray]] | None = None
  notes: tuple[str, ...] = ()

  def by_class(self, names: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Returns the values of classes, NaN for one that a table lacks.

    Returns:
      Of the tables given: sentiment, (names,) float64, and emotion, (names, 8)
      float64, shares of FAMILIES.

    Raises:
      ConfigError: if the emotions are not those of FAMILIES.
    """
    values = {}
    if self.sentiments:
      scores = self.sentiments
      values['sentiment'] = np.array([scores.get(name, np.nan) for name in names])
    if self.emotions:
      columns, rows = self.emotions
      place = {column.lower(): i for i, column in enumerate(columns)}
      for emotion in sum(FAMILIES.values(), ()):
        if emotion not in place:
          raise config_lib.ConfigError(
            f"--emotions: the table lacks {emotion!r} of Plutchik's wheel"
            f'{config_lib.nearest(emotion, place)}'
          )
      lacks = np.full(EMOTIONS, np.nan)
      table = np.stack([np.float64(rows.get(name, lacks)) for name in names])
      members = [[place[emotion] for emotion in family] for family in FAMILIES.values()]
      values['emotion'] = table[:, members].sum(-1)
    return values


def read(classes: vocabulary.Vocabulary, sentiment: str, emotion: str = '') -> Lexicons:
  """Reads the tables that --sentiment and --emotions name.

  Args:
    classes: pairs that the tables are to have.
    sentiment: path of a table, VSO or MVSO; '': none.
    emotion: path of a table of MVSO; '': none.

  Raises:
    ConfigError: for plain classes, a bad table, or one that has none of the pairs.
  """
  scores, shares, notes = None, None, []
  if sentiment:
    classes.check_pairs('--sentiment')
    scores = sentiments(sentiment)
    notes += _lacks(sentiment, classes.names, scores)
  if emotion:
    classes.check_pairs('--emotions')
    shares = emotions(emotion)
    notes += _lacks(emotion, classes.names, shares[1])
  return Lexicons(scores, shares, tuple(notes))


def sentiments(path: str) -> dict[str, float]:
  """The sentiment of each pair in VSO or MVSO, told apart by content.

  VSO ('3244ANPs.txt') has numbered adjectives, each over its indented pairs,
  below a header. MVSO has lines 'anp,score'; a first line of no pair and no
  number, such as 'ANP,sentiment', is a header.

  Args:
    path: text file.

  Returns:
    Pair to score, in the file's order; about -2 (bad) to 2 (good).

  Raises:
    ConfigError: if the file cannot be read or has no pair; with FILE:LINE, for
      a line of another form, a pair that is repeated, a score that is no number
      or outside [-2, 2] (MVSO: [-3, 3], which the published file needs).
  """
  lines = vocabulary.read_lines(path)
  is_vso = any(_VSO_MARK in line for line in lines)
  rows, limit = (_vso_rows, _VSO_LIMIT) if is_vso else (_mvso_rows, _MVSO_LIMIT)
  scores: dict[str, float] = {}
  numbers: dict[str, int] = {}
  for number, name, score in rows(path, lines):
    place = f'{path}:{number}'
    _refuse_repeat(place, name, numbers)
    numbers[name] = number
    scores[name] = _value(place, score, -limit, limit)
  if not scores:
    raise config_lib.ConfigError(f'{path} has no adjective_noun pairs')
  return scores


def emotions(path: str) -> tuple[tuple[str, ...], dict[str, np.ndarray]]:
  """The distribution of each pair's images over emotions, in MVSO.

  The first line is 'ANP,ecstasy,joy,...', a row is 'happy_dog,0.1,0.25,...'.

  Args:
    path: text file.

  Returns:
    24 names of emotions; pair to (24,) float32, at least 0, which add up to 1
    within 0.01, as published (rounded).

  Raises:
    ConfigError: if the file cannot be read or has no row; with FILE:LINE, for a
      wrong number of fields, names of emotions that are empty, equal, numbers
      or not printable, a first field that is no pair, a pair that is repeated
      with other values, a value that is no number or below 0, a sum that is
      not 1.
  """
  lines = vocabulary.read_lines(path)
  names = _header(path, lines[0])
  rows: dict[str, np.ndarray] = {}
  numbers: dict[str, int] = {}
  for number, line in enumerate(lines[1:], 2):
    place = f'{path}:{number}'
    fields = _fields(place, line, EMOTIONS + 1)
    name = _pair(place, fields[0])
    values = [_value(place, f, 0.0, 1 + _SUM_TOLERANCE) for f in fields[1:]]
    total = sum(values)
    if abs(total - 1) > _SUM_TOLERANCE:
      raise config_lib.ConfigError(
        f'{place}: the emotions of {name!r} add up to {total:.6g}, expected 1'
      )
    row = np.array(values, np.float32)
    # A repeat is harmless only where it says nothing new.
    if name in rows and not np.array_equal(rows[name], row):
      _refuse_repeat(place, name, numbers)
    rows.setdefault(name, row)
    numbers.setdefault(name, number)
  if not rows:
    raise config_lib.ConfigError(f'{path} has a header and no rows')
  return names, rows


def _lacks(path, names, table):
  """Returns a line about the classes that a table lacks, if it lacks any."""
  lacks = [name for name in names if name not in table]
  if len(lacks) == len(names):
    raise config_lib.ConfigError(
      f'{path} has none of the {len(names)} classes, such as {names[0]!r}'
      f'{config_lib.nearest(names[0], table)}'
    )
  if not lacks:
    return []
  return [
    f'{path} has {len(names) - len(lacks)} of the {len(names)} classes; '
    f'not {lacks[0]!r}' + ' and others' * (len(lacks) > 1)
  ]


def _mvso_rows(path, lines) -> Iterator[tuple[int, str, str]]:
  """Line number, pair and score of each line but the header."""
  for number, line in enumerate(lines, 1):
    place = f'{path}:{number}'
    name, score = _fields(place, line, 2)
    is_header = number == 1 and not _PAIR.fullmatch(name) and not _NUMBER.fullmatch(score)
    if not is_header:
      yield number, _pair(place, name), score


def _vso_rows(path, lines) -> Iterator[tuple[int, str, str]]:
  """Line number, pair and score of each line but the header and adjectives."""
  start = next(i for i, line in enumerate(lines) if _VSO_MARK in line)
  for number, line in enumerate(lines[start:], start + 1):
    if _VSO_ADJECTIVE.fullmatch(line):
      continue
    pair = _VSO_PAIR.fullmatch(line)
    if not pair:
      raise config_lib.ConfigError(
        f'{path}:{number}: {_quoted(line)} is not a line of VSO, such as '
        "'1. red [sentiment: 0.50] [#images: 1,234]' or, indented below it, "
        "'red_car [sentiment: 0.5] [#imgs: 12]'"
      )
    yield number, pair[1], pair[2]


def _header(path, line):
  place = f'{path}:1'
  names = tuple(_fields(place, line, EMOTIONS + 1)[1:])
  for i, name in enumerate(names):
    is_word = name and name.isprintable() and not _NUMBER.fullmatch(name)
    if not is_word or name in names[:i]:
      raise config_lib.ConfigError(
        f'{place}: {_quoted(name)} is not a name of an emotion; expected a '
        f'header with {EMOTIONS} different ones'
      )
  return names


def _fields(place, line, count):
  fields = [field.strip(' \t') for field in line.split(',')]
  if len(fields) != count:
    raise config_lib.ConfigError(
      f'{place}: {_quoted(line)} has {len(fields)} fields between commas, expected {count}'
    )
  return fields


def _pair(place, name):
  if not _PAIR.fullmatch(name):
    raise config_lib.ConfigError(f'{place}: {_quoted(name)} is not an adjective_noun pair')
  return name


def _value(place, text, low, high):
  if not _NUMBER.fullmatch(text):
    raise config_lib.ConfigError(f'{place}: {_quoted(text)} is not a number')
  value = float(text)
  if not low <= value <= high:
    raise config_lib.ConfigError(f'{place}: {_quoted(text)} is outside [{low:g}, {high:g}]')
  return value


def _refuse_repeat(place, name, numbers):
  if name in numbers:
    raise config_lib.ConfigError(f'{place}: {name!r} is on line {numbers[name]} already')


def _quoted(text):
  return repr(text if len(text) <= 80 else text[:80] + '...')
