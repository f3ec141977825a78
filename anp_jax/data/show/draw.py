"""Pictures of a data set: sheets of examples."""

import math

import numpy as np

from anp_jax.system import drawing

_RED = '#cc0000'

_SMALL, _ENLARGED = 96, 128  # pixels: sides below the first are drawn at least so large


def sheet(
  path: str, images: np.ndarray, names: list[str], replaced: np.ndarray, title: list[str]
) -> None:
  """Writes images in rows, each above the name of its class.

  Args:
    path: PNG file to write.
    images: (n, side, side, 3) uint8, shown pixel by pixel; small ones are
      enlarged a whole number of times.
    names: class names, n of them.
    replaced: (n,) bool, images to frame in red.
    title: lines above, the first one bold.
  """
  side = images.shape[1]
  lines: list[str | tuple[str, str]] = [*title]
  if side < _SMALL:
    times = -(-_ENLARGED // side)
    side *= times
    lines.append((f'drawn {times} times as large', drawing.SOFT))
  if replaced.any():
    text = f'red: {replaced.sum()} damaged; another is shown, with weight 0'
    lines.append((text, _RED))
  columns = math.ceil(math.sqrt(len(images)))
  line = drawing.ContactSheet.LINE
  contacts = drawing.ContactSheet(lines, len(images), columns, (side, side + line))
  for i, image in enumerate(images):
    left, upper = contacts.corner(i)
    color = _RED if replaced[i] else None
    contacts.picture((left, upper), image, side, color)
    contacts.text(
      (left + side // 2, upper + side + line // 2 + 2), names[i], side, color or drawing.INK, 'mm'
    )
  contacts.save(path)
