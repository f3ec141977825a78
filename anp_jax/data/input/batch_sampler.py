"""The examples that a process reads at each step, and their crops.

The batch of step s is a pure function of (config, s): nothing here remembers
what came before, so a stream starts at any step and the streams of several
processes are parts of the same batches.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import ml_collections
import numpy as np

from anp_jax.config import data_keys, errors
from anp_jax.data import index_shuffle
from anp_jax.data.input import augment
from anp_jax.data.sources import balance

# Positions that are shuffled at once: of 256, NumPy's calls take 1.7 ms of 2.6.
_BLOCK = 8192


@dataclasses.dataclass(frozen=True)
class BatchSampler:
  """The rows of each step's global batch that a process reads.

  Attributes:
    config: the run's config.
    size: number of examples in the split.
    batch_size: number of images in the global batch.
    rows: (n,) int64: this process's rows of the global batch, ascending.
    training: whether batches are shuffled, augmented and endless; else they
      hold each example once, in order.
    start: first step.
    tickets: function from a batch's place in this stream to (step, or the (n,) step
      of each row, and n rows of the global batches); None: the steps from `start` on,
      `rows` of each.
    is_known: whether `tickets` answers at once, also long before a batch is due.
    order: order of training; None: each example once per epoch.
  """

  config: ml_collections.ConfigDict
  size: int
  batch_size: int
  rows: np.ndarray
  training: bool
  start: int = 0
  tickets: Callable[[int], tuple[Any, np.ndarray]] | None = None
  is_known: bool = False
  order: balance.Sampler | None = None

  def __post_init__(self):
    version = self.config.data.stream
    good = not self.training or version == data_keys.STREAM
    errors.check(good, 'data.stream', version, f'{data_keys.STREAM}, which this code draws')

  @property
  def steps(self) -> int | None:
    """Batches until all is read once; None when training."""
    return None if self.training else -(-self.size // self.batch_size)

  def step_and_rows(self, batch_index: int) -> tuple[Any, np.ndarray]:
    """The step of a batch of this stream, and its rows of the global batch."""
    return self.tickets(batch_index) if self.tickets else (batch_index, self.rows)

  def indices(self, batch_index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The examples that a batch of this stream reads.

    Args:
      batch_index: place of the batch in the stream; without tickets, its step.

    Returns:
      positions in the stream, indices in the source, both (n,) int64, and
      weights (n,) float32: 0 for rows past the last evaluation example.
    """
    if self.training and (self.is_known or not self.tickets):
      number, place = divmod(batch_index, self._block_steps)
      positions, indices = self._block(number)
      return positions[place], indices[place], np.ones(len(self.rows), np.float32)
    step, rows = self.step_and_rows(batch_index)
    positions = step * self.batch_size + rows
    if self.training:
      return positions, self._shuffled(positions), np.ones(len(rows), np.float32)
    weights = (positions < self.size).astype(np.float32)
    return positions, np.minimum(positions, self.size - 1), weights

  @property
  def _block_steps(self):
    return max(1, _BLOCK // len(self.rows))

  @functools.cached_property
  def _block(self):
    """A function from a block's number to positions and examples, (steps, n) int64."""

    @functools.lru_cache(maxsize=2)
    def block(number):
      steps = number * self._block_steps + np.arange(self._block_steps)
      if self.tickets:
        pairs = map(self.tickets, steps.tolist())
        positions = np.stack([step * self.batch_size + rows for step, rows in pairs])
      else:
        positions = steps[:, None] * self.batch_size + self.rows
      return positions, self._shuffled(positions.reshape(-1)).reshape(positions.shape)

    return block

  def _shuffled(self, positions):
    """The examples at these positions of training."""
    if self.order:
      return self.order.indices(positions, self.config.seed)
    return index_shuffle.shuffled(positions, self.config.seed, self.size)

  def views(self, positions: np.ndarray, sizes: np.ndarray) -> augment.Views:
    """The crops and flips of the examples at these positions.

    Args:
      positions: (n,) int64, in the stream.
      sizes: (n, 2) height and width of the decoded images.
    """
    if not self.training:
      return augment.eval_views(self.config, sizes)
    draws = augment.train_draws(self.config, positions)
    return augment.train_views(self.config, draws, sizes)

  def moved(self, batch_index: int, images: np.ndarray) -> np.ndarray:
    """The images of a batch of this stream, moved if training asks for it.

    Args:
      batch_index: place of the batch in the stream.
      images: (n, size, size, 3) uint8, as `views` cuts them.
    """
    if not self.training:
      return images
    step, rows = self.step_and_rows(batch_index)
    draws = augment.train_draws(self.config, step * self.batch_size + rows)
    return augment.moved(self.config, draws, images)


@dataclasses.dataclass(frozen=True)
class OneBatch(BatchSampler):
  """The sampler of a single batch: nothing is read that is not shown.

  Without training, the rows of step 0 are the indices of its examples.
  """

  @property
  def steps(self) -> int:
    """The end of the stream."""
    return self.start + 1
