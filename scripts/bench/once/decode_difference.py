"""How much images differ that data.decode=fast and exact cut from the same photographs.

  python -m scripts.bench.once.decode_difference --photographs=DIR

Edges of fast's boxes are whole pixels at 1/2, 1/4 or 1/8 of the scale, so boxes differ, too.
"""

import argparse

import numpy as np

from anp_jax.data import sources
from anp_jax.data.input import batch_sampler, pipeline
from scripts.bench import _common

_BATCHES, _BATCH = 16, 64


def _images(folder, side, decode):
  """(n, side, side, 3) int32."""
  keys = {'source': 'folder', 'path': folder, 'decode': decode, 'crop_area': '(0.08, 1.0)'}
  keys |= {'image_size': str(side), 'resize': str(side * 8 // 7), 'max_damaged': '0'}
  config = _common.load({f'data.{key}': value for key, value in keys.items()})
  source = sources.open_source(config, training=True)
  sampler = batch_sampler.BatchSampler(config, len(source), _BATCH, np.arange(_BATCH), True)
  batches = pipeline.batches(source, sampler)
  return np.concatenate([next(batches)['image'] for _ in range(_BATCHES)]).astype(np.int32)


def main():
  """Prints mean and root mean square of the differences, in grey levels."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--photographs', required=True, help='tree of class folders')
  folder = parser.parse_args().photographs
  rows, results = [('fast against exact', 'mean', 'root mean square', '99 % within')], {}
  for side in (64, 224):
    off = np.abs(_images(folder, side, 'fast') - _images(folder, side, 'exact'))
    values = off.mean(), np.sqrt((off.astype(float) ** 2).mean()), np.percentile(off, 99)
    rows.append((f'{side} px', *(f'{value:.2f}' for value in values)))
    results[f'{side}_px'] = values[1]
  _common.show(f'{_BATCHES * _BATCH} crops', rows, results)


if __name__ == '__main__':
  main()
