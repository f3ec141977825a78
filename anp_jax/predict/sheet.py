"""A sheet of named images: what each shows, and how sure the network is."""

from collections.abc import Sequence
import math
import os
from typing import NamedTuple

import numpy as np

from anp_jax.system import drawing

MOST = 100  # images of a sheet; a larger one would not open in every viewer
_SIDE = 144  # of a thumbnail, pixels
_CELL = 2 * _SIDE + 8
_NUMBER = 42  # pixels that a percentage takes
_LINES = 8  # bars next to a thumbnail


class Bar(NamedTuple):
  """A name and its probability; kind: 'anp', 'adjective' or 'noun'."""

  name: str
  probability: float
  kind: str


_LEGEND = {'anp': 'blue the pair', 'adjective': 'orange the adjective', 'noun': 'green the noun'}
# Okabe and Ito's colours, light enough to be written on.
_COLORS = {'anp': '#9fd0ee', 'adjective': '#f3c591', 'noun': '#9fdcc4'}


def bars(rows: list[dict]) -> list[Bar]:
  """Returns the bars of a file, from its rows of `predict_rows.Rows`."""
  explained = 'best_adjective' in rows[0]
  count = 2 if explained else _LINES
  name = 'anp' if 'anp' in rows[0] else 'class'
  result = [Bar(r[name], r['probability'], 'anp') for r in rows[:count]]
  if explained:
    for part in ('adjective', 'noun'):
      result += [
        Bar(r[f'best_{part}'], r[f'best_{part}_probability'], part)
        for r in rows[:3]
        if r[f'best_{part}'] is not None
      ]
  return result


def legend(bars_of_files: Sequence[list[Bar]]) -> str:
  """Returns the line that explains the bars of a sheet, from those of each image."""
  kinds = {bar.kind for bars_of_file in bars_of_files for bar in bars_of_file}
  text = 'below each image its file; bars: probabilities of the classes'
  if kinds <= {'anp'}:
    return text
  names = [name for kind, name in _LEGEND.items() if kind in kinds]
  return f'{text} and their parts: {", ".join(names)}'


def write(
  path: str,
  images: Sequence[np.ndarray],
  files: Sequence[str],
  bars_of_files: Sequence[list[Bar]],
  title: list[str],
) -> None:
  """Writes images, each with its bars to the right and its file's name below.

  Args:
    path: PNG file to write.
    images: (side, side, 3) uint8, as the network sees them.
    files: their paths.
    bars_of_files: bars of each image.
    title: lines above, the first one bold.
  """
  columns = min(max(math.ceil(math.sqrt(len(images) / 1.6)), 2), 8)
  size = _CELL, _SIDE + drawing.ContactSheet.LINE
  contacts = drawing.ContactSheet([*title, legend(bars_of_files)], len(images), columns, size)
  for i, (image, file, bars_of_file) in enumerate(zip(images, files, bars_of_files)):
    left, upper = contacts.corner(i)
    contacts.picture((left, upper), image, _SIDE)
    below = left, upper + _SIDE + 2
    contacts.text(below, os.path.basename(file), _CELL, drawing.SOFT)
    for j, bar in enumerate(bars_of_file):
      _draw_bar(contacts, (left + _SIDE + 8, upper + j * (_SIDE // _LINES)), bar)
  contacts.save(path)


def _draw_bar(contacts, place, bar):
  """Draws a bar with its name on it and the percentage to its right."""
  left, upper = place
  room = _CELL - _SIDE - 8 - _NUMBER
  length = round(room * bar.probability)
  pen, middle = contacts.pen, upper + 7
  pen.rectangle((left, upper, left + room - 1, upper + 14), '#f2f2f2')
  if length:
    box = left, upper, left + length - 1, upper + 14
    pen.rectangle(box, _COLORS[bar.kind])
  contacts.text((left + 3, middle), bar.name, room - 6, anchor='lm')
  contacts.text(
    (left + room + _NUMBER - 1, middle), f'{100 * bar.probability:.0f} %', _NUMBER, anchor='rm'
  )
