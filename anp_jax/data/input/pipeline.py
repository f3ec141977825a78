"""Host batches: the rows a process owns of the global batch of each step.

The batch of step s is a pure function of (config, s): nothing here remembers
what came before, so a stream starts at any step and the streams of several
processes are parts of the same batches.
"""

from collections.abc import Callable
from collections.abc import Iterator
from concurrent import futures
import dataclasses
import itertools
import time

import numpy as np

from anp_jax.data import index_shuffle
from anp_jax.data import sources
from anp_jax.data.input import augment
from anp_jax.data.input import corruption
from anp_jax.data.input import decode as decode_lib
from anp_jax.data.input import decode_pillow
from anp_jax.data.sources import balance
from anp_jax.system import cores

# Seconds that a batch waits for a disk or a network with a fault, and between
# two attempts. Rows wait together: an outage must not stall a run for hours.
_PATIENCE, _PAUSE = 3.0, 0.2


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
    tickets: count of a batch in this stream -> (step, rows of its global
      batch); None: the steps from `start` on, `rows` of each.
    sampler: of the order of training; None: each example once an epoch.
  """

  config: object
  size: int
  batch_size: int
  rows: np.ndarray
  training: bool
  start: int = 0
  tickets: Callable[[int], tuple[int, np.ndarray]] | None = None
  sampler: balance.Sampler | None = None

  @property
  def steps(self) -> int | None:
    """Batches until all is read once; None when training."""
    return None if self.training else -(-self.size // self.batch_size)

  def where(self, count: int) -> tuple[int, np.ndarray]:
    """The step of a batch of this stream, and its rows of the global batch."""
    return self.tickets(count) if self.tickets else (count, self.rows)

  def indices(self, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What a batch of this stream reads; the step's number is its count.

    Returns:
      positions in the stream, indices in the source, both (n,) int64, and
      weights (n,) float32: 0 for rows past the last evaluation example.
    """
    step, rows = self.where(count)
    positions = step * self.batch_size + rows
    if self.training:
      if self.sampler:
        indices = self.sampler.indices(positions, self.config.seed)
      else:
        indices = index_shuffle.shuffled(positions, self.config.seed, self.size)
      return positions, indices, np.ones(len(indices), np.float32)
    weights = (positions < self.size).astype(np.float32)
    return positions, np.minimum(positions, self.size - 1), weights

  def views(self, positions: np.ndarray, sizes: np.ndarray) -> augment.Views:
    """How the examples at these positions are cut; sizes (n, 2)."""
    if not self.training:
      return augment.eval_views(self.config, sizes)
    draws = augment.train_draws(self.config, positions)
    return augment.train_views(self.config, draws, sizes)


def batches(
  source: sources.Source,
  plan: Plan,
  registry: corruption.Registry | None = None,
) -> Iterator[dict]:
  """The batches of a process, from plan.start on.

  Args:
    source: 'encoded' or 'pixels'.
    plan: which examples, and whether they are augmented.
    registry: of the source's damaged examples, for more than one stream of it.

  Yields:
    image (n, size, size, 3) uint8, label (n,) int32, weight (n,) float32 and
    row (n,) int32, the row of the global batch. A damaged example's row shows
    another example, with weight 0.
  """
  registry = registry or corruption.Registry(source)
  threads = plan.config.data.threads or cores.count()
  with futures.ThreadPoolExecutor(threads) as pool:

    def one_by_one(step, decode):
      return _one_by_one(source, plan, registry, pool, step, decode)

    resampled = plan.config.data.decode in augment.RESAMPLED
    if source.kind == 'encoded' and not resampled:
      made = decode_lib.batches(source, plan, registry, one_by_one, threads)
    else:
      made = _pixels(source.kind, plan, one_by_one)
    for count, (image, label, weight) in enumerate(made, plan.start):
      rows = plan.where(count)[1].astype(np.int32)
      yield {'image': image, 'label': label, 'weight': weight, 'row': rows}


def _pixels(kind, plan, one_by_one):
  """Arrays, or files, cut and resized by Pillow; no TensorFlow."""
  steps = itertools.count(plan.start)
  if plan.steps is not None:
    steps = range(plan.start, plan.steps)
  d = plan.config.data

  def decode(image, position):
    if kind == 'encoded':
      image = decode_pillow.whole(image, d.max_megapixels)
    views = plan.views(np.array([position]), np.array([image.shape[:2]]))
    return decode_pillow.cut(
      image, views.boxes[0], views.flips[0], d.image_size, d.decode
    )

  for step in steps:
    yield one_by_one(step, decode)


def _one_by_one(source, plan, registry, pool, step, decode):
  """The batch of a step, in which one bad example harms no other."""
  side = plan.config.data.image_size
  deadline = []

  def read(index):
    while True:
      try:
        (image,), (label,) = source.read(np.array([index]))
        return image, label
      except Exception as e:
        if not corruption.is_transient(e):
          raise
        deadline.append(time.monotonic() + _PATIENCE)
        if time.monotonic() > deadline[0]:  # the first that any row has set
          raise
        time.sleep(_PAUSE)

  def one(position, index, weight):
    for candidate in registry.candidates(index):
      try:
        image, label = read(candidate)
        image = decode(image, position)
      except Exception as e:  # whatever a reader or a decoder raises
        if corruption.is_transient(e):
          registry.log_transient(candidate, e)
          break
        registry.mark_damaged(candidate, e)
      else:
        return image, label, weight if candidate == index else 0.0
    return np.zeros((side, side, 3), np.uint8), 0, 0.0

  images, labels, weights = zip(*pool.map(one, *plan.indices(step)))
  return (
    np.stack(images),
    np.array(labels, np.int32),
    np.array(weights, np.float32),
  )
