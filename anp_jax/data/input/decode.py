"""Image files to cut, resized pixels: TensorFlow's decoders in a tf.data graph.

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
from anp_jax.data.input import augment
from anp_jax.data.input import tensorflow_cpu

_MOST_READERS = 8  # each holds the files of a batch
_JPEG = b'\xff\xd8\xff'
_VIEW = 9  # numbers that say how an example is cut


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
      for images in _until_exit(graph.iterator(step)):
        yield images, *graph.beside(step)
        step += 1
    except broken:
      yield one_by_one(step, graph.decode)
      step += 1
    else:
      return


class _Graph:
  """The operations of one stream."""

  def __init__(self, source, plan, registry, threads):
    self._tf = tensorflow_cpu.load()
    self._source = source
    self._plan = plan
    self._registry = registry
    self._threads = threads
    self._side = plan.config.data.image_size
    self._beside = {}  # labels and weights by step
    self._exact = plan.config.data.decode == 'exact'
    self._max_megapixels = plan.config.data.max_megapixels

  def iterator(self, start):
    """A tf.data iterator over the images of batches from step `start` on."""
    tf = self._tf
    self._beside.clear()
    # Plain graph code: nothing that AutoGraph would have to rewrite.
    plain = tf.autograph.experimental.do_not_convert
    stop = 2**62 if self._plan.steps is None else self._plan.steps
    data = tf.data.Dataset.range(start, stop)
    # Reading waits for a disk or a network rather than for a core.
    readers = min(max(self._threads, 2), _MOST_READERS)
    data = data.map(
      plain(self._load), num_parallel_calls=readers, deterministic=True
    )
    data = data.unbatch()
    data = data.map(
      plain(self._cut), num_parallel_calls=self._threads, deterministic=True
    )
    data = data.batch(len(self._plan.rows), drop_remainder=True).prefetch(2)
    options = tf.data.Options()
    options.threading.private_threadpool_size = self._threads
    return data.with_options(options).as_numpy_iterator()

  def beside(self, step):
    """Labels and weights of a batch that the iterator has given."""
    return self._beside.pop(step)

  def decode(self, file: bytes, position: int) -> np.ndarray:
    """One example by itself, by the same operations; raises ValueError."""
    tf = self._tf
    (view,) = self._views(np.array([position]), [file])
    try:
      return self._cut(tf.constant(file), tf.constant(view)).numpy()
    except tf.errors.OpError as e:
      # Without the names of TensorFlow's own operations.
      text = re.sub(r'\{\{.*?\}\} ?| ?\[Op:.*', '', e.message)
      raise ValueError(f'not a whole image: {text}') from None

  def _load(self, step):
    """Files and views of a step; what else there is waits beside the graph."""
    tf, plan = self._tf, self._plan

    # TensorFlow keeps a function that it was given for good; not so the source
    # behind it, and all that may be cached there.
    me = weakref.ref(self)
    files, views = tf.numpy_function(
      lambda step: me()._read(int(step)), [step], [tf.string, tf.int32]
    )
    files.set_shape([len(plan.rows)])
    views.set_shape([len(plan.rows), _VIEW])
    return files, views

  def _read(self, step):
    positions, indices, weights = self._plan.indices(step)
    used = self._registry.replacements(indices)
    files, labels = self._source.read(used)
    self._beside[step] = labels, weights * (used == indices)
    return np.array(files, object), self._views(positions, files)

  def _views(self, positions, files):
    """(n, 9) int32: box, columns around, decoder, whether to shrink, flip."""
    sizes = np.array([image_format.size(file) for file in files])
    for height, width in sizes.tolist():
      image_format.check_pixels(height, width, self._max_megapixels)
    views = self._plan.views(positions, sizes)
    boxes = views.boxes.astype(np.int32)
    halvings = np.zeros(len(boxes), np.int32)
    if not self._exact:
      boxes, halvings = augment.reduced(boxes, self._side)
    jpeg = np.array([file.startswith(_JPEG) for file in files])
    decoders = np.where(jpeg, 1 + halvings, 0)
    shrink = (boxes[:, 2:] >= self._side).all(1)
    # Halved colour at a box's edge lies between its own and the next beyond it.
    left, end = boxes[:, 1] >> halvings, boxes[:, 1::2].sum(1) >> halvings
    whole = -(-sizes[:, 1] >> halvings)
    around = jpeg * np.array([left > 0, end < whole])
    columns = (boxes.T, around, decoders[None], shrink[None], views.flips[None])
    return np.concatenate(columns).T.astype(np.int32)

  def _cut(self, file, view):
    """The box of a file as (size, size, 3) uint8."""
    tf, side = self._tf, self._side
    box, around = view[:4], view[4:6]
    decoder, shrink, flip = tf.unstack(view[6:])
    image = _decode_box(file, box, around, decoder)
    if self._exact:
      # The triangle filter as Pillow has it; twice the time of decoding.
      image = tf.image.resize(image, (side, side), antialias=True)
    else:
      image = _resized(image, side, shrink)
    # Weights are positive and add up to 1: the result stays within 0..255.
    image = tf.cast(image + 0.5, tf.uint8)
    # A slice with a negative stride took longer than decoding.
    return tf.cond(flip > 0, lambda: tf.reverse(image, [1]), lambda: image)


def _decode_box(file, box, around, decoder):
  """The box (top, left, height, width) of an image, (h, w, 3) uint8.

  Decoder k above 0 takes a JPEG at 1 / 2 ** (k - 1) of its scale, which the
  format offers almost for nothing, with `around` columns more at its left and
  right, which are cut off; 0 takes any format.
  """
  tf = tensorflow_cpu.load()

  def whole():
    top, left, height, width = tf.unstack(box)
    image = tf.image.decode_image(file, channels=3, expand_animations=False)
    return image[top : top + height, left : left + width]

  def jpeg(halvings):
    def decode():
      top, left, height, width = tf.unstack(box // 2**halvings)
      before, after = tf.unstack(around)
      wider = [top, left - before, height, before + width + after]
      # Decoding only the box saves the inverse transform of the rest. As Pillow
      # decodes, to the bit; the default is off by some grey levels.
      image = tf.image.decode_and_crop_jpeg(
        file, wider, channels=3, ratio=2**halvings,
        dct_method='INTEGER_ACCURATE',
      )  # fmt: skip
      return image[:, before : before + width]

    return decode

  scales = [jpeg(halvings) for halvings in range(augment.MAX_HALVINGS + 1)]
  image = tf.switch_case(decoder, [whole, *scales])
  image.set_shape([None, None, 3])
  return image


def _resized(image, side, shrink):
  """(h, w, 3) uint8 to (side, side, 3) float32; to shrink: mean over areas."""
  tf = tensorflow_cpu.load()
  images, size = image[None], (side, side)
  return tf.cond(
    shrink > 0,
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
