"""Features of images, as another encoder or a network of ours wrote them."""

from collections.abc import Callable, Sequence
import functools
import json
import os
from typing import Any

import ml_collections
import numpy as np
import safetensors

from anp_jax import config as config_lib
from anp_jax.config import data_keys
from anp_jax.data import vocabulary
from anp_jax.data.sources import arrays as arrays_lib, class_texts, splits
from anp_jax.system import error_lines, files

ARRAY = 'features'  # the array that is read where none is named


class Features(arrays_lib.Arrays):
  """Vectors in memory, those of one split.

  The text after `features:` is FILE[#ARRAY], or several with commas between them: then an
  example has the numbers of all, one file's after another's. {split} in a file's name
  stands for the split; without it the images are divided as those of a tree are, by a hash
  of CLASS/NAME. See `read` for what a file holds.
  """

  kind = 'vectors'

  def __init__(self, text: str, split: str, other_split: str):
    """Reads one split.

    Args:
      text: config.data.source.
      split: name of the split.
      other_split: other split of the run, whose classes count too if it is there.

    Raises:
      ConfigError: for a file that is missing or damaged, files of other examples, or
        names that do not tell the class.
    """
    self.name = f'{text}: {split}'
    names, arrays = read_all(text, split)
    vectors, classes = np.concatenate(arrays, 1), _classes(text, names)
    all_classes = {*classes}
    if splits.SPLIT not in text:
      splits.check_half(text, split)
      keys = [f'{label}/{os.path.basename(name)}' for label, name in zip(classes, names)]
      chosen = [i for i, key in enumerate(keys) if splits.in_half(key, split)]
      vectors = vectors[chosen]
      names, classes = tuple(names[i] for i in chosen), [classes[i] for i in chosen]
    else:
      for (path, array), values in zip(_paths(text, other_split), arrays):
        if os.path.exists(path):
          other_names, other_values = read(path, array)
          check_widths(path, [other_values], [values.shape[1]])
          all_classes |= {*_classes(text, other_names)}
    self._names, self._images = names, vectors[:, None, None]
    self.vocabulary = vocabulary.Vocabulary(tuple(sorted(all_classes)))
    ids = {name: i for i, name in enumerate(self.vocabulary.names)}
    self._labels = np.array([ids[name] for name in classes], np.int32)

  def example_name(self, index: int) -> str:
    """The name that the file has for an example."""
    return self._names[index]

  def listing(self) -> tuple[str, ...]:
    """The names of all examples."""
    return self._names


def check_widths(place: str, arrays: Sequence[np.ndarray], expected: Sequence[int]) -> None:
  """Raises ConfigError for features of other widths than those of other examples.

  Args:
    place: their file or files.
    arrays: (n, width) of each file.
    expected: widths of the other examples.
  """
  present = [array.shape[1] for array in arrays]
  if present != [*expected]:
    raise config_lib.ConfigError(
      f'{place} has {_numbers(present)} numbers per example, expected {_numbers(expected)}'
    )


def _numbers(widths):
  return ' and '.join(f'{width:,}' for width in widths)


def widths(config: ml_collections.ConfigDict, expected: Sequence[int] = ()) -> tuple[int, ...]:
  """The numbers per example in each file of config.data.source; () for images.

  Args:
    config: the run's config.
    expected: those that its network was made for; (): none yet.

  Raises:
    ConfigError: as `read_all`, or if there are others than expected.
  """
  if not config.data.source.startswith(data_keys.FEATURES):
    return ()
  _, arrays = read_all(config.data.source, config.data.eval_split)
  if expected:
    check_widths(f'config.data.source={config.data.source!r}', arrays, expected)
  return tuple(array.shape[1] for array in arrays)


def read_all(text: str, split: str) -> tuple[tuple[str, ...], list[np.ndarray]]:
  """The names of a split's examples, and their features in each file.

  Args:
    text: see `Features`; the prefix may be missing.
    split: name of the split.

  Raises:
    ConfigError: if a file cannot be read, or has other examples than the first.
  """
  (path, array), *more = _paths(text, split)
  names, values = read(path, array)
  arrays = [values]
  places = {name: i for i, name in enumerate(names)}
  for other, array in more:
    other_names, values = read(other, array)
    if {*other_names} != {*names} or len(other_names) != len(names):
      raise config_lib.ConfigError(f'{other} has features of other examples than {path}')
    order = np.empty(len(names), np.int64)
    order[[places[name] for name in other_names]] = np.arange(len(names))
    arrays.append(values[order])
  return names, arrays


def read(path: str, array: str = ARRAY) -> tuple[tuple[str, ...], np.ndarray]:
  """Reads a file of features.

  Args:
    path: .npz with the arrays; .parquet with columns; .safetensors, whose metadata has
      the names as a JSON list.
    array: name of the array.

  Returns:
    The names of the examples, all different; features (n, width) float32.

  Raises:
    ConfigError: naming the file, and what was expected of it.
  """
  path = os.path.expanduser(path)
  return _read(path, array, files.state(path))


@functools.lru_cache(maxsize=4)  # of a run's two splits, which are asked for several times
def _read(path, array, _state):
  reader = _READERS.get(os.path.splitext(path)[1].lower())
  if not reader:
    raise config_lib.ConfigError(f'{path}: expected a file {", ".join(_READERS)}')
  try:
    names, values = reader(path, array)
    names = tuple(map(class_texts.text, names))
    values = np.asarray(values, np.float32)
    if values.ndim != 2 or len(values) != len(names) or not values.size:
      raise ValueError(f'{array} is an array {values.shape}, expected ({len(names)}, width)')
    if len({*names}) != len(names):
      raise ValueError('names repeat')
    if not np.isfinite(values).all():
      raise ValueError(f'{array} has numbers that are not finite')
  except Exception as e:  # whatever a reader raises for a damaged file
    line = error_lines.typed_line(e)
    raise config_lib.ConfigError(
      f'{path}: expected features {array!r} and the names of their examples: {line}'
    ) from e
  return names, values


def _npz(path, array):
  with np.load(path) as arrays:  # without pickles
    return arrays['names'].tolist(), arrays[array]


def _parquet(path, array):
  from pyarrow import parquet

  table = parquet.read_table(path, columns=['names', array])
  return table['names'].to_pylist(), np.stack(table[array].to_numpy())


def _safetensors(path, array):
  with safetensors.safe_open(path, 'np') as file:
    return json.loads(file.metadata()['names']), file.get_tensor(array)


_READERS: dict[str, Callable[[str, str], tuple[Any, Any]]] = {
  '.npz': _npz,
  '.parquet': _parquet,
  '.safetensors': _safetensors,
}


def _paths(text, split):
  """(path, array) of each file of a split."""
  result = []
  for part in text.removeprefix(data_keys.FEATURES).split(','):
    path, _, array = part.strip().partition('#')
    result.append((os.path.expanduser(path.replace(splits.SPLIT, split)), array or ARRAY))
  return result


def _classes(text, names):
  """The class of each example: the name of its file's folder."""
  classes = [os.path.basename(os.path.dirname(name)) for name in names]
  for label, name in zip(classes, names):
    if not label or vocabulary.has_control(label):
      raise config_lib.ConfigError(
        f'config.data.source={text!r}: {name!r} has no class; expected names such as '
        'happy_dog/1.jpg'
      )
  return classes
