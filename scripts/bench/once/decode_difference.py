"""How much images differ that data.decode=fast, exact and Pillow cut from the same photographs.

  python -m scripts.bench.once.decode_difference --photographs=DIR

Edges of fast's boxes are whole pixels at 1/2, 1/4 or 1/8 of the scale. Pillow resizes with
antialiasing what is in the box that was drawn, or, for equal boxes, what is in fast's.
"""

import argparse
import io

import numpy as np
from PIL import Image, ImageOps

from anp_jax.data import sources
from anp_jax.data.input import batch_sampler, decode_opencv, pipeline
from scripts.bench import _common

_BATCHES, _BATCH = 16, 64
_PAIRS = {
  'fast against exact': ('fast', 'exact'),
  'fast against Pillow': ('fast', 'Pillow'),
  'exact against Pillow': ('exact', 'Pillow'),
  'fast against Pillow, equal boxes': ('fast', 'Pillow, equal boxes'),
}


def _opened(folder, side, decode):
  """A source, and the sampler of its batches."""
  keys = {'source': 'folder', 'path': folder, 'decode': decode, 'crop_area': '(0.08, 1.0)'}
  keys |= {'image_size': str(side), 'resize': str(side * 8 // 7), 'max_damaged': '0'}
  config = _common.load({f'data.{key}': value for key, value in keys.items()})
  source = sources.open_source(config, training=True)
  return source, batch_sampler.BatchSampler(config, len(source), _BATCH, np.arange(_BATCH), True)


def _images(source, sampler):
  """(n, side, side, 3) int32."""
  batches = pipeline.batches(source, sampler)
  return np.concatenate([next(batches)['image'] for _ in range(_BATCHES)]).astype(np.int32)


def _by_pillow(source, sampler, has_equal_boxes):
  """The same by Pillow, with boxes as they were drawn or as decode=fast has them."""
  side, result = sampler.config.data.image_size, []
  for count in range(_BATCHES):
    positions, indices, _ = sampler.indices(count)
    images = [Image.open(io.BytesIO(file)) for file in source.read(indices)[0]]
    views = sampler.views(positions, np.array([image.size[::-1] for image in images]))
    for image, box, flip in zip(images, views.boxes, views.flips):
      if has_equal_boxes:
        halvings, smaller = decode_opencv.reduced(box, side)
        box = np.array(smaller) << halvings
      top, left, height, width = map(int, box)
      part = image.convert('RGB').crop((left, top, left + width, top + height))
      part = part.resize((side, side), Image.Resampling.BILINEAR)
      result.append(np.asarray(ImageOps.mirror(part) if flip else part, np.int32))
  return np.stack(result)


def main():
  """Prints mean and root mean square of the differences, in grey levels."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--photographs', required=True, help='tree of class folders')
  folder = parser.parse_args().photographs
  rows, results = [('grey levels', 'mean', 'root mean square', '99 % within')], {}
  for side in (64, 224):
    opened = {decode: _opened(folder, side, decode) for decode in ('fast', 'exact')}
    images = {decode: _images(*pair) for decode, pair in opened.items()}
    images['Pillow'] = _by_pillow(*opened['fast'], False)
    images['Pillow, equal boxes'] = _by_pillow(*opened['fast'], True)
    for pair, (first, second) in _PAIRS.items():
      off = np.abs(images[first] - images[second])
      values = off.mean(), np.sqrt((off.astype(float) ** 2).mean()), np.percentile(off, 99)
      rows.append((f'{side} px, {pair}', *(f'{value:.2f}' for value in values)))
      results[f'{side}_px, {pair}'] = values[1]
  _common.show(f'{_BATCHES * _BATCH} crops', rows, results)


if __name__ == '__main__':
  main()
