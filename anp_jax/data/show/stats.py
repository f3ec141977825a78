"""Counts of a data set's images by class, adjective and noun, as text.

The functions that return lines take the counts of training and of evaluation,
which have the same classes.
"""

import dataclasses

from absl import logging
import numpy as np

from anp_jax import config as config_lib
from anp_jax.data import vocabulary
from anp_jax.data.sources import source as source_lib
from anp_jax.system import markdown

SPLITS = ('training', 'evaluation')

_FIRST = 5  # names to list where there may be many


@dataclasses.dataclass(frozen=True)
class Counts:
  """The number of images of a split, in all and by class.

  Attributes:
    name: name of the split in messages.
    vocabulary: classes of its labels.
    images: number of images, also of those without a class.
    classes: (classes,) int64, images of each.
  """

  name: str
  vocabulary: vocabulary.Vocabulary
  images: int
  classes: np.ndarray


def count(source: source_lib.Source) -> Counts:
  """Counts the images of a split; may take a pass over it.

  An example whose label cannot be read, or is no class, counts for no class.
  """
  classes = source.vocabulary
  labels = _labels(source)
  labels = labels[(labels >= 0) & (labels < len(classes))]
  return Counts(source.name, classes, len(source), np.bincount(labels, minlength=len(classes)))


def class_name(classes: vocabulary.Vocabulary, label: int) -> str:
  """Returns the name of a label; published sets have -1 for a secret one."""
  if 0 <= label < len(classes):
    return classes.names[label]
  return f'label {label}'


def balance(counts: list[Counts]) -> list[str]:
  """Returns lines on how many images and classes there are, and the balance."""
  classes = counts[0].vocabulary
  lines = [f'{s:<10}  {c.name}' for s, c in zip(SPLITS, counts)]
  lines += [f'classes     {len(classes):,}{classes.factors_text()}', '']
  empty = [np.flatnonzero(c.classes == 0) for c in counts]
  unlabelled = [c.images - int(c.classes.sum()) for c in counts]
  rows = [
    ('', *SPLITS),
    ('images', *(f'{c.images:,}' for c in counts)),
    *zip(
      ('smallest class', 'middle class', 'largest class'),
      *(_extremes(classes.names, c.classes) for c in counts),
    ),
    ('classes without images', *(f'{len(ids):,}' for ids in empty)),
  ]
  if any(unlabelled):
    rows.append(('images without a class', *(f'{n:,}' for n in unlabelled)))
  lines += _table(rows)
  for split, ids in zip(SPLITS, empty):
    if len(ids):
      lines.append(f'no image in {split}: {_listed(classes.names, ids)}')
  return lines


def tables(counts: list[Counts]) -> list[str]:
  """Returns tables of all adjectives, nouns and classes, most images first."""
  classes, lines = counts[0].vocabulary, []
  parts = [(f'{factor}s', words, ids) for factor, words, ids in classes.factors]
  for part, words, ids in [*parts, ('classes', classes.names, np.arange(len(classes)))]:
    numbers = [np.bincount(ids, c.classes, len(words)).astype(np.int64) for c in counts]
    ranked = np.lexsort([-n for n in reversed(numbers)])
    rows = [(words[i], *(f'{n[i]:,}' for n in numbers)) for i in ranked]
    lines += ['', *_table([(part, *SPLITS), *rows])]
  return lines


def _labels(source):
  try:
    return source.labels()
  except Exception as e:  # noqa: BLE001 - whatever a reader of records raises
    logging.warning('%s: read one by one, since %s', source.name, e)
  labels = []
  for i in range(len(source)):
    try:
      labels.append(source.read(np.array([i]))[1])
    except Exception as e:  # noqa: BLE001 - as above
      logging.warning('%s cannot be read: %s', source.example_name(i), e)
  return np.concatenate([np.zeros(0, np.int32), *labels])


def _extremes(names, numbers):
  """The smallest, middle (the smaller of two) and largest number, each with its name."""
  ranked = np.argsort(numbers, kind='stable')
  result = []
  for i in ranked[[0, (len(ranked) - 1) // 2, -1]]:
    ties = int((numbers == numbers[i]).sum()) - 1
    name = config_lib.printable(names[i])
    if ties:
      name = 'all' if ties == len(names) - 1 else f'{name} and {ties:,} more'
    result.append(f'{numbers[i]:,} ({name})')
  return result


def _listed(names, ids):
  """The first names, and that there are more."""
  first = ', '.join(config_lib.printable(names[i]) for i in ids[:_FIRST])
  more = len(ids) - _FIRST
  return f'{first} and {more:,} more' if more > 0 else first


def _table(rows):
  """Lines of columns, the first to the left and all others to the right."""
  rows = [[config_lib.printable(cell) for cell in row] for row in rows]
  return markdown.plain(rows, 'lr').splitlines()
