"""The classes of sets whose examples name them by texts, or by numbers.

A set in tar shards or in a table has a text for each example: the number of
its class, or its name. They are numbers if all of them are.
"""

from collections.abc import Callable, Iterable
import os
import re

import numpy as np

from anp_jax import config as config_lib
from anp_jax.data import vocabulary as vocabulary_lib
from anp_jax.data.sources import image_folder

CLASSES_FILE = 'classes.txt'
# Whole numbers from 0, also as a table of floats has them: 3.0.
_NUMBER = re.compile(r'([0-9]{1,9})(?:\.0*)?')
_NEGATIVE = re.compile(r'-[0-9]+(?:\.0*)?')
_MAX_UNUSED = 10_000  # numbers up to here may be classes without an example


def are_numbers(texts: Iterable[str]) -> bool:
  """Whether all texts are the numbers of classes; so is no text at all."""
  return all(map(_NUMBER.fullmatch, texts))


def check_ids(place: str, highest: int, classes: int) -> None:
  """Refuses numbers that are other ids than those of classes.

  Args:
    place: what messages call the set.
    highest: of the numbers, from 0 on.
    classes: how many different numbers there are.

  Raises:
    ConfigError: where almost none of the numbers up to the highest is used.
  """
  if highest >= max(_MAX_UNUSED, 10 * classes):
    raise config_lib.ConfigError(
      f'{place} has {vocabulary_lib.counted(classes, "class")} among '
      f'{highest + 1:,} numbers; is it an id? Expected numbers from 0 on, or '
      f'names; {CLASSES_FILE} would give each number its name'
    )


def vocabulary(texts: set[str], lists: str, folder: str, pairs: str) -> vocabulary_lib.Vocabulary:
  """The classes of a set.

  They are those of the lists, or of the file classes.txt in the folder of the
  set. Without these, numbers are called class0, class1 and so on, and names
  are sorted.

  Args:
    texts: of the examples of all splits of the run.
    lists: config.data.lists.
    folder: of the set.
    pairs: config.data.pairs.

  Raises:
    ConfigError: as `vocabulary.from_lists`.
  """
  if lists:
    return vocabulary_lib.from_spec(lists, pairs)
  file = os.path.join(folder, CLASSES_FILE)
  if os.path.exists(file):
    return vocabulary_lib.from_lists(file, pairs=pairs)
  negative = min(filter(_NEGATIVE.fullmatch, texts), default='')
  if negative and are_numbers(t for t in texts if not _NEGATIVE.fullmatch(t)):
    raise config_lib.ConfigError(
      f'{folder or "."} has an example of class {negative}, expected 0 on; '
      f'leave out examples without a class, or name all classes in {file}'
    )
  if not are_numbers(texts):
    return vocabulary_lib.from_names(texts, folder or '.', pairs)
  numbers = {_number(text) for text in texts}
  count = 1 + max(numbers, default=-1)
  check_ids(folder or '.', count - 1, len(numbers))
  width = len(str(max(count - 1, 0)))
  return vocabulary_lib.Vocabulary(tuple(f'class{i:0{width}}' for i in range(count)))


def labels(
  texts: Iterable[str],
  classes: vocabulary_lib.Vocabulary,
  place: Callable[[int], str],
  listed: bool,
  are_names: bool = False,
) -> np.ndarray:
  """The class of each example.

  Args:
    texts: of each, a name or a number.
    classes: of the set.
    place: what messages call an example.
    listed: whether the classes are those of config.data.lists, which select
      examples.
    are_names: whether the texts are names even where they look like numbers.

  Returns:
    (n,) int32; -1 for an example whose class the lists leave out.

  Raises:
    ConfigError: naming the first example of a class that the set does not
      have, or that all lack a listed one.
  """
  firsts, inverse = {}, []  # the first example of a text; texts by number
  numbers = {}
  for i, text in enumerate(texts):
    firsts.setdefault(text, i)
    inverse.append(numbers.setdefault(text, len(numbers)))
  for text, i in firsts.items():
    if vocabulary_lib.has_control(text):
      raise config_lib.ConfigError(
        f'{place(i)}: class {text[:40]!r} has a control character, expected '
        'a name or a number as text'
      )
  if not are_names and are_numbers(firsts):
    ids = _by_number(firsts, classes, place)
  else:
    ids = _by_name(firsts, classes, place, listed)
  return np.array(ids, np.int32)[np.array(inverse, np.int64)]


def _by_number(firsts, classes, place):
  """The class of each text that is a number."""
  for text, i in firsts.items():
    if _number(text) >= len(classes):
      raise config_lib.ConfigError(f'{place(i)}: class {text}, expected 0 to {len(classes) - 1}')
  return [_number(text) for text in firsts]


def _number(text):
  return int(_NUMBER.fullmatch(text)[1])


def _by_name(firsts, classes, place, listed):
  """The class of each text; -1 for one that the lists leave out."""
  number = {name: i for i, name in enumerate(classes.names)}
  missing = [text for text in firsts if text not in number]
  if missing and (not listed or len(missing) == len(firsts)):
    raise config_lib.ConfigError(
      f'{place(firsts[missing[0]])}: class {missing[0][:80]!r} is none of the '
      f'{len(classes)} {"listed " * listed}classes'
      f'{vocabulary_lib.nearest(missing[0], classes.names)}'
    )
  if missing:
    image_folder.warn_once(
      '%s: %d of %d classes are not listed and their examples are left out, such as %s',
      place(0),
      len(missing),
      len(firsts),
      min(missing),
    )
  return [number.get(text, -1) for text in firsts]
