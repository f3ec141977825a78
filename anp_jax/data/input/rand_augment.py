"""RandAugment on the device: random operations of one strength on each image.

Cubuk et al. 2019 (arXiv 1909.13719), with the operations of timm's
'rand-mM-nN-mstd0.5-inc1', which trained DeiT and ConvNeXt. Each operation
grows stronger with its magnitude, which is normal around that of the config
with a deviation of 0.5; half of the operations are left out. What is rotated, sheared or
translated takes the nearest pixel, as in the paper's code and in torchvision.
"""

from collections.abc import Callable

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

_PROBABILITY = 0.5
_DEVIATION = 0.5
MAX_MAGNITUDE = 10
_MAX_ADDED = 110  # grey levels of solarize_add
_LEVELS = np.arange(256, dtype=np.int32)
_GREY = np.array([19595, 38470, 7471], np.int32)  # Pillow's, of 65,536
# Pillow's SMOOTH, from which `sharpness` leads away.
_SMOOTH = ((1, 1, 1), (1, 5, 1), (1, 1, 1))


def augmented(
  images: jax.Array, keys: jax.Array, operations: int, magnitude: float, fill: tuple
) -> jax.Array:
  """Images after their operations.

  Args:
    images: (n, height, width, 3) uint8.
    keys: (n,) random keys.
    operations: number of operations of an image, left out or not.
    magnitude: mean of the operations' magnitudes, 0 to 10.
    fill: RGB, 0..255, colour beyond the image.

  Returns:
    (n, height, width, 3) uint8.
  """

  def step(image, key):
    return apply(image, *drawn(key, magnitude), fill), None

  def one(image, key):
    return lax.scan(step, image, jax.random.split(key, operations))[0]

  # A loop makes for each image the operations that it has; an accelerator, which would
  # wait for each of them, makes all of them for all images and selects.
  return lax.platform_dependent(
    images, keys, cpu=lambda *arrays: lax.map(lambda x: one(*x), arrays), default=jax.vmap(one)
  )


def drawn(key: jax.Array, magnitude: float) -> tuple[jax.Array, jax.Array, jax.Array]:
  """A random operation.

  Args:
    key: random key.
    magnitude: mean of its magnitude.

  Returns:
    Its number in OPERATIONS, int32, their length where it is left out; its magnitude,
    0 to 10, and its direction, 1 or -1, float32.
  """
  keys = jax.random.split(key, 4)
  number = jax.random.randint(keys[0], (), 0, len(OPERATIONS), jnp.int32)
  applies = jax.random.bernoulli(keys[1], jnp.float32(_PROBABILITY))
  level = magnitude + _DEVIATION * jax.random.normal(keys[2], (), jnp.float32)
  direction = jnp.where(jax.random.bernoulli(keys[3], jnp.float32(0.5)), 1, -1)
  number = jnp.where(applies, number, len(OPERATIONS)).astype(jnp.int32)
  return number, jnp.clip(level, 0, MAX_MAGNITUDE), direction.astype(jnp.float32)


def apply(
  image: jax.Array, number: jax.Array, magnitude: jax.Array, direction: jax.Array, fill: tuple
) -> jax.Array:
  """An image after one operation.

  Args:
    image: (height, width, 3) uint8.
    number: int32, of OPERATIONS; their length: none.
    magnitude: float32, 0 to 10.
    direction: float32, 1 or -1; operations without a direction ignore it.
    fill: RGB, 0..255, colour beyond the image.

  Returns:
    (height, width, 3) uint8.
  """
  kind, index = jnp.asarray(_KINDS)[number]
  level = magnitude / MAX_MAGNITUDE
  branches = (
    lambda: _mapped(image, lax.switch(index, [*_TABLES.values()], image, level, direction)),
    lambda: _moved(image, lax.switch(index, _rows_of(image), direction * level), fill),
    lambda: _mixed(image, lax.switch(index, [*_PLAINEST.values()], image), level, direction),
    lambda: image,
  )
  return lax.switch(kind, branches)


def _table(function):
  """An operation's levels (256, 3) uint8 in place of 0..255; `function`'s are cut to these."""

  def table(image, level, direction):
    levels = jnp.clip(function(image, level, direction), 0, 255).astype(jnp.uint8)
    return jnp.broadcast_to(levels.reshape(256, -1), (256, 3))

  return table


def _mapped(image, table):
  return table.at[image, jnp.arange(3)].get(mode='promise_in_bounds')


def _auto_contrast(image, *_):
  low, high = (f(image, (0, 1)).astype(jnp.int32) for f in (jnp.min, jnp.max))
  stretched = (_LEVELS[:, None] - low) * 255 // jnp.maximum(high - low, 1)
  return jnp.where(high > low, stretched, _LEVELS[:, None])


