"""Antialiased crops by TensorFlow in a tf.data graph: config.data.decode='exact'.

Decoding runs in tf.data's threads, outside of Python. An example that cannot be
decoded breaks a graph's whole batch; that batch is then made one example at a
time, and the graph starts again behind it.
"""

import atexit
from collections.abc import Iterator
import re
import threading
import weakref

import numpy as np

from anp_jax.data.image_files import image_format
from anp_jax.data.input import batch_reader, decode_pillow, tensorflow_cpu

_MOST_READERS = 8  # each holds the files of a batch
_VIEW = 8  # numbers that say how an example is cut


def batches(reader: batch_reader.BatchReader) -> Iterator[batch_reader.Batch]:
  """The decoded batches of a source of kind 'encoded'.

  Args:
    reader: rows of image files.

  Yields:
    images (n, size, size, 3) uint8, labels (n,) int32, weights (n,) float32.
  """
  # A local name: a stream left open meets the end of Python, when modules go.
  broken = tensorflow_cpu.load().errors.OpError
  graph = _Graph(reader)
  steps = reader.sampler.steps
  step = reader.sampler.start
  while steps is None or step < steps:
    try:
      for images in _until_exit(graph.iterator(step)):
        yield images, *graph.labels_and_weights(step)
        step += 1
    except broken:
      yield reader.decode_rows(step, graph.decode)
      step += 1
    else:
      return


class _Graph:
  """The operations of one stream."""

  def __init__(self, reader):
    self._tf = tensorflow_cpu.load()
    self._reader = reader
    self._labels_by_step = {}  # and weights, of batches under way in the graph
    d = reader.sampler.config.data
    self._side = d.image_size
    self._max_megapixels = d.max_megapixels

  def iterator(self, start):
    """A tf.data iterator over the images of batches from step `start` on."""
    tf, sampler = self._tf, self._reader.sampler
    self._labels_by_step.clear()
    # Plain graph code: nothing that AutoGraph would have to rewrite.
    plain = tf.autograph.experimental.do_not_convert
    stop = 2**62 if sampler.steps is None else sampler.steps
    data = tf.data.Dataset.range(start, stop)
    threads = self._reader.threads
    # Reading waits for a disk or a network rather than for a core.
    readers = min(max(threads, 2), _MOST_READERS)
    data = data.map(plain(self._load), num_parallel_calls=readers, deterministic=True)
    data = data.unbatch()
    data = data.map(plain(self._cut), num_parallel_calls=threads, deterministic=True)
    data = data.batch(len(sampler.rows), drop_remainder=True).prefetch(2)
    options = tf.data.Options()
    options.threading.private_threadpool_size = threads
    return data.with_options(options).as_numpy_iterator()

  def labels_and_weights(self, step):
    """Labels and weights of a batch that came out of the iterator."""
    return self._labels_by_step.pop(step)

  def decode(self, file: bytes, position: int) -> np.ndarray:
    """Decodes one example by the same operations; raises ValueError."""
    tf = self._tf
    file = decode_pillow.for_tensorflow(file, self._max_megapixels)
    (view,) = self._views(np.array([position]), [file])
    try:
      return self._cut(tf.constant(file), tf.constant(view)).numpy()
    except tf.errors.ResourceExhaustedError as e:  # no fault of the file's
      raise MemoryError(e.message) from None
    except tf.errors.OpError as e:
      # Without the names of TensorFlow's operations.
      text = re.sub(r'\{\{.*?\}\} ?| ?\[Op:.*', '', e.message)
      raise ValueError(f'not a whole image: {text}') from None

  def _load(self, step):
    """Files and views of a step; labels and weights stay out of the graph."""
    tf, count = self._tf, len(self._reader.sampler.rows)

    # TensorFlow keeps a function for ever; the source behind it, with all that may
    # be cached there, must go.
    graph = weakref.ref(self)
    files, views = tf.numpy_function(
      lambda step: graph()._read(int(step)), [step], [tf.string, tf.int32]
    )
    files.set_shape([count])
    views.set_shape([count, _VIEW])
    return files, views

  def _read(self, step):
    positions, images, labels, weights = self._reader.read(step)
    self._labels_by_step[step] = labels, weights
    files = [decode_pillow.for_tensorflow(file, self._max_megapixels) for file in images]
    return np.array(files, object), self._views(positions, files)

  def _views(self, positions, files):
    """(n, 8) int32: box, columns around, whether it is a JPEG, flip."""
    sizes = np.array([image_format.size(file) for file in files])
    for height, width in sizes.tolist():
      image_format.check_pixels(height, width, self._max_megapixels)
    views = self._reader.sampler.views(positions, sizes)
    boxes = views.boxes.astype(np.int32)
    jpeg = np.array([image_format.is_jpeg(file) for file in files])
    # Halved colour at a box's edge lies between its own and the next beyond it.
    around = jpeg * np.array([boxes[:, 1] > 0, boxes[:, 1::2].sum(1) < sizes[:, 1]])
    columns = (boxes.T, around, jpeg[None], views.flips[None])
    return np.concatenate(columns).T.astype(np.int32)

  def _cut(self, file, view):
    """The box of a file as (size, size, 3) uint8."""
    tf, side = self._tf, self._side
    jpeg, flip = tf.unstack(view[6:])
    image = _decode_box(file, view[:4], view[4:6], jpeg)
    # The triangle filter as Pillow has it; twice the time of decoding.
    image = tf.image.resize(image, (side, side), antialias=True)
    # Weights are positive and add up to 1: the result stays within 0..255.
    image = tf.cast(image + 0.5, tf.uint8)
    # A slice with a negative stride took longer than decoding.
    return tf.cond(flip > 0, lambda: tf.reverse(image, [1]), lambda: image)


def _decode_box(file, box, around, jpeg):
  """The box (top, left, height, width) of an image, (h, w, 3) uint8.

  A JPEG is decoded there alone, with `around` columns more at its left and right, which
  are cut off.
  """
  tf = tensorflow_cpu.load()
  top, left, height, width = tf.unstack(box)

  def any_format():
    image = tf.image.decode_image(file, channels=3, expand_animations=False)
    return image[top : top + height, left : left + width]

  def jpeg_box():
    before, after = tf.unstack(around)
    wider = [top, left - before, height, before + width + after]
    # Decoding only the box saves the inverse transform of the rest. As Pillow
    # decodes, to the bit; the default is off by some grey levels.
    image = tf.image.decode_and_crop_jpeg(file, wider, channels=3, dct_method='INTEGER_ACCURATE')
    return image[:, before : before + width]

  image = tf.cond(jpeg > 0, jpeg_box, any_format)
  image.set_shape([None, None, 3])
  return image


def _until_exit(iterator):
  """Yields the same items, from an iterator that is gone before Python ends.

  A tf.data iterator that still exists when the interpreter shuts down waits
  for its Python functions, which can no longer run: the process would hang.
  """
  holder, lock = [iterator], threading.Lock()
  del iterator

  def drop():
    with lock:  # not while another thread is inside it
      holder.clear()

  atexit.register(drop)
  try:
    while True:
      with lock:
        item = next(holder[0], None) if holder else None
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
