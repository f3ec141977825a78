"""Random erasing on the device: a rectangle of each image is painted over.

Zhong et al. 2017 (arXiv 1708.04896), with the sizes that timm gives it and the
colour of the paper's RE-M: the mean, which is 0 once images are normalised.
"""

import jax
import jax.numpy as jnp
import numpy as np

from anp_jax.data.input import augment

_AREA = (0.02, 1 / 3)  # shares of the image
_RATIO = (0.3, 1 / 0.3)  # width over height


def boxes(keys: jax.Array, share: float, side: int) -> jax.Array:
  """Random rectangles of images.

  Args:
    keys: (n,) random keys.
    share: probability with which something is erased.
    side: pixels a side of an image.

  Returns:
    (n, 4) int32: top, left, height, width in pixels; height and width 0 where
    nothing is erased.
  """
  # Whether, area, aspect, top, left.
  draws = jax.vmap(lambda key: jax.random.uniform(key, (5,), jnp.float32))(keys)
  sides = augment.random_sides(draws[:, 1:3], _AREA, _RATIO, np.full((1, 2), side, np.float32))
  sides = jnp.clip(jnp.round(jnp.stack(sides, 1)), 1, side)
  corners = jnp.floor(draws[:, 3:5] * (side - sides + 1))
  return jnp.concatenate([corners, sides * (draws[:, :1] < share)], 1).astype(jnp.int32)


def erased(images: jax.Array, boxes: jax.Array, fill: tuple) -> jax.Array:
  """Images whose boxes are painted over.

  Args:
    images: (n, side, side, 3) uint8.
    boxes: (n, 4) int32, from `boxes`.
    fill: RGB, 0..255.
  """
  places = jnp.arange(images.shape[1])
  begins, ends = boxes[:, :2, None], (boxes[:, :2] + boxes[:, 2:])[..., None]
  rows, columns = jnp.moveaxis((places >= begins) & (places < ends), 1, 0)
  is_erased = rows[:, :, None] & columns[:, None]
  return jnp.where(is_erased[..., None], np.array(fill, np.uint8), images)