def _equalize(image, *_):
  counts = jnp.zeros((256, 3), jnp.int32).at[image, jnp.arange(3)].add(1)
  largest = counts[image.max((0, 1)), jnp.arange(3)]
  step = (image.shape[0] * image.shape[1] - largest) // 255
  below = jnp.cumsum(counts, 0) - counts
  return jnp.where(step > 0, (step // 2 + below) // jnp.maximum(step, 1), _LEVELS[:, None])


def _posterize(_, level, __):
  # At magnitude 10 timm keeps no bit: black, or an error of newer Pillows.
  bits = jnp.maximum(1, 4 - (level * 4).astype(jnp.int32))
  return _LEVELS & -(1 << 8 - bits)


def _solarize(_, level, __):
  return jnp.where(_LEVELS < 256 - (level * 256).astype(jnp.int32), _LEVELS, 255 - _LEVELS)


def _solarize_add(_, level, __):
  return jnp.where(_LEVELS < 128, _LEVELS + (level * _MAX_ADDED).astype(jnp.int32), _LEVELS)


def _factor(level, direction):
  """How far an enhancement goes from its plainest image, 0, over the image itself, 1."""
  return jnp.maximum(jnp.float32(0.1), 1 + direction * level * jnp.float32(0.9))


def _contrast(image, level, direction):
  pixels = image.shape[0] * image.shape[1]
  mean = (2 * _grey(image).sum(dtype=jnp.int32) + pixels) // (2 * pixels)
  return mean + _factor(level, direction) * (_LEVELS - mean).astype(jnp.float32)


def _brightness(_, level, direction):
  return _factor(level, direction) * _LEVELS.astype(np.float32)


def _grey(image):
  """(height, width, 1) int32."""
  return (image.astype(jnp.int32) * _GREY).sum(-1, dtype=jnp.int32, keepdims=True) + 32768 >> 16


def _smooth(image):
  """(height, width, 3) int32; the pixels of the border stay as they are."""
  height, width = image.shape[:2]
  wide = image.astype(jnp.int32)
  total = sum(
    weight * wide[y : height - 2 + y, x : width - 2 + x]
    for y, row in enumerate(_SMOOTH)
    for x, weight in enumerate(row)
  )
  return wide.at[1:-1, 1:-1].set((2 * total + 13) // 26)


def _mixed(image, plainest, level, direction):
  """An image between its plainest form and itself, or beyond."""
  change = (image - plainest).astype(jnp.float32)
  return jnp.clip(plainest + _factor(level, direction) * change, 0, 255).astype(jnp.uint8)


def _moved(image, rows, fill):
  """An image whose pixel (x, y) is that at `rows` (2, 3) times (x, y, 1)."""
  height, width = image.shape[:2]
  y, x = np.mgrid[:height, :width].astype(np.float32) + np.float32(0.5)
  x, y = (jnp.floor(row[0] * x + row[1] * y + row[2]).astype(jnp.int32) for row in rows)
  is_inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
  pixels = image.at[y, x].get(mode='clip')
  return jnp.where(is_inside[..., None], pixels, np.array(fill, np.uint8))


def _rows_of(image):
  """Functions from a level with its direction to the `rows` of `_moved`."""
  height, width = image.shape[:2]

  def function(rows):
    return lambda level: jnp.array(rows(level, height, width), jnp.float32)

  return [*map(function, _ROWS.values())]


def _rotation(level, height, width):
  angle, y, x = level * np.float32(np.radians(30)), height / 2, width / 2
  cosine, sine = jnp.cos(angle), jnp.sin(angle)
  return (cosine, -sine, x - cosine * x + sine * y), (sine, cosine, y - sine * x - cosine * y)


# By name: (image, level 0..1, direction) -> table of levels.
_TABLES: dict[str, Callable] = {
  'auto_contrast': _table(_auto_contrast),
  'equalize': _table(_equalize),
  'invert': _table(lambda *_: 255 - jnp.asarray(_LEVELS)),
  'posterize': _table(_posterize),
  'solarize': _table(_solarize),
  'solarize_add': _table(_solarize_add),
  'contrast': _table(_contrast),
  'brightness': _table(_brightness),
}
_ROWS: dict[str, Callable] = {
  'rotate': _rotation,
  'shear_x': lambda x, height, width: ((1, x * 0.3, 0), (0, 1, 0)),
  'shear_y': lambda x, height, width: ((1, 0, 0), (x * 0.3, 1, 0)),
  'translate_x': lambda x, height, width: ((1, 0, x * 0.45 * width), (0, 1, 0)),
  'translate_y': lambda x, height, width: ((1, 0, 0), (0, 1, x * 0.45 * height)),
}
_PLAINEST: dict[str, Callable] = {
  'color': lambda image: jnp.tile(_grey(image), 3),
  'sharpness': _smooth,
}
_GROUPS = (_TABLES, _ROWS, _PLAINEST)
OPERATIONS = tuple(name for table in _GROUPS for name in table)
# (operations + 1, 2): the branch of `apply`, and the place in its table.
_KINDS = np.array([(kind, i) for kind, t in enumerate(_GROUPS) for i in range(len(t))] + [(3, 0)])
