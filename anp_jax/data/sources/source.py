"""The interface of every kind of data set: examples by index."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from anp_jax.data import vocabulary


class Source(Protocol):
  """One split of a data set.

  Encoded images are decoded by `input.decode` or `input.decode_pillow`; pixels
  need no TensorFlow; synthetic examples are made on the device.

  Attributes:
    kind: 'encoded' (image files), 'pixels' (uint8 arrays) or 'synthetic'.
    vocabulary: of the labels.
    name: of the split, in messages.
  """

  kind: str
  vocabulary: vocabulary.Vocabulary
  name: str

  def __len__(self) -> int:
    """Number of examples."""

  def read(self, indices: np.ndarray) -> tuple[list, np.ndarray]:
    """Examples by index, in any order, from any thread.

    Args:
      indices: (n,) int64 in [0, len).

    Returns:
      n images, bytes or (height, width, 3) uint8; labels (n,) int32.
    """

  def labels(self) -> np.ndarray:
    """(n,) int32, of all examples; may take a pass over the data."""

  def example_name(self, index: int) -> str:
    """The name of an example in messages."""
    return f'{self.name}, example {index}'

  def listing(self) -> Sequence[str] | None:
    """The files of all examples; None where that takes reading them."""
    return None


def fingerprint(source: Source) -> dict:
  """The properties of a source that a resumed run must find again."""
  return {
    'examples': len(source),
    'classes': len(source.vocabulary),
    'names': source.vocabulary.digest(),
  }
