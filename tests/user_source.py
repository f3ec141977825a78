"""A user's own data set: config.data.source='tests.user_source:Circles'."""

import numpy as np

from anp_jax.data import sources, vocabulary

_SIDE = 16


class Circles(sources.Source):
  """Bright circles and squares, drawn by index."""

  kind = 'pixels'

  def __init__(self, split: str, path: str):
    """Draws 64 images for training, and 32 for evaluation.

    Args:
      split: as in config.data.train_split or eval_split.
      path: config.data.path.
    """
    self.name = f'circles: {split} {path}'.strip()
    self.vocabulary = vocabulary.Vocabulary(('circle', 'square'))
    self._count = 64 if split == 'train' else 32

  def __len__(self):
    return self._count

  def read(self, indices):
    """The images and labels of indices; see `sources.Source`."""
    labels = indices.astype(np.int32) % 2
    return [_draw(i, label) for i, label in zip(indices, labels)], labels

  def labels(self):
    """The labels of all examples."""
    return np.arange(self._count, dtype=np.int32) % 2


def _draw(index, label):
  """A (16, 16, 3) uint8 image: a circle of label 0, a square of label 1."""
  rows, columns = np.mgrid[:_SIDE, :_SIDE] - _SIDE / 2 + 0.5
  distance = np.hypot(rows, columns) if label == 0 else np.maximum(abs(rows), abs(columns))
  shade = 100 + 37 * (int(index) % 5)
  return np.repeat(np.where(distance < 5, shade, 0).astype(np.uint8)[..., None], 3, axis=-1)
