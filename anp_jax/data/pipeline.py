"""Host batches: the rows a process owns of the global batch of each step.

The batch of step s is a pure function of (config, s): nothing here remembers
what came before, so a stream starts at any step and the streams of several
processes are parts of the same batches.
"""

import atexit
from collections.abc import Iterator
from concurrent import futures
import dataclasses
import itertools
import os
import threading

import numpy as np

from anp_jax.data import augment
from anp_jax.data import order
from anp_jax.data import sources
from anp_jax.data import tensorflow_cpu


@dataclasses.dataclass(frozen=True)
class Plan:
  """Which examples a process reads at each step.

  Attributes:
    config: the run's config.
    size: examples of the split.
    batch_size: images of the global batch.
    rows: (n,) int64: this process's rows of the global batch, ascending.
    training: shuffled, augmented and endless; else in order, once.
    start: first step.
  """

  config: object
  size: int
  batch_size: int
  rows: np.ndarray
  training: bool
  start: int = 0

  @property
  def steps(self) -> int | None:
    """Batches until all is read once; None when training."""
    return None if self.training else -(-self.size // self.batch_size)

  def indices(self, step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What step `step` reads.

    Returns:
      positions in the stream, indices in the source, both (n,) int64, and
      weights (n,) float32: 0 for rows past the last evaluation example.
    """
    positions = step * self.batch_size + self.rows
    if self.training:
      indices = order.shuffled(positions, self.config.seed, self.size)
      return positions, indices, np.ones(len(indices), np.float32)
    weights = (positions < self.size).astype(np.float32)
    return positions, np.minimum(positions, self.size - 1), weights

  def views(self, positions: np.ndarray, sizes: np.ndarray) -> augment.Views:
    """How the examples at these positions are cut; sizes (n, 2)."""
    if not self.training:
      return augment.eval_views(self.config, sizes)
    draws = augment.train_draws(self.config, positions)
    return augment.train_views(self.config, draws, sizes)


def batches(source: sources.Source, plan: Plan) -> Iterator[dict]:
  """The batches of a process, from plan.start on.

  Args:
    source: 'encoded' or 'pixels'.
    plan: which examples, and whether they are augmented.

  Yields:
    image (n, size, size, 3) uint8, label (n,) int32, weight (n,) float32 and
    row (n,) int32, the row of the global batch.
  """
  make = _encoded if source.kind == 'encoded' else _pixels
  rows = plan.rows.astype(np.int32)
  for image, label, weight in make(source, plan):
    yield {'image': image, 'label': label, 'weight': weight, 'row': rows}


def _threads(config) -> int:
  return config.data.threads or len(os.sched_getaffinity(0))


def _pixels(source, plan):
  """Arrays cut and resized by Pillow; no TensorFlow."""
  steps = itertools.count(plan.start)
  if plan.steps is not None:
    steps = range(plan.start, plan.steps)
  with futures.ThreadPoolExecutor(_threads(plan.config)) as pool:
    for step in steps:
      positions, indices, weights = plan.indices(step)
      images, labels = source.read(indices)
      sizes = np.array([i.shape[:2] for i in images]).reshape(-1, 2)
      views = plan.views(positions, sizes)
      side = itertools.repeat(plan.config.data.image_size)
      cut = pool.map(_cut, images, views.boxes, views.flips, side)
      yield np.stack(list(cut)), labels, weights


def _cut(image, box, flip, side):
  """One view of (height, width, 3) uint8 as (side, side, 3) uint8."""
  from PIL import Image

  top, left, height, width = (int(v) for v in box)
  image = np.asarray(image)[top : top + height, left : left + width]
  if image.shape[:2] != (side, side):
    image = np.asarray(
      Image.fromarray(image).resize((side, side), Image.Resampling.BILINEAR)
    )
  return image[:, ::-1] if flip else image


def _encoded(source, plan):
  """Image files decoded by tf.data; TensorFlow is told of no accelerator."""
  tf = tensorflow_cpu.load()
  side = plan.config.data.image_size

  def read(step):
    positions, indices, weights = plan.indices(int(step))
    files, labels = source.read(indices)
    return np.array(files, object), labels, weights, positions

  def cut(positions, sizes):
    views = plan.views(positions, sizes)
    return views.boxes.astype(np.int32), views.flips

  def load(step):
    files, labels, weights, positions = tf.numpy_function(
      read, [step], [tf.string, tf.int32, tf.float32, tf.int64]
    )
    sizes = tf.map_fn(_size, files, fn_output_signature=tf.int32)
    boxes, flips = tf.numpy_function(
      cut, [positions, sizes], [tf.int32, tf.bool]
    )
    count = len(plan.rows)
    for tensor, *shape in (
      (files,), (labels,), (weights,), (boxes, 4), (flips,),
    ):  # fmt: skip
      tensor.set_shape([count, *shape])
    return files, labels, weights, boxes, flips

  def decode(file, label, weight, box, flip):
    image = _decode_box(file, box)
    # Bilinear weights are positive: the result stays within 0..255.
    image = tf.image.resize(image, (side, side), antialias=True) + 0.5
    # A slice with a negative stride took longer than decoding.
    image = tf.cond(flip, lambda: tf.reverse(image, [1]), lambda: image)
    return tf.cast(image, tf.uint8), label, weight

  threads = _threads(plan.config)
  stop = 2**62 if plan.steps is None else plan.steps
  # Plain graph code: nothing that AutoGraph would have to rewrite.
  plain = tf.autograph.experimental.do_not_convert
  data = tf.data.Dataset.range(plan.start, stop)
  data = data.map(plain(load), num_parallel_calls=2, deterministic=True)
  data = data.unbatch()
  data = data.map(plain(decode), num_parallel_calls=threads, deterministic=True)
  data = data.batch(len(plan.rows), drop_remainder=True).prefetch(2)
  options = tf.data.Options()
  options.threading.private_threadpool_size = threads
  data = data.with_options(options)
  return _until_exit(data.as_numpy_iterator())


def _until_exit(iterator):
  """The same items, from an iterator that is gone before Python ends.

  A tf.data iterator that still exists when the interpreter shuts down waits
  for its Python functions, which can no longer run: the process would hang.
  """
  held, lock = [iterator], threading.Lock()
  del iterator

  def drop():
    with lock:  # not while another thread is inside it
      held.clear()

  atexit.register(drop)
  try:
    while True:
      with lock:
        item = next(held[0], None) if held else None
      if item is None:
        return
      yield item
  except Exception as e:
    # The frames of its tracebacks hold the iterator too.
    e.__context__ = None
    raise e.with_traceback(None) from None
  finally:
    drop()
    atexit.unregister(drop)


def _is_jpeg(file):
  tf = tensorflow_cpu.load()
  return tf.strings.substr(file, 0, 3) == b'\xff\xd8\xff'


def _size(file):
  """(2,) int32 height and width; of a JPEG without decoding it."""
  tf = tensorflow_cpu.load()
  return tf.cond(
    _is_jpeg(file),
    lambda: tf.image.extract_jpeg_shape(file)[:2],
    lambda: tf.shape(_decode_any(file))[:2],
  )


def _decode_any(file):
  tf = tensorflow_cpu.load()
  return tf.image.decode_image(file, channels=3, expand_animations=False)


def _decode_box(file, box):
  """The box (top, left, height, width) of an image, (h, w, 3) uint8."""
  tf = tensorflow_cpu.load()

  def whole():
    top, left, height, width = tf.unstack(box)
    image = _decode_any(file)
    return image[top : top + height, left : left + width]

  # Decoding only the box saves the inverse transform of the rest.
  image = tf.cond(
    _is_jpeg(file),
    # As Pillow decodes, to the bit; the default is off by some grey levels.
    lambda: tf.image.decode_and_crop_jpeg(
      file, box, channels=3, dct_method='INTEGER_ACCURATE'
    ),
    whole,
  )
  image.set_shape([None, None, 3])
  return image
