"""scikit-learn's handwritten digits: a real set that needs no network."""

import functools

import numpy as np

from anp_jax import config as config_lib
from anp_jax.data import vocabulary
from anp_jax.data.sources import arrays, splits

_HELD_OUT = 5  # of each class, every fifth image is for validation


class Digits(arrays.Arrays):
  """1,797 images of 8x8 pixels: the test set of UCI's "optical recognition".

  The fifth image of each class is held out, then every fifth after it: 1,442
  are trained on and 355 validated on, by 13 writers who are in both. Grey
  levels of 0 to 16 become 0 to 255, in three channels.
  """

  def __init__(self, split: str):
    """Opens 'train' or 'validation'.

    Raises:
      ConfigError: for another split, or without scikit-learn.
    """
    split = splits.choose('digits', split, splits.HALVES)
    self.name = f'digits: {split}'
    self.vocabulary = vocabulary.Vocabulary(tuple('0123456789'))
    images, labels, is_held_out = _load()
    in_split = is_held_out == (split == 'validation')
    self._images, self._labels = images[in_split], labels[in_split]


@functools.cache
def _load():
  """Images (n, 8, 8, 3) uint8, labels (n,) int32, (n,) bool: held out."""
  try:
    from sklearn import datasets
  except ImportError as e:
    raise config_lib.ConfigError(
      "config.data.source='digits' needs scikit-learn, which brings them: pip install scikit-learn"
    ) from e
  data = datasets.load_digits()
  grey = np.round(data.images * (255 / 16)).astype(np.uint8)
  labels = data.target.astype(np.int32)
  is_held_out = np.zeros(len(labels), bool)
  for label in range(10):
    of_class = np.flatnonzero(labels == label)
    is_held_out[of_class[_HELD_OUT - 1 :: _HELD_OUT]] = True
  return np.repeat(grey[..., None], 3, axis=-1), labels, is_held_out
