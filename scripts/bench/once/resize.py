"""Processor time and errors of decoders and resizers of photographs, in one process.

  python -m scripts.bench.once.resize [--photographs=DIR] [--rounds=7]

Random crops of 8 to 100 % of each photograph become 224 x 224 pixels; an error is the
difference from Pillow's antialiased BILINEAR in grey levels. OpenCV, simplejpeg and
PyTorch take part where they are installed.
"""

import argparse
import functools
import glob
import importlib.util
import io
import os
import statistics
import time

import numpy as np
from PIL import Image

from anp_jax.data.input import augment, tensorflow_cpu
from scripts.bench import _common, input as input_bench

_SIDE = (224, 224)
_COUNT = 60


def main():
  """Prints milliseconds per image, and errors."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--photographs', default=input_bench.PHOTOGRAPHS)
  parser.add_argument('--rounds', type=int, default=7)
  flags = parser.parse_args()
  paths = sorted(glob.glob(os.path.join(flags.photographs, '*', '*.jpg')))
  files, crops, boxes = [], [], []
  for path in paths[:: max(1, len(paths) // _COUNT)]:
    with open(path, 'rb') as f:
      files.append(f.read())
    pixels = _pillow_decoded(files[-1])
    draws = np.random.default_rng(len(files)).random((1, 4))
    size = np.array([pixels.shape[:2]])
    sides = augment.random_sides(draws, (0.08, 1.0), (0.75, 4 / 3), size)
    sides = np.clip(np.round(sides), 1, size)
    top, left, height, width = np.concatenate([draws[:, 2:] * (size - sides), sides], 1)[0].astype(
      int
    )
    boxes.append((top, left, height, width))
    crops.append(np.ascontiguousarray(pixels[top : top + height, left : left + width]))
  rows, ratios = [('', 'ms', 'mean error', '99 % within', 'largest')], {}
  resizers = _resizers()
  for contestants, inputs in ((_decoders(), [*zip(files, boxes)]), (resizers, crops)):
    for name, seconds in _times(contestants, inputs, flags.rounds).items():
      cells = ('', '', '')
      if name in resizers:
        pairs = [(resizers[name](crop), resizers['Pillow'](crop)) for crop in crops]
        gaps = np.array([np.abs(np.asarray(a, float) - b) for a, b in pairs])
        cells = (f'{gaps.mean():.2f}', f'{np.percentile(gaps, 99):.0f}', f'{gaps.max():.0f}')
      rows.append((name, f'{seconds * 1e3:.3f}', *cells))
      ratios[name] = seconds * 1e3
  _common.show('decoders and resizers', rows, ratios)


def _times(contestants, inputs, rounds):
  """Median seconds of processor time per image of each, in turns."""
  seconds = {name: [] for name in contestants}
  for _ in range(rounds):
    for name, function in contestants.items():
      start = time.process_time()
      for item in inputs:
        function(item)
      seconds[name].append((time.process_time() - start) / len(inputs))
  return {name: statistics.median(values) for name, values in seconds.items()}


def _pillow_decoded(file):
  return np.asarray(Image.open(io.BytesIO(file)).convert('RGB'))


def _decoders():
  """Functions of (file, box) by name."""
  tf = _tensorflow()
  decode = functools.partial(
    tf.image.decode_and_crop_jpeg, channels=3, dct_method='INTEGER_ACCURATE'
  )
  result = {
    'TensorFlow, the crop alone': lambda item: decode(*item),
    'Pillow, the whole image': lambda item: _pillow_decoded(item[0]),
  }
  if importlib.util.find_spec('simplejpeg'):
    import simplejpeg

    memory = np.empty(2**25, np.uint8)
    result['simplejpeg, the whole image'] = lambda item: simplejpeg.decode_jpeg(
      item[0], buffer=memory
    )
  return result


def _resizers():
  """Functions of (height, width, 3) uint8 by name."""
  tf = _tensorflow()

  def fast(crop):
    is_area = min(crop.shape[:2]) >= _SIDE[0]
    resize = tf.raw_ops.ResizeArea if is_area else tf.raw_ops.ResizeBilinear
    options = {} if is_area else {'half_pixel_centers': True}
    return tf.cast(resize(images=crop[None], size=_SIDE, **options)[0] + 0.5, tf.uint8)

  def exact(crop):
    return tf.cast(tf.image.resize(crop, _SIDE, antialias=True) + 0.5, tf.uint8)

  def pillow(crop):
    return np.asarray(Image.fromarray(crop).resize(_SIDE, Image.Resampling.BILINEAR))

  result = {'fast': fast, 'exact': exact, 'Pillow': pillow}
  if importlib.util.find_spec('cv2'):
    import cv2

    cv2.setNumThreads(1)
    result['OpenCV, linear'] = lambda crop: cv2.resize(crop, _SIDE)
    result['OpenCV, area'] = lambda crop: cv2.resize(crop, _SIDE, interpolation=cv2.INTER_AREA)
  if importlib.util.find_spec('torch'):
    import torch

    torch.set_num_threads(1)

    def antialiased(crop):
      image = torch.from_numpy(crop).permute(2, 0, 1)[None]
      image = torch.nn.functional.interpolate(image, _SIDE, mode='bilinear', antialias=True)
      return image[0].permute(1, 2, 0).numpy()

    result['PyTorch, antialiased'] = antialiased
  return result


@functools.cache
def _tensorflow():
  tf = tensorflow_cpu.load()
  tf.config.threading.set_intra_op_parallelism_threads(1)
  return tf


if __name__ == '__main__':
  main()
