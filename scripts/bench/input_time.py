"""Processor time per image of the training input, with one decoding thread.

  python -m scripts.bench.input_time [--photographs=DIR] [--seconds=1] [--rounds=5]

In turns within one process, so that other programs on the machine count less: the
photographs as they are, ones like ImageNet's (500 x 375, quality 96) and those
reduced by `prepare --shorter_side=256`, each over `decode and crop` of the same
turn (see `input.py`). decode=linear takes part where OpenCV is installed. Last,
batches of 256 whose images are neither decoded nor copied, in images a second.
"""

import argparse
from concurrent import futures
import glob
import importlib.util
import io
import os
import statistics
import tempfile

import numpy as np
from PIL import Image, ImageOps

from anp_jax.data import sources
from anp_jax.data.input import batch_plan, batch_reader, corruption, decode_linear, pipeline
from anp_jax.data.prepare import examine
from anp_jax.tools import input_cost
from scripts.bench import _common, input as input_bench


def main():
  """Prints milliseconds per image, and shares of the limit."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--photographs', default=input_bench.PHOTOGRAPHS)
  parser.add_argument('--seconds', type=float, default=1.0)
  parser.add_argument('--rounds', type=int, default=5)
  flags = parser.parse_args()
  rows, ratios = [('input', 'ms', 'images/s a core', 'of the limit')], {}
  with tempfile.TemporaryDirectory() as folder:
    for name, tree in _trees(flags.photographs, folder).items():
      contestants = _contestants(name, tree, folder)
      seconds = {contestant: [] for contestant in contestants}
      for _ in range(flags.rounds):
        for contestant, batches in contestants.items():
          batch_seconds = input_cost.processor_time(
            lambda stream=batches: next(stream), flags.seconds
          )
          seconds[contestant].append(batch_seconds / input_bench.BATCH)
      for contestant, values in seconds.items():
        of_limit = statistics.median(a / b for a, b in zip(seconds['decode and crop'], values))
        key = f'{name}: {contestant}'
        ratios[key.replace(': ', '_').replace(' ', '_')] = of_limit
        median = statistics.median(values)
        rows.append((key, f'{median * 1e3:.3f}', f'{1 / median:.0f}', f'{of_limit:.2f}'))
  config = input_bench.load(input_bench.KEYS | {'data.path': flags.photographs})
  plan = batch_plan.BatchPlan(config, 10**6, 256, np.arange(256), True)
  with open(glob.glob(os.path.join(flags.photographs, '*', '*.jpg'))[0], 'rb') as f:
    blank = _Blank(f.read())
  prepare = {'an array': lambda _: np.broadcast_to(np.uint8(0), (256, 341, 3))}
  if importlib.util.find_spec('cv2'):
    prepare['a file'] = lambda file: decode_linear.opened(file, 100)
  for name, function in prepare.items():
    with futures.ThreadPoolExecutor(1) as pool:
      reader = batch_reader.BatchReader(blank, plan, corruption.Registry(blank), pool)
      rate = input_bench.measured_rate(
        reader.batches(function, lambda *_: None), flags.seconds, 256
      )
    rows.append((f'assembly, {name} not decoded', '', f'{rate:.0f} a process', ''))
  _common.show('training input, processor time', rows, ratios)


def _trees(photographs, folder):
  """Trees of the photographs, of ones like ImageNet's and of those reduced, by name."""
  trees = {name: os.path.join(folder, name) for name in ('like ImageNet', 'reduced')}
  for path in sorted(glob.glob(os.path.join(photographs, '*', '*.jpg')))[::4]:
    place = os.path.relpath(path, photographs)
    file = io.BytesIO()
    with Image.open(path) as image:
      ImageOps.fit(image.convert('RGB'), (500, 375)).save(file, 'JPEG', quality=96)
    reduced = examine.convert(file.getvalue(), shorter=256)
    for tree, data in zip(trees.values(), (file.getvalue(), reduced)):
      os.makedirs(os.path.dirname(os.path.join(tree, place)), exist_ok=True)
      with open(os.path.join(tree, place), 'wb') as f:
        f.write(data)
  return {'photographs': photographs, **trees}


def _contestants(name, tree, folder):
  """Endless batches by contestant."""
  place = {'data.path': tree, 'data.dir': os.path.join(folder, 'sets'), 'data.train_split': '.'}
  overrides = input_bench.KEYS | place | {'data.threads': '1'}
  settings = {decode: {'decode': decode} for decode in ('fast', 'exact')}
  if importlib.util.find_spec('cv2'):
    settings['linear'] = {'decode': 'linear'}
    if name == 'photographs':
      settings['linear, mapped'] = {'decode': 'linear', 'cache': 'mapped'}
      settings['linear, strong_crop'] = {'decode': 'linear', 'augment': 'strong_crop'}
  config = input_bench.load(overrides)
  source = sources.open_source(config, training=True)
  crops = input_bench.random_crops(config, source, input_bench.image_files(source, folder))
  result = {'decode and crop': input_bench.bare_batches(config, crops, '')}
  for contestant, keys in settings.items():
    config = input_bench.load(overrides, **keys)
    source = sources.open_source(config, training=True)
    plan = batch_plan.BatchPlan(
      config, len(source), input_bench.BATCH, np.arange(input_bench.BATCH), True
    )
    result[contestant] = pipeline.batches(source, plan)
  return result


class _Blank:
  """A file again and again."""

  def __init__(self, file):
    self._file = file

  def read(self, indices):
    return [self._file] * len(indices), np.zeros(len(indices))


if __name__ == '__main__':
  main()
