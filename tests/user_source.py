"""A user's own data set: config.data.source='tests.user_source:Circles'."""

import numpy as np

from anp_jax.data import sources, vocabulary

_SIDE = 16
_NUMBERED_SIDE = 28  # as many pixels as LeNet takes
_NUMBERED = 240


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


class Numbered(sources.Source):
  """Noise with a bright row for the class; the first pixel tells which image it is."""

  kind = 'pixels'

  def __init__(self, split: str, path: str):
    """Draws 240 images for training, and as many others for evaluation."""
    self.name = f'numbered: {split} {path}'.strip()
    self.vocabulary = vocabulary.Vocabulary(tuple('0123456789'))
    self._first = 0 if split == 'train' else _NUMBERED

  def __len__(self):
    return _NUMBERED

  def read(self, indices):
    """The images and labels of indices; see `sources.Source`."""
    return [_draw_numbered(self._first + i) for i in indices], self.labels()[indices]

  def labels(self):
    """The labels of all examples."""
    return np.arange(_NUMBERED, dtype=np.int32) % 10


def numbers(images):
  """The indices of images of `Numbered`, (n, 28, 28, 3) uint8, as integers."""
  return (images[:, 0, 0, 0] + 256 * images[:, 0, 0, 1].astype(int)).tolist()


def _draw_numbered(index):
  image = np.random.default_rng(index).integers(0, 128, (_NUMBERED_SIDE, _NUMBERED_SIDE, 3))
  image[2 + 2 * (index % 10)] += 100
  image[0, 0, :2] = index % 256, index // 256
  return image.astype(np.uint8)


def _draw(index, label):
  """A (16, 16, 3) uint8 image: a circle of label 0, a square of label 1."""
  rows, columns = np.mgrid[:_SIDE, :_SIDE] - _SIDE / 2 + 0.5
  distance = np.hypot(rows, columns) if label == 0 else np.maximum(abs(rows), abs(columns))
  shade = 100 + 37 * (int(index) % 5)
  return np.repeat(np.where(distance < 5, shade, 0).astype(np.uint8)[..., None], 3, axis=-1)
