"""Pictures and sources in memory, for the tests of data."""

import hashlib
import itertools

import numpy as np
from PIL import Image

from anp_jax.data import vocabulary
from anp_jax.data.input import batch_sampler, pipeline
from anp_jax.data.sources import source as source_lib

BATCH = 8


def picture(height, width, seed=0, detail=4, mode='RGB'):
  """A smooth random picture, as photographs are: a PIL image.

  Args:
    height: pixels.
    width: pixels.
    seed: seed of the picture.
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


def pixels_of_many_sizes():
  """21 pictures."""
  sizes = itertools.cycle([(40, 50), (64, 33), (36, 36), (90, 45)])
  return [pixels(*next(sizes), seed=i) for i in range(21)]


class Source(source_lib.Source):
  """Images in memory, bytes or arrays; the label is the index unless there are labels.

  Attributes:
    images: by index; reading an exception raises it.
    reads: the indices that have been read.
    named: the indices whose names have been asked for.
  """

  name = 'test'

  def __init__(self, images, labels=None, classes=('a', 'b')):
    self.kind = 'encoded' if any(isinstance(i, bytes) for i in images) else 'pixels'
    self.images = list(images)
    self.vocabulary = vocabulary.Vocabulary(tuple(classes))
    self._labels = np.array(range(len(self.images)) if labels is None else labels, np.int32)
    self.reads, self.named = [], []

  def __len__(self):
    return len(self.images)

  def read(self, indices):
    self.reads += np.asarray(indices).tolist()
    images = [self.images[i] for i in indices]
    for image in images:
      if isinstance(image, Exception):
        raise image
    return images, self._labels[indices]

  def labels(self):
    return self._labels

  def example_name(self, index):
    self.named.append(index)
    return f'example {index}'

  def identity(self):
    return hashlib.sha256(repr(self.images).encode()).hexdigest()


def stream(config, source, start=0, training=True, rows=None, **more):
  """Returns the batches of a process that has some rows of each; by default all.

  Args:
    config: the run's config.
    source: source of the examples.
    start: first step.
    training: whether the order is random.
    rows: rows of each batch.
    **more: `batch`, the size of one, and the `registry` of damaged examples.
  """
  batch, registry = more.pop('batch', BATCH), more.pop('registry', None)
  assert not more
  rows = np.arange(batch) if rows is None else rows
  sampler = batch_sampler.BatchSampler(config, len(source), batch, rows, training, start)
  return pipeline.batches(source, sampler, registry)


def batches(config, source, count, **process) -> list[dict[str, np.ndarray]]:
  """Returns the first batches of a `stream`."""
  return list(itertools.islice(stream(config, source, **process), count))


def evaluated(config, source) -> dict[str, np.ndarray]:
  """Returns the batch of all examples of a source, as evaluation has them."""
  (batch,) = stream(config, source, training=False, batch=len(source))
  return batch


def without_adobe(file: bytes) -> bytes:
  """Returns a JPEG without segment APP14: bytes EE, its length, its content."""
  start = file.index(b'\xff\xee')
  return file[:start] + file[start + 2 + int.from_bytes(file[start + 2 : start + 4], 'big') :]
