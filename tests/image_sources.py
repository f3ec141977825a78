"""Pictures and sources in memory, for the tests of data."""

import hashlib

import numpy as np
from PIL import Image

from anp_jax.data import vocabulary
from anp_jax.data.input import batch_plan, pipeline


def picture(height, width, seed=0, detail=4, mode='RGB'):
  """A smooth random picture, as photographs are: a PIL image.

  Args:
    height: pixels.
    width: pixels.
    seed: of the picture.
    detail: random pixels, a side or (rows, columns), which are scaled up.
    mode: Pillow's.
  """
  shape = (detail, detail) if isinstance(detail, int) else detail
  rng = np.random.default_rng(seed)
  small = Image.fromarray(rng.integers(0, 256, (*shape, 3), np.uint8))
  return small.resize((width, height), Image.Resampling.BICUBIC).convert(mode)


def pixels(height, width, seed=0, detail=4):
  """The same as (height, width, 3) uint8."""
  return np.asarray(picture(height, width, seed, detail))


class Source:
  """Images in memory, bytes or arrays; the label is the index.

  Attributes:
    images: by index; reading an exception raises it.
    reads: the indices that have been read.
  """

  name = 'test'
  vocabulary = vocabulary.Vocabulary(('a', 'b'))

  def __init__(self, images):
    self.kind = 'encoded' if any(isinstance(i, bytes) for i in images) else 'pixels'
    self.images = list(images)
    self.reads = []

  def __len__(self):
    return len(self.images)

  def read(self, indices):
    self.reads += np.asarray(indices).tolist()
    images = [self.images[i] for i in indices]
    for image in images:
      if isinstance(image, Exception):
        raise image
    return images, np.asarray(indices, np.int32)

  def labels(self):
    return np.arange(len(self), dtype=np.int32)

  def example_name(self, index):
    return f'example {index}'

  def identity(self):
    return hashlib.sha256(repr(self.images).encode()).hexdigest()


def evaluated(config, source) -> dict[str, np.ndarray]:
  """Returns the batch of all examples of a source, as evaluation has them."""
  count = len(source)
  plan = batch_plan.BatchPlan(config, count, count, np.arange(count), False)
  (batch,) = pipeline.batches(source, plan)
  return batch


def without_adobe(file: bytes) -> bytes:
  """Returns a JPEG without segment APP14: bytes EE, its length, its content."""
  start = file.index(b'\xff\xee')
  return file[:start] + file[start + 2 + int.from_bytes(file[start + 2 : start + 4], 'big') :]
