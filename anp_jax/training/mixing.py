"""Normalisation, mixup and cutmix of images on the device."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


def normalise(images: jax.Array, mean: Sequence, std: Sequence, dtype: Any) -> jax.Array:
  """Images (batch, height, width, 3) with zero mean and unit spread.

  Args:
    images: (batch, height, width, 3), 0..255; vectors of features, which are float,
      stay as they are.
    mean: mean of each RGB channel, on the scale of the images.
    std: standard deviation of each RGB channel.
    dtype: dtype of the result; the arithmetic is float32 or wider.
  """
  if images.dtype == jnp.float32:
    return images.astype(dtype)
  wide = jnp.promote_types(dtype, jnp.float32)
  images = images.astype(wide)
  return ((images - jnp.array(mean, wide)) / jnp.array(std, wide)).astype(dtype)


def blend(
  images: jax.Array, targets: jax.Array, rows: jax.Array, key: Any, mixup: float, cutmix: float
) -> tuple[jax.Array, jax.Array]:
  """Mixup (arXiv 1710.09412) and cutmix (arXiv 1905.04899) of neighbours.

  Rows 2i and 2i + 1 of the global batch form a pair. The stream is shuffled, so
  neighbours are random partners; and a pair never spans two devices, so the
  result does not depend on how many there are.

  Args:
    images: (batch, height, width, 3) float; the batch holds whole pairs.
    targets: (batch, classes) float, probabilities.
    rows: (batch,) int32, rows of the global batch.
    key: random key of the step; folded with the pair's number.
    mixup: alpha of the Beta distribution; 0: no mixup.
    cutmix: alpha of the Beta distribution; 0: no cutmix. With both, a fair coin
      chooses for each pair.

  Returns:
    Images and targets, blended.
  """
  if not mixup and not cutmix:
    return images, targets
  keys = jax.vmap(lambda pair: jax.random.fold_in(key, pair))(rows[::2] // 2)
  height, width = images.shape[1:3]

  def masks(key):
    coin, mixed, cut, place = jax.random.split(key, 4)
    uniform = jnp.full((height, width), _beta(mixed, mixup))
    box = _box(place, _beta(cut, cutmix), height, width)
    use_cut = jnp.bool_(cutmix > 0)
    if mixup and cutmix:
      use_cut = jax.random.bernoulli(coin)
    return jnp.where(use_cut, box, uniform)

  # (batch, height, width): the share of each pixel that stays. Rounded first, so
  # that targets are divided as pixels are.
  mask = jnp.repeat(jax.vmap(masks)(keys), 2, axis=0).astype(images.dtype)
  share = mask.mean((1, 2), dtype=targets.dtype)[:, None]
  mask = mask[..., None]
  images = mask * images + (1 - mask) * _partner(images)
  return images, share * targets + (1 - share) * _partner(targets)


def _beta(key, alpha):
  return jax.random.beta(key, alpha, alpha) if alpha else jnp.float32(1)


def _box(key, share, height, width):
  """(height, width) float: 0 in a rectangle of about 1 - share of the area."""
  y, x = jax.random.uniform(key, (2,)) * jnp.array([height, width])
  half = jnp.sqrt(1 - share) * jnp.array([height, width]) / 2
  rows = jnp.abs(jnp.arange(height) + 0.5 - y) < half[0]
  columns = jnp.abs(jnp.arange(width) + 0.5 - x) < half[1]
  return 1.0 - (rows[:, None] & columns[None]).astype(jnp.float32)


def _partner(x):
  return x.reshape(-1, 2, *x.shape[1:])[:, ::-1].reshape(x.shape)
