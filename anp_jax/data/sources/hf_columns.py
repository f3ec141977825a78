"""The columns of a Hugging Face data set: its image, and what names its class."""

from collections.abc import Mapping
import dataclasses
import re
from typing import Any

import pyarrow as pa

from anp_jax import config as config_lib
from anp_jax.data import vocabulary as vocabulary_lib
from anp_jax.data.sources import class_texts

_LABEL = re.compile(r'ClassLabel|(large_)?string|u?int\d+|float\d+')


@dataclasses.dataclass(frozen=True)
class Columns:
  """The columns that are read.

  Attributes:
    image: name of a column that holds {bytes, path}, or bytes.
    label: name of the class's column, or those of adjective and noun.
    names: classes of each label column that is a ClassLabel; () for another.
  """

  image: str
  label: tuple[str, ...]
  names: tuple[tuple[str, ...], ...]

  def vocabulary(self) -> vocabulary_lib.Vocabulary | None:
    """The classes of a ClassLabel, in its order; None without one."""
    if len(self.label) == 1 and self.names[0]:
      return vocabulary_lib.Vocabulary(self.names[0])
    return None


def choose(features: Mapping[str, Any], place: str) -> Columns:
  """The columns of the image and of the class.

  The image is in the first Image column, else in the first of bytes. The class is
  in the column `label`, or the only ClassLabel, or in a column of a usual name, or
  in `adjective` and `noun`.

  Args:
    features: the library's description of each column.
    place: name of the table in messages.

  Raises:
    ConfigError: if there are none, with the columns that there are.
  """
  kinds = {name: _kind(feature) for name, feature in features.items()}
  images = [n for n, kind in kinds.items() if kind == 'Image']
  images += [n for n, kind in kinds.items() if kind in ('binary', 'large_binary')]
  labels = [n for n, kind in kinds.items() if kind == 'ClassLabel']
  if 'label' in kinds:
    labels = ['label']
  elif len(labels) != 1 or set(labels) & set(class_texts.PAIR):
    labels = class_texts.columns(kinds)
  wrong = [n for n in labels if not _LABEL.fullmatch(kinds[n])]
  if not images or not labels or wrong:
    columns = ', '.join(f'{name} ({kind})' for name, kind in kinds.items())
    raise config_lib.ConfigError(
      f'{place} has the columns {columns}; expected an Image, and a label '
      '(ClassLabel, string or whole number) or adjective and noun'
    )
  names = tuple(tuple(getattr(features[n], 'names', None) or ()) for n in labels)
  return Columns(images[0], tuple(labels), names)


def texts(table: pa.Table, columns: Columns, place: str) -> list[str]:
  """The class of each row as a text, its name or its number.

  It is '' for a row without one: null, or -1.

  Raises:
    ConfigError: for a number that is none of a class.
  """
  values = [
    _texts(table[name], names, f'{place}, column {name!r}')
    for name, names in zip(columns.label, columns.names)
  ]
  if len(values) == 1:
    return values[0]
  return [f'{a}_{n}' if a and n else '' for a, n in zip(*values)]


def _texts(column, names, place):
  """A column's values as texts; '' for null, NaN (pandas' null) and -1."""
  values = [None if v in (None, -1) or v != v else v for v in column.to_pylist()]
  if part := next((v for v in values if isinstance(v, float) and v % 1), None):
    raise config_lib.ConfigError(f'{place} has the class {part}, expected whole numbers or names')
  values = [int(v) if isinstance(v, float) else v for v in values]
  if not names:
    return ['' if v is None else str(v).strip() for v in values]
  outside = next((v for v in values if v is not None and v not in range(len(names))), None)
  if outside is not None:
    raise config_lib.ConfigError(
      f'{place} has the class {outside}, expected 0 to {len(names) - 1}, or -1 for none'
    )
  return ['' if v is None else names[int(v)] for v in values]


def _kind(feature):
  """The type of a column, as the library names it; Image for a struct that holds one."""
  if isinstance(feature, dict):
    return 'Image' if 'bytes' in feature else 'struct'
  return (
    getattr(feature, 'dtype', '') if type(feature).__name__ == 'Value' else type(feature).__name__
  )
