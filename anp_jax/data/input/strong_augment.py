"""RandAugment and random erasing in the training step, on the device.

They are a function of the seed, the step and the row of the global batch, as mixup is,
so that an image does not depend on how many devices there are.
"""

import jax
from jax import lax
import jax.numpy as jnp
import ml_collections
import numpy as np

from anp_jax.data.input import augment, rand_augment, random_erasing


def augmented(
  config: ml_collections.ConfigDict, images: jax.Array, key: jax.Array, rows: jax.Array
) -> jax.Array:
  """The images of a training batch after the strong part of config.data.augment.

  Args:
    config: the run's config.
    images: (n, side, side, 3) uint8; features, which are float, stay as they are.
    key: random key of the seed and the step.
    rows: (n,) int32, rows of the global batch.

  Returns:
    Like images.
  """
  if not augment.is_strong(config) or images.dtype != jnp.uint8:
    return images
  d, fill = config.data, augment.mean_colour(config)
  key = jax.random.split(key, 3)[2]  # a step splits it in two, for mixing and dropout
  pairs = jax.vmap(lambda row: jax.random.split(jax.random.fold_in(key, row)))(rows)
  if d.rand_augment_ops:
    images = rand_augment.augmented(
      images, pairs[:, 0], d.rand_augment_ops, d.rand_augment_magnitude, fill
    )
  if d.erase:
    boxes = random_erasing.boxes(pairs[:, 1], d.erase, d.image_size)
    images = random_erasing.erased(images, boxes, fill)
  return images


def of_steps(
  config: ml_collections.ConfigDict, images: np.ndarray, steps: np.ndarray, rows: np.ndarray
) -> np.ndarray:
  """The images of several training batches, as `augmented` makes them.

  Args:
    config: the run's config.
    images: (n, side, side, 3) uint8.
    steps: (n,) int, step of each.
    rows: (n,) int, its row of the step's global batch.
  """

  def one(example):
    image, step, row = example
    key = jax.random.fold_in(jax.random.key(config.seed), step)
    return augmented(config, image[None], key, row[None])[0]

  return np.asarray(jax.jit(lambda *arrays: lax.map(one, arrays))(images, steps, rows))
