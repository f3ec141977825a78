"""Rows of a table about named files, as CSV or JSON lines."""

from collections.abc import Callable
import csv
import io
import json
import math

import numpy as np

from anp_jax.data import lexicons, vocabulary as vocabulary_lib
from anp_jax.predict import network
from anp_jax.system import untrusted_text

_PARTS = ('adjective', 'noun')
_EMOTIONS = 3  # the strongest, of 24


class Rows:
  """The rows of named files.

  Attributes:
    columns: names of a row's values.
    notes: lines that say what the tables lack.
  """

  def __init__(
    self,
    vocabulary: vocabulary_lib.Vocabulary,
    explain: bool = False,
    sentiment: str = '',
    emotions: str = '',
    is_fused: bool = False,
  ):
    """Reads the tables.

    Args:
      vocabulary: classes of the network.
      explain: whether rows say what adjective and noun contribute.
      sentiment: path of a table, VSO or MVSO; '': none.
      emotions: path of a table of MVSO; '': none.
      is_fused: whether the network reads two files of features, of adjectives and nouns.

    Raises:
      ConfigError: for a bad table, one that has none of the classes, or where
        something needs pairs and the classes are plain.
    """
    if explain:
      vocabulary.check_pairs('--explain')
    self._vocabulary, self._explain = vocabulary, explain
    self._parts = _PARTS if vocabulary.is_anp else ()
    name = 'anp' if vocabulary.is_anp else 'class'
    self.columns = ['file', 'rank', name, *self._parts, 'probability']
    tables = lexicons.read(vocabulary, sentiment, emotions)
    self.notes = tables.notes
    self._sentiments, self._emotions = tables.sentiments, tables.emotions
    if sentiment:
      self.columns.append('sentiment')
    if emotions:
      for i in range(1, _EMOTIONS + 1):
        self.columns += [f'emotion_{i}', f'emotion_{i}_share']
    if explain:
      self.columns += ['adjective_probability', 'noun_probability']
      for part in _PARTS:
        self.columns += [f'best_{part}', f'best_{part}_probability']
    self._is_fused = explain and is_fused
    if self._is_fused:
      self.columns += [f'{part}_contribution' for part in _PARTS]

  def file_rows(self, file: str, names: network.Names, row: int) -> list[dict]:
    """Returns the rows of one file, the likeliest class first.

    Args:
      file: its path.
      names: names of a batch.
      row: the file's index in the batch.

    Returns:
      A dict of `columns` each; None where there is no value.
    """
    return [self._row(file, names, row, i) for i in range(names.classes.shape[1])]

  def _row(self, file, names, row, i):
    vocabulary = self._vocabulary
    name = vocabulary.names[names.classes[row, i]]
    pair = name.split('_') if self._parts else ()
    values = [file, i + 1, name, *pair, _short(names.probabilities[row, i])]
    if self._sentiments is not None:
      values.append(self._sentiments.get(name))
    if self._emotions is not None:
      values += _strongest(name, *self._emotions)
    if self._explain:
      values += [_short(math.exp(names.words[part].of_classes[row, i])) for part in _PARTS]
      for part, words in zip(_PARTS, (vocabulary.adjectives, vocabulary.nouns)):
        values += _best(names.words[part], words, row, i)
    if self._is_fused:
      values += [_short(value) for value in names.contributions[row, :, i]]
    return dict(zip(self.columns, values, strict=True))


def writer(
  kind: str, write: Callable[[bytes], object], columns: list[str]
) -> Callable[[list[dict]], object]:
  """Returns a writer of rows; the head of a CSV is written at once.

  Names of files that are not UTF-8 keep their bytes in CSV, and are escaped as
  Python reads them (lone surrogates) in JSON.

  Args:
    kind: 'csv' or 'jsonl'.
    write: writes bytes.
    columns: columns of the rows.
  """
  if kind == 'jsonl':
    return lambda rows: write(b''.join(map(_json, rows)))
  write(_csv(columns))
  return lambda rows: write(b''.join(_csv(row.values()) for row in rows))


def _strongest(name, emotions, rows):
  if name not in rows:
    return [None] * (2 * _EMOTIONS)
  values = []
  for i in np.argsort(-rows[name], kind='stable')[:_EMOTIONS]:
    values += [emotions[i], _short(rows[name][i])]
  return values


def _best(words, names, row, i):
  if i >= words.best.shape[1]:  # there are fewer of them than of classes
    return [None, None]
  return [names[words.best[row, i]], _short(words.probabilities[row, i])]


def _short(value):
  """The digits that float32 is good for after a network's layers."""
  return float(f'{value:.5g}')


def _csv(values):
  line = io.StringIO()
  csv.writer(line, lineterminator='\n').writerow(map(untrusted_text.csv_cell, values))
  return line.getvalue().encode(errors='surrogateescape')


def _json(row):
  return (json.dumps(row, ensure_ascii=False) + '\n').encode(errors='backslashreplace')
