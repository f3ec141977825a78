"""All training examples on a device, and the batches that a program cuts out of them.

The host draws which examples a batch has, and how each is mirrored and moved, by the
functions of the ordinary input; the device gathers the pixels.
"""

from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
from ml_collections import ConfigDict
import numpy as np

from anp_jax import config as config_lib
from anp_jax.data import sources
from anp_jax.data.input import augment, batch_sampler, pipeline
from anp_jax.data.sources import balance

_READ = 256  # examples that are read at once


class Examples(NamedTuple):
  """The examples of a source, as evaluation sees them.

  Attributes:
    image: (n, side, side, 3) uint8; of vectors (n, 1, 1, width) float32.
    label: (n,) int32.
    weight: (n,) float32; 0 for a damaged example, whose pixels are another's.
  """

  image: Any
  label: Any
  weight: Any


class Draws(NamedTuple):
  """The random choices of batches; further axes may come first.

  Attributes:
    example: (batch,) int32, numbers of the examples.
    flip: (batch,) bool, whether each is mirrored left to right.
    corner: (batch, 2) int32, where each is cut out of its padded pixels.
    row: (batch,) int32, their rows of the batch.
    order: (n,) int32, what a simulation says of the update; n may be 0.
  """

  example: np.ndarray
  flip: np.ndarray
  corner: np.ndarray
  row: np.ndarray
  order: np.ndarray


def check(config: ConfigDict, kind: str) -> None:
  """Refuses examples that a program cannot cut out of what evaluation sees.

  Args:
    config: config of the run.
    kind: kind of its source.

  Raises:
    ConfigError: naming the key and what was expected.
  """
  text = 'in an ensemble (config.ensemble.seeds), whose examples lie on the device'
  if kind == 'synthetic':
    text = f'expected images or features {text}'
    raise config_lib.ConfigError(f"config.data.source='synthetic': {text}")
  if kind != 'vectors' and augment.cut(config) not in ('none', 'pad'):
    raise config_lib.ConfigError(
      f'config.data.augment={config.data.augment!r}: expected none, pad or strong_pad {text}'
    )


def load(config: ConfigDict, source: sources.Source) -> Examples:
  """Returns all examples of a source, on the host.

  Args:
    config: config of the run.
    source: training examples.
  """
  size = min(_READ, len(source))
  sampler = batch_sampler.BatchSampler(config, len(source), size, np.arange(size), training=False)
  arrays: dict[str, np.ndarray] = {}
  start = 0
  for batch in pipeline.labelled(source, sampler):
    for name in Examples._fields:
      values = batch[name][: len(source) - start]
      if name not in arrays:
        arrays[name] = np.empty((len(source), *values.shape[1:]), values.dtype)
      arrays[name][start : start + len(values)] = values
    start += size
  return Examples(**arrays)


class Drawing:
  """The choices of each step's batch of a run."""

  def __init__(self, config: ConfigDict, source: sources.Source, simulation: Any = None):
    """Draws nothing yet.

    Args:
      config: config of the run, with its batch size.
      source: training examples.
      simulation: what decides the order of batches, see `Strategy.simulation`.
    """
    self._config, self._simulation = config, simulation
    rows = np.arange(config.batch_size)
    order = balance.sampler(config, source)
    self._sampler = batch_sampler.BatchSampler(
      config,
      len(source),
      config.batch_size,
      rows,
      training=True,
      tickets=simulation and simulation.step_and_rows,
      is_known=True,
      order=order,
    )

  def steps(self, start: int, count: int) -> Draws:
    """The choices (count, batch, ...) of steps from `start` on."""
    config, side = self._config, self._config.data.image_size
    steps = range(start, start + count)
    indices = [self._sampler.indices(step) for step in steps]
    positions, index, _ = (np.concatenate(arrays) for arrays in zip(*indices, strict=True))
    rows = np.concatenate([self._sampler.step_and_rows(step)[1] for step in steps])
    draws = augment.train_draws(config, positions)
    flip = augment.train_views(config, draws, np.full((len(positions), 2), side)).flips
    corner = augment.corners_of(config, draws).astype(np.int32)
    chosen = index.astype(np.int32), flip, corner, rows.astype(np.int32)
    order = np.zeros((count, 0), np.int32)
    if self._simulation:
      order = np.stack([self._simulation.order(step) for step in steps])
    return Draws(*(x.reshape(count, -1, *x.shape[1:]) for x in chosen), order)  # type: ignore[call-arg]


def batch(config: ConfigDict, examples: Examples, draws: Draws) -> dict:
  """The batch of a step on the device, equal to that of the ordinary input.

  Args:
    config: config of the run.
    examples: examples on the device.
    draws: choices of the batch.

  Returns:
    Arrays by name as those of `feed.on_device`; the vote is to continue.
  """
  is_image = examples.image.dtype == jnp.uint8
  pad, side = augment.padding(config) * is_image, config.data.image_size
  image = examples.image[draws.example]
  if is_image and augment.cut(config) == 'pad':  # it mirrors small images, too
    image = jnp.where(draws.flip[:, None, None, None], image[:, :, ::-1], image)
  if pad:
    image = jnp.pad(image, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    image = jax.vmap(
      lambda x, corner: lax.dynamic_slice(x, (*corner, jnp.int32(0)), (side, side, 3))
    )(image, draws.corner)
  order = {'order': draws.order} if draws.order.size else {}
  return order | {
    'image': image,
    'label': examples.label[draws.example],
    'weight': examples.weight[draws.example],
    'row': draws.row,
    'vote': jnp.zeros_like(draws.row),
  }
