"""Images a second of tar shards, against the same images prepared.

  python scripts/bench/tar_input.py [--files=60000] [--side=48] [--rounds=15]

Makes a set of small JPEG files as WebDataset has it, in tar shards of 4,000
samples, and prepares it by `python -m anp_jax.data.prepare`, in ArrayRecord.
Both are read in the order of training, which is random, in turn: by the whole
input pipeline up to the device's array, and as bytes by the source alone. A
ratio is of one round; the table shows medians, and the interval in which the
median is with 95 % (bootstrap over rounds). --folder=DIR keeps the set.
"""

import argparse
import contextlib
import io
import os
import tarfile
import tempfile
import time

import _common
import jax
import numpy as np
from PIL import Image

from anp_jax.config import command_line
from anp_jax.data import index_shuffle, sources
from anp_jax.data.input import stream as stream_lib
from anp_jax.data.prepare import __main__ as prepare
from anp_jax.parallel import mesh as mesh_lib

_BATCH = 64
_CLASSES = 20
_SHARD = 4000  # samples


def main():
  """Makes the set, then measures."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--files', type=int, default=60000)
  parser.add_argument('--side', type=int, default=48, help='pixels')
  parser.add_argument('--seconds', type=float, default=2.0)
  parser.add_argument('--rounds', type=int, default=15)
  parser.add_argument('--folder', default='', help='where the set is kept')
  flags = parser.parse_args()
  with contextlib.ExitStack() as stack:
    folder = flags.folder
    if not folder:
      folder = stack.enter_context(tempfile.TemporaryDirectory())
    configs = _make(os.path.abspath(folder), flags)
    _measure(configs, flags)


def _make(folder, flags):
  """The configs of both forms of the set, made unless they are there."""
  tars = os.path.join(folder, 'tar')
  if not os.path.isdir(tars):
    _write_shards(tars, flags)
  data = os.path.join(folder, 'data')
  pattern = f'tar:{tars}/{{split}}-*.tar'
  status = prepare.main(['prepare', f'--from={pattern}', '--name=bench', f'--data_dir={data}'])
  if status:
    raise SystemExit(status)
  common = {'data.dir': data, 'data.max_damaged': '0', 'data.image_size': '32', 'data.resize': '36'}
  return {
    name: command_line.load('configs/resnet_anp.py', common | {'data.source': source})
    for name, source in (('tar shards', pattern), ('prepared', 'tfds:anp_folder/bench'))
  }


def _write_shards(folder, flags):
  """Samples of noise that is smooth, as photographs are."""
  os.makedirs(folder)
  rng = np.random.default_rng(0)
  for split, count in (('train', flags.files), ('validation', _CLASSES)):
    for first in range(0, count, _SHARD):
      path = os.path.join(folder, f'{split}-{first // _SHARD:06}.tar')
      with tarfile.open(path, 'w') as tar:
        for i in range(first, min(first + _SHARD, count)):
          small = Image.fromarray(rng.integers(0, 256, (6, 6, 3), np.uint8))
          data = io.BytesIO()
          small.resize((flags.side, flags.side), Image.Resampling.BICUBIC).save(
            data, 'JPEG', quality=90
          )
          _add(tar, f'{split}{i:08}.jpg', data.getvalue())
          _add(tar, f'{split}{i:08}.cls', b'%d' % (i % _CLASSES))


def _add(tar, name, data):
  member = tarfile.TarInfo(name)
  member.size = len(data)
  tar.addfile(member, io.BytesIO(data))


def _measure(configs, flags):
  begin = time.perf_counter()
  opened = {name: sources.open_source(c, True) for name, c in configs.items()}
  index_seconds = time.perf_counter() - begin
  lengths = {name: len(source) for name, source in opened.items()}
  print(f'examples: {lengths}; opened in {index_seconds:.1f} s')
  measures = {
    'pipeline': lambda name: _pipeline(configs[name], opened[name], flags),
    'bytes': lambda name: _bytes(opened[name], flags),
  }
  rates = {(m, name): [] for m in measures for name in opened}
  for i in range(flags.rounds + 1):
    # The first of a round alternates, so that a drift favours neither.
    for name in sorted(opened, reverse=i % 2 == 1):
      for measure, rate in measures.items():
        value = rate(name)
        if i:  # the first round runs in
          rates[measure, name].append(value)
  rows = [('input', 'tar / prepared', '95 % interval', 'lowest')]
  ratios = {'files': flags.files}
  for measure in measures:
    values = np.divide(*(rates[measure, name] for name in configs))
    low, high = _interval(values)
    median = _common.median(values)
    rows.append((measure, f'{median:.3f}', f'{low:.3f} to {high:.3f}', f'{values.min():.3f}'))
    ratios |= {
      f'{measure}_tar_over_prepared': median,
      f'{measure}_low': low,
      f'{measure}_high': high,
    }
  _common.show('tar shards in random order', rows, ratios)


def _pipeline(config, source, flags):
  """Images a second of the input as a run has it."""
  sharding = mesh_lib.batch_sharding(mesh_lib.create(config))
  feed = stream_lib.Stream(config, sharding).train(source, _BATCH, 0)
  try:
    for _ in range(4):
      jax.block_until_ready(next(feed))
    begin, count = time.perf_counter(), 0
    while time.perf_counter() - begin < flags.seconds:
      jax.block_until_ready(next(feed))
      count += _BATCH
    return count / (time.perf_counter() - begin)
  finally:
    feed.close()


def _bytes(source, flags):
  """Images a second of the source alone, not decoded."""
  begin, position = time.perf_counter(), 0
  while time.perf_counter() - begin < flags.seconds / 2:
    positions = np.arange(position, position + _BATCH)
    source.read(index_shuffle.shuffled(positions, 0, len(source)))
    position += _BATCH
  return position / (time.perf_counter() - begin)


def _interval(values):
  """The 2.5 % and 97.5 % quantiles of the median of resampled rounds."""
  rng = np.random.default_rng(0)
  picks = rng.integers(0, len(values), (10000, len(values)))
  return np.quantile(np.median(values[picks], axis=1), (0.025, 0.975))


if __name__ == '__main__':
  main()
