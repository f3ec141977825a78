"""The interface of every kind of data set: examples by index."""

from collections.abc import Sequence

import numpy as np

from anp_jax import config as config_lib
from anp_jax.data import vocabulary as vocabulary_lib


class Source:
  """One split of a data set.

  Encoded images are decoded by `input.decode_tensorflow` or `input.decode_pillow`; pixels
  need no TensorFlow; synthetic examples are made on the device; vectors are features.

  Attributes:
    kind: 'encoded' (image files) or 'pixels' (uint8 arrays) of a class of yours; else
      'vectors' or 'synthetic', too.
    vocabulary: classes of the labels.
    name: name of the split in messages.
  """

  kind: str
  vocabulary: vocabulary_lib.Vocabulary
  name: str

  @property
  def has_images(self) -> bool:
    """Whether examples can be shown."""
    return self.kind in ('encoded', 'pixels')

  def __len__(self) -> int:
    """Number of examples."""
    raise NotImplementedError

  def read(self, indices: np.ndarray) -> tuple[list, np.ndarray]:
    """Examples by index, in any order, from any thread.

    Args:
      indices: (n,) int64 in [0, len).

    Returns:
      n images, bytes if encoded or pixels (height, width, 3) uint8, or vectors
      (1, 1, width) float32; labels (n,) int32.
    """
    raise NotImplementedError

  def labels(self) -> np.ndarray:
    """(n,) int32, of all examples; may take a pass over the data."""
    raise NotImplementedError

  def example_name(self, index: int) -> str:
    """The name of an example in messages."""
    return f'{self.name}, example {index}'

  def listing(self) -> Sequence[str] | None:
    """The files of all examples; None where that takes reading them."""
    return None

  def identity(self) -> str:
    """A text that changes if any example does; '': unknown, so decoded images are not kept."""
    return ''


class Wrapper(Source):
  """A source that passes everything on to another; subclasses change a part of it."""

  def __init__(self, source: Source):
    """Wraps a source."""
    self.kind = source.kind
    self.vocabulary = source.vocabulary
    self.name = source.name
    self._source = source

  def __len__(self) -> int:
    return len(self._source)

  def read(self, indices: np.ndarray) -> tuple[list, np.ndarray]:
    """Examples of the wrapped source."""
    return self._source.read(indices)

  def labels(self) -> np.ndarray:
    """Labels of the wrapped source."""
    return self._source.labels()

  def example_name(self, index: int) -> str:
    """The name that the wrapped source gives to an example."""
    return self._source.example_name(index)

  def listing(self) -> Sequence[str] | None:
    """The files of the wrapped source."""
    return self._source.listing()


def check_labelled(
  source: Source, labels: np.ndarray, indices: Sequence[int] | np.ndarray | None = None
) -> None:
  """Raises ConfigError at the first example without a label of a class, naming it.

  Args:
    source: examples.
    labels: (n,) of some of them; -1: none.
    indices: (n,) their indices; None: all examples.
  """
  classes = len(source.vocabulary)
  bad = (labels < 0) | (labels >= classes)
  if bad.any():
    row = int(np.argmax(bad))
    index = row if indices is None else int(indices[row])
    text = f'label {labels[row]}; expected 0 to {classes - 1}'
    if labels[row] == -1:
      text = 'no label; expected a split whose examples all have one'
    raise config_lib.ConfigError(f'{source.name}: {source.example_name(index)} has {text}')
