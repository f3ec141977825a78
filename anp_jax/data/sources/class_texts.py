"""The classes of sets whose examples name them by texts, or by numbers.

A set in a list, in tar shards or in a table has a text for each example: the
number of its class, or its name. They are numbers if all of them are.
"""

from collections.abc import Callable, Iterable, Sequence
import numbers
import os
import re
from typing import Any

import numpy as np

from anp_jax import config as config_lib
from anp_jax.data import vocabulary as vocabulary_lib
from anp_jax.data.sources import image_folder

CLASSES_FILE = 'classes.txt'
# Columns, and keys of JSON, that name a class.
LABELS = ('label', 'class', 'cls', 'anp', 'labels')
PAIR = ('adjective', 'noun')
# Whole numbers from 0, also as a table of floats has them: 3.0.
_NUMBER = re.compile(r'([0-9]{1,9})(?:\.0*)?')
_NEGATIVE = re.compile(r'-[0-9]+(?:\.0*)?')
_MAX_UNUSED = 10_000  # numbers up to here may be classes without an example


def columns(names: Iterable[str]) -> list[str]:
  """The names, of columns or keys, that tell the class: one, or adjective and noun; or none."""
  names = set(names)
  label = [name for name in LABELS if name in names][:1]
  return label or [*PAIR] * names.issuperset(PAIR)


def text(value: Any) -> str:
  """Returns a text or a number of a table as a text; bytes hold one, as names of files do.

  Raises:
    ValueError: if it is neither.
  """
  if isinstance(value, bytes):
    return os.fsdecode(value)
  if not isinstance(value, (str, numbers.Number)):
    raise ValueError(f'{value!r} is neither a text nor a number')
  return str(value)


def number_classes(place: str, numbers: Iterable[int]) -> tuple[str, ...]:
  """Names of the classes that examples number: class0, class1 and so on.

  Args:
    place: name of the set in messages.
    numbers: classes of the examples, from 0 on.

  Raises:
    ConfigError: if almost none of the numbers up to the highest is used.
  """
  used = set(numbers)
  count = max(used, default=-1) + 1
  if count > max(_MAX_UNUSED, 10 * len(used)):
    raise config_lib.ConfigError(
      f'{place} has {vocabulary_lib.counted(len(used), "class")} among '
      f'{count:,} numbers; is it an id? Expected numbers from 0 on, or '
      f'names; {CLASSES_FILE} would give each number its name'
    )
  return numbered(count)


def numbered(count: int) -> tuple[str, ...]:
  """Returns names of so many classes that have numbers only: class0, class1 and so on."""
  width = len(str(count - 1))
  return tuple(f'class{i:0{width}}' for i in range(count))


def classify(
  texts: Sequence[str],
  d: Any,
  folder: str,
  place: Callable[[int], str],
  other_texts: Iterable[str] = (),
  declared: vocabulary_lib.Vocabulary | None = None,
) -> tuple[np.ndarray, vocabulary_lib.Vocabulary]:
  """The class of each example, and the classes.

  The classes are those of the lists, else those that the set declares, else of
  the file classes.txt in its folder. Without these, numbers are called class0,
  class1 and so on, and names are sorted.

  Args:
    texts: name or number of each example's class; '' for none.
    d: namespace with lists and pairs, as config.data.
    folder: folder of the set.
    place: name of an example in messages, by its index.
    other_texts: texts of the run's other split, whose classes count too.
    declared: classes that the set itself declares, which are named by texts.

  Returns:
    (n,) int32, -1 for no class or one that the lists leave out; the classes.

  Raises:
    ConfigError: naming the first example of a class that the set does not
      have, or that all lack a listed one; or as `vocabulary.from_lists`.
  """
  firsts: dict[str, int] = {}  # the first example of each text
  for i, text in enumerate(texts):
    firsts.setdefault(text, i)
  missing = firsts.pop('', None)
  for text, i in firsts.items():
    if vocabulary_lib.has_control(text):
      raise config_lib.ConfigError(
        f'{place(i)}: class {text[:40]!r} has a control character, expected '
        'a name or a number as text'
      )
  # Of both splits: the names of one alone may all look like numbers.
  all_texts = {*firsts, *other_texts} - {''}
  if declared is None or d.lists:
    classes = _classes(all_texts, d, folder)
  else:
    classes = declared
  if declared is None and _are_numbers(all_texts):
    ids = _by_number(firsts, classes, place)
  else:
    ids = _by_name(firsts, classes, place, bool(d.lists))
  if missing is not None:
    ids[''] = -1
  return np.array([ids[text] for text in texts], np.int32), classes


def _classes(texts, d, folder):
  """The classes of a set that declares none."""
  if d.lists:
    return vocabulary_lib.from_spec(d.lists, d.pairs)
  file = os.path.join(folder, CLASSES_FILE)
  if os.path.exists(file):
    return vocabulary_lib.from_lists(file, pairs=d.pairs)
  negative = min(filter(_NEGATIVE.fullmatch, texts), default='')
  if negative and _are_numbers(t for t in texts if not _NEGATIVE.fullmatch(t)):
    raise config_lib.ConfigError(
      f'{folder or "."} has an example of class {negative}, expected 0 on; '
      f'leave out examples without a class, or name all classes in {file}'
    )
  if not _are_numbers(texts):
    return vocabulary_lib.from_names(texts, folder or '.', d.pairs)
  return vocabulary_lib.Vocabulary(number_classes(folder or '.', map(_number, texts)))


def _are_numbers(texts):
  """Whether all texts are the numbers of classes; so is no text at all."""
  return all(map(_NUMBER.fullmatch, texts))


def _number(text):
  return int(_NUMBER.fullmatch(text)[1])


def _by_number(firsts, classes, place):
  """The class of each text that is a number."""
  for text, i in firsts.items():
    if _number(text) >= len(classes):
      raise config_lib.ConfigError(f'{place(i)}: class {text}, expected 0 to {len(classes) - 1}')
  return {text: _number(text) for text in firsts}


def _by_name(firsts, classes, place, listed):
  """The class of each text; -1 for one that the lists leave out."""
  number = {name: i for i, name in enumerate(classes.names)}
  unknown = [text for text in firsts if text not in number]
  if unknown and (not listed or len(unknown) == len(firsts)):
    raise config_lib.ConfigError(
      f'{place(firsts[unknown[0]])}: class {unknown[0][:80]!r} is none of the '
      f'{len(classes)} {"listed " * listed}classes'
      f'{vocabulary_lib.nearest(unknown[0], classes.names)}'
    )
  if unknown:
    image_folder.warn_once(
      f'{place(0)}: {len(unknown)} of {len(firsts)} classes are not listed and their '
      f'examples are left out, such as {min(unknown)}'
    )
  return {text: number.get(text, -1) for text in firsts}
