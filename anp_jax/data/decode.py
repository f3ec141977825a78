"""Image files to cut, resized pixels: TensorFlow's decoders in a tf.data graph.

Decoding runs in tf.data's threads, outside of Python. An example that cannot be
decoded breaks a graph's whole batch; that batch is then made one example at a
time, and the graph starts again behind it.
"""

import atexit
from collections.abc import Iterator
import re
import threading

import numpy as np

from anp_jax.data import augment
from anp_jax.data import tensorflow_cpu


def batches(source, plan, registry, one_by_one, threads: int) -> Iterator:
  """Batches of a source of kind 'encoded'.

  Args:
    source: of image files.
    plan: `pipeline.Plan`.
    registry: `damage.Registry` of the source.
    one_by_one: (step, decode) -> batch, where decode(file, position) gives an
      image of (size, size, 3) uint8 or raises.
    threads: that decode.

  Yields:
    images (n, size, size, 3) uint8, labels (n,) int32, weights (n,) float32.
  """
  # Held, since a stream left open meets the end of Python, when modules go.
  broken = tensorflow_cpu.load().errors.OpError
  graph = _Graph(source, plan, registry, threads)
  step = plan.start
  while plan.steps is None or step < plan.steps:
    try:
      for batch in _until_exit(graph.iterator(step)):
        yield batch
        step += 1
    except broken:
      yield one_by_one(step, graph.decode)
      step += 1
    else:
      return


class _Graph:
  """The operations of one stream, traced once."""

  def __init__(self, source, plan, registry, threads):
    self._tf = tensorflow_cpu.load()
    self._source = source
    self._plan = plan
    self._registry = registry
    self._threads = threads
    self._side = plan.config.data.image_size
    self._exact = plan.config.data.decode == 'exact'

  def iterator(self, start):
    """A tf.data iterator over batches from step `start` on."""
    tf = self._tf
    # Plain graph code: nothing that AutoGraph would have to rewrite.
    plain = tf.autograph.experimental.do_not_convert
    stop = 2**62 if self._plan.steps is None else self._plan.steps
    data = tf.data.Dataset.range(start, stop)
    data = data.map(plain(self._load), num_parallel_calls=2, deterministic=True)
    data = data.unbatch()
    data = data.map(
      plain(self._row), num_parallel_calls=self._threads, deterministic=True
    )
    data = data.batch(len(self._plan.rows), drop_remainder=True).prefetch(2)
    options = tf.data.Options()
    options.threading.private_threadpool_size = self._threads
    return data.with_options(options).as_numpy_iterator()

  def decode(self, file: bytes, position: int) -> np.ndarray:
    """One example by itself, by the same operations; raises ValueError."""
    tf = self._tf
    try:
      size = _size(tf.constant(file)).numpy()
      views = self._views(np.array([position]), size[None])
      view = [tf.constant(part[0]) for part in views]
      return self._cut(tf.constant(file), *view).numpy()
    except tf.errors.OpError as e:
      # Without the names of TensorFlow's own operations.
      text = re.sub(r'\{\{.*?\}\} ?| ?\[Op:.*', '', e.message)
      raise ValueError(f'not a whole image: {text}') from None

  def _load(self, step):
    """Files, labels, weights, boxes and flips of a step."""
    tf, plan = self._tf, self._plan

    def read(step):
      positions, indices, weights = plan.indices(int(step))
      used = self._registry.stand_ins(indices)
      files, labels = self._source.read(used)
      weights = weights * (used == indices)
      return np.array(files, object), labels, weights, positions

    files, labels, weights, positions = tf.numpy_function(
      read, [step], [tf.string, tf.int32, tf.float32, tf.int64]
    )
    sizes = tf.map_fn(_size, files, fn_output_signature=tf.int32)
    boxes, halvings, flips = tf.numpy_function(
      self._views, [positions, sizes], [tf.int32, tf.int32, tf.bool]
    )
    count = len(plan.rows)
    for tensor, *shape in (
      (files,), (labels,), (weights,), (boxes, 4), (halvings,), (flips,),
    ):  # fmt: skip
      tensor.set_shape([count, *shape])
    return files, labels, weights, boxes, halvings, flips

  def _views(self, positions, sizes):
    """(n, 4) int32 boxes, (n,) int32 halvings and (n,) bool flips."""
    views = self._plan.views(positions, sizes)
    boxes = views.boxes.astype(np.int32)
    halvings = np.zeros(len(boxes), np.int32)
    if not self._exact:
      boxes, halvings = augment.reduced(boxes, self._side)
    return boxes, halvings, views.flips

  def _row(self, file, label, weight, *view):
    return self._cut(file, *view), label, weight

  def _cut(self, file, box, halvings, flip):
    """The box of a file as (size, size, 3) uint8."""
    tf, size = self._tf, (self._side, self._side)
    if self._exact:
      image = _decode_box(file, box)
      # The triangle filter as Pillow has it; twice the time of decoding.
      image = tf.image.resize(image, size, antialias=True)
    else:
      image = _decode_box(file, box, halvings)
      image = _resized(image, size)
    # Weights are positive and add up to 1: the result stays within 0..255.
    image = tf.cast(image + 0.5, tf.uint8)
    # A slice with a negative stride took longer than decoding.
    return tf.cond(flip, lambda: tf.reverse(image, [1]), lambda: image)


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


def _decode_box(file, box, halvings=None):
  """The box (top, left, height, width) of an image, (h, w, 3) uint8.

  A JPEG's box is decoded at 1 / 2 ** halvings of its scale, which the format
  offers almost for nothing; other formats' and None: as it is.
  """
  tf = tensorflow_cpu.load()

  def whole():
    top, left, height, width = tf.unstack(box)
    image = _decode_any(file)
    return image[top : top + height, left : left + width]

  def partial(times):
    # Decoding only the box saves the inverse transform of the rest. As Pillow
    # decodes, to the bit; the default is off by some grey levels.
    return lambda: tf.image.decode_and_crop_jpeg(
      file, box // 2**times if times else box, channels=3, ratio=2**times,
      dct_method='INTEGER_ACCURATE',
    )  # fmt: skip

  def jpeg():
    if halvings is None:
      return partial(0)()
    choices = range(augment.MAX_HALVINGS + 1)
    return tf.switch_case(halvings, [partial(times) for times in choices])

  image = tf.cond(_is_jpeg(file), jpeg, whole)
  image.set_shape([None, None, 3])
  return image


def _resized(image, size):
  """(h, w, 3) uint8 to size, float32: mean over areas where that is smaller."""
  tf = tensorflow_cpu.load()
  images = image[None]
  return tf.cond(
    tf.reduce_all(tf.shape(image)[:2] >= size),
    lambda: tf.raw_ops.ResizeArea(images=images, size=size),
    lambda: tf.raw_ops.ResizeBilinear(
      images=images, size=size, half_pixel_centers=True
    ),
  )[0]


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
