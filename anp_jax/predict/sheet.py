"""A sheet of named images: what each shows, and how sure the network is."""

import math
import os
from typing import NamedTuple

import numpy as np
from PIL import Image
from PIL import ImageDraw

from anp_jax.data.show import draw
from anp_jax.data.show import stats
from anp_jax.system import drawing

MOST = 100  # images of a sheet; one of more would not open in every viewer
_SIDE = 144  # of a thumbnail, pixels
_CELL = 2 * _SIDE + 8
_MARGIN, _GAP, _LINE = 16, 14, 17
_NUMBER = 42  # pixels that a percentage takes
_LINES = 8  # beside a thumbnail
# Okabe and Ito's colours, light enough to be written on.
_BLUE, _ORANGE, _GREEN = '#9fd0ee', '#f3c591', '#9fdcc4'
_INK, _GREY = '#222222', '#666666'


class Bar(NamedTuple):
  """A name and its probability; kind: 'anp', 'adjective' or 'noun'."""

  name: str
  probability: float
  kind: str


_COLORS = {'anp': _BLUE, 'adjective': _ORANGE, 'noun': _GREEN}


def bars(rows: list[dict]) -> list[Bar]:
  """What a sheet shows of a file, of its rows as from `rows.Rows`."""
  explained = 'best_adjective' in rows[0]
  count = 2 if explained else _LINES
  name = 'anp' if 'anp' in rows[0] else 'class'
  found = [Bar(r[name], r['probability'], 'anp') for r in rows[:count]]
  if explained:
    for part in ('adjective', 'noun'):
      found += [
        Bar(r[f'best_{part}'], r[f'best_{part}_probability'], part)
        for r in rows[:3]
        if r[f'best_{part}'] is not None
      ]
  return found


def write(
  path: str,
  images: list[np.ndarray],
  files: list[str],
  shown: list[list[Bar]],
  title: list[str],
) -> None:
  """Writes images, each with its bars beside it and its file's name below.

  Args:
    path: of the PNG.
    images: (side, side, 3) uint8, as the network sees them.
    files: their paths.
    shown: the bars of each.
    title: lines above, the first one bold.
  """
  columns = min(max(math.ceil(math.sqrt(len(images) / 1.6)), 2), 8)
  width = columns * (_CELL + _GAP) - _GAP
  top = _MARGIN + _LINE * len(title) + _GAP
  pitch = _SIDE + _LINE + _GAP
  height = top + -(-len(images) // columns) * pitch - _GAP + _MARGIN
  canvas = Image.new('RGB', (width + 2 * _MARGIN, height), 'white')
  pen = ImageDraw.Draw(canvas)
  bold, plain = (
    drawing.typeface('DejaVuSans-Bold', 14),
    drawing.typeface('DejaVuSans', 11),
  )
  for i, line in enumerate(title):
    font = plain if i else bold
    line = draw.fitted(stats.printable(line), width, font.getlength)
    pen.text((_MARGIN, _MARGIN + _LINE * i), line, _INK, font)
  for i, (image, file) in enumerate(zip(images, files)):
    left = _MARGIN + i % columns * (_CELL + _GAP)
    upper = top + i // columns * pitch
    enlarged = len(image) < _SIDE
    how = Image.Resampling.NEAREST if enlarged else Image.Resampling.BOX
    thumbnail = Image.fromarray(image).resize((_SIDE, _SIDE), how)
    canvas.paste(thumbnail, (left, upper))
    name = stats.printable(os.path.basename(file))
    name = draw.fitted(name, _CELL, plain.getlength)
    pen.text((left, upper + _SIDE + 2), name, _GREY, plain)
    for j, bar in enumerate(shown[i]):
      _bar(pen, plain, left + _SIDE + 8, upper + j * (_SIDE // _LINES), bar)
  canvas.save(path, 'PNG')


def _bar(pen, font, left, upper, bar):
  """One bar, with its name on it and the percentage at its right."""
  room = _CELL - _SIDE - 8 - _NUMBER
  length = round(room * bar.probability)
  color = _COLORS[bar.kind]
  pen.rectangle((left, upper, left + room - 1, upper + 14), '#f2f2f2')
  if length:
    pen.rectangle((left, upper, left + length - 1, upper + 14), color)
  name = draw.fitted(stats.printable(bar.name), room - 6, font.getlength)
  pen.text((left + 3, upper + 7), name, _INK, font, anchor='lm')
  pen.text(
    (left + room + _NUMBER - 1, upper + 7), f'{100 * bar.probability:.0f} %',
    _INK, font, anchor='rm',
  )  # fmt: skip
