"""The columns of a Hugging Face data set: its image, and what names its class.

What a column is, the library writes into the schema's metadata, in Arrow and
in Parquet files alike. Without that, types and names tell.
"""

import dataclasses
import json

import pyarrow as pa

from anp_jax import config as config_lib
from anp_jax.data import vocabulary as vocabulary_lib
from anp_jax.data.sources import class_texts


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


def choose(schema: pa.Schema, place: str) -> Columns:
  """The columns of the image and of the class.

  The image is in the first Image column. The class is in the column `label`,
  or the only ClassLabel, or in a column of a usual name, or in `adjective` and
  `noun`.

  Args:
    schema: schema of the table.
    place: name of the table in messages.

  Raises:
    ConfigError: if there are none, with the columns that there are.
  """
  features = _features(schema)
  images = [f.name for f in schema if _is_image(f, features.get(f.name))]
  labels = [n for n in schema.names if _names(features.get(n))]
  if 'label' in schema.names:
    labels = ['label']
  elif len(labels) != 1 or set(labels) & set(class_texts.PAIR):
    labels = class_texts.columns(schema.names)
  wrong = [n for n in labels if not _is_label(schema.field(n).type)]
  if not images or not labels or wrong:
    columns = ', '.join(f'{f.name} ({_kind(f, features.get(f.name))})' for f in schema)
    raise config_lib.ConfigError(
      f'{place} has the columns {columns}; expected an Image, and a label '
      '(ClassLabel, string or whole number) or adjective and noun'
    )
  names = tuple(_names(features.get(n)) for n in labels)
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


def vocabulary(columns: Columns) -> vocabulary_lib.Vocabulary | None:
  """The classes of a ClassLabel, in its order; None without one."""
  if len(columns.label) == 1 and columns.names[0]:
    return vocabulary_lib.Vocabulary(columns.names[0])
  return None


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


def _features(schema):
  """The description of each column that the library stores; {} without it."""
  data = (schema.metadata or {}).get(b'huggingface', b'{}')
  try:
    return json.loads(data).get('info', {}).get('features') or {}
  except (ValueError, AttributeError):
    return {}


def _names(feature):
  if isinstance(feature, dict) and feature.get('_type') == 'ClassLabel':
    return tuple(feature.get('names') or ())
  return ()


def _is_image(field, feature):
  if isinstance(feature, dict) and '_type' in feature:
    return feature['_type'] == 'Image'
  kind = field.type
  if pa.types.is_struct(kind):
    return kind.get_field_index('bytes') >= 0
  return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def _is_label(kind):
  types = pa.types
  is_text = types.is_string(kind) or types.is_large_string(kind)
  return is_text or types.is_integer(kind) or types.is_floating(kind)


def _kind(field, feature):
  named = isinstance(feature, dict) and feature.get('_type')
  return named if named and named != 'Value' else field.type
