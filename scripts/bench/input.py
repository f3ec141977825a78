"""Images a second of the training input, against its limit and its peers.

  python -m scripts.bench.input [--photographs=DIR] [--seconds=4] [--rounds=5]

DIR is a tree of class folders (default: the clothing photographs next to the
project, skipped where they are not there); the embedded set is measured too.
All contestants read the same images with as many threads or processes as there
are cores, in turn, each started afresh; a ratio is of one round, and the
table's its median. The others read files, ours the files of a tree or, of the
embedded set, records. Ours is timed up to the device's array.

  decode and crop           the limit: JPEG to the same crops, no resize
  and resize as fast        the same with ours' resize, to bytes
  and resize as exact       likewise
  tf.data                   as Flax's ImageNet example describes its own: random
                            crop decoded, bicubic, flip, float32 on the host
  torch                     DataLoader and Pillow, worker processes (if there)
"""

import argparse
import importlib.util
import itertools
import os
import statistics
import tempfile
import time

import jax
import numpy as np

from anp_jax import config as config_lib
from anp_jax.data import sources
from anp_jax.data.input import batch_plan, stream as stream_lib, tensorflow_cpu
from anp_jax.parallel import mesh as mesh_lib
from scripts.bench import _common

PHOTOGRAPHS = os.path.join(_common.ROOT, '..', 'shared', 'data', 'clothing', 'train')
BATCH = 64
KEYS = {
  'data.source': 'folder',
  'data.image_size': '224',
  'data.resize': '256',
  'data.crop_area': '(0.08, 1.0)',
}


def main():
  """Measures rates, then start-up and memory."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--photographs', default=PHOTOGRAPHS)
  parser.add_argument('--seconds', type=float, default=4.0)
  parser.add_argument('--rounds', type=int, default=5)
  parser.add_argument('--epochs', type=int, default=50)
  flags = parser.parse_args()
  rows = [('input', 'images/s', 'of the limit', 'ours over it', 'lowest')]
  ratios = {}
  settings = {'embedded': {}}
  if os.path.isdir(flags.photographs):
    settings['photographs'] = KEYS | {'data.path': flags.photographs}
  else:
    print(f'skipped: no photographs at {flags.photographs}')
  for name, overrides in settings.items():
    _rates(name, overrides, flags, rows, ratios)
  _start(settings[name], rows, ratios)
  _memory(settings[name], flags, rows, ratios)
  _common.show('training input', rows, ratios)


def load(overrides, **more):
  """A config with other values by dotted key, and by key of config.data."""
  more = {f'data.{key}': value for key, value in more.items()}
  return _common.load({'data.max_damaged': '0'} | overrides | more)


def _rates(name, overrides, flags, rows, ratios):
  config = load(overrides)
  source = sources.open_source(config, training=True)
  with tempfile.TemporaryDirectory() as folder:
    files = image_files(source, folder)
    rates = _measured(config, source, files, overrides, flags)
  for contestant, values in rates.items():
    of_limit = [a / b for a, b in zip(values, rates['decode and crop'])]
    over = {
      decode: [a / b for a, b in zip(rates[f'ours, {decode}'], values)]
      for decode in ('fast', 'exact')
    }
    key = contestant.replace(', ', '_').replace(' ', '_')
    if contestant.startswith('ours'):
      ratios[f'{name}_{key}_of_limit'] = statistics.median(of_limit)
      cells = ('', '')
    else:
      for decode, values_over in over.items():
        ratios[f'{name}_{decode}_over_{key}'] = statistics.median(values_over)
      cells = (
        ' / '.join(f'{statistics.median(v):.2f}' for v in over.values()),
        ' / '.join(f'{min(v):.2f}' for v in over.values()),
      )
    rows.append(
      (
        f'{name}: {contestant}',
        f'{statistics.median(values):.0f}',
        f'{statistics.median(of_limit):.3f}',
        *cells,
      )
    )


def _measured(config, source, files, overrides, flags):
  """Images a second of each contestant in each round."""
  crops = random_crops(config, source, files)
  contestants = {
    'decode and crop': lambda: bare_batches(config, crops, ''),
    'and resize as fast': lambda: bare_batches(config, crops, 'fast'),
    'and resize as exact': lambda: bare_batches(config, crops, 'exact'),
  }
  for decode in ('fast', 'exact'):
    ours = load(overrides, decode=decode)
    contestants[f'ours, {decode}'] = lambda ours=ours: _ours(ours, source)
  contestants['tf.data'] = lambda: _plain(config, files)
  if importlib.util.find_spec('torch'):
    from scripts.bench import _torch_input

    d = config.data
    contestants['torch'] = lambda: _torch_input.batches(
      files, d.image_size, d.crop_area, d.crop_ratio, BATCH, _cores()
    )
  else:
    print('skipped: no PyTorch here')
  rates = {contestant: [] for contestant in contestants}
  for _ in range(flags.rounds):
    for contestant, make in contestants.items():
      rates[contestant].append(measured_rate(make(), flags.seconds))
  return rates


def measured_rate(batches, seconds, size=BATCH):
  """Images a second of a stream that has run itself in."""
  for _ in range(4):
    next(batches)
  start, count = time.perf_counter(), 0
  while time.perf_counter() - start < seconds:
    next(batches)
    count += size
  rate = count / (time.perf_counter() - start)
  batches.close()
  return rate


def _ours(config, source):
  sharding = mesh_lib.batch_sharding(mesh_lib.create(config))
  feed = stream_lib.Stream(config, sharding).train(source, BATCH, 0)
  try:
    for batch in feed:
      yield jax.block_until_ready(batch)
  finally:
    feed.close()


def bare_batches(config, crops, resize):
  """Crops decoded in tf.data's threads."""
  tf = tensorflow_cpu.load()
  side = config.data.image_size
  size = (side, side)

  def decode(file, box):
    data = tf.io.read_file(file)
    image = tf.image.decode_and_crop_jpeg(data, box, channels=3, dct_method='INTEGER_ACCURATE')
    if not resize:
      return tf.size(image)
    if resize == 'exact':
      image = tf.image.resize(image, size, antialias=True)
    else:
      image = tf.cond(
        tf.reduce_all(box[2:] >= side),
        lambda: tf.raw_ops.ResizeArea(images=image[None], size=size),
        lambda: tf.raw_ops.ResizeBilinear(images=image[None], size=size, half_pixel_centers=True),
      )[0]
    return tf.cast(image + 0.5, tf.uint8)

  return _dataset(crops, decode)


def random_crops(config, source, files):
  """Paths and boxes of the first ten thousand rows of the stream."""
  tf = tensorflow_cpu.load()
  rows = np.arange(BATCH)
  plan = batch_plan.BatchPlan(config, len(source), BATCH, rows, True)
  paths, boxes, sizes = [], [], {}
  for step in range(10000 // BATCH):
    positions, indices, _ = plan.indices(step)
    for i in set(indices.tolist()) - sizes.keys():
      data = tf.io.read_file(files[i])
      sizes[i] = tf.image.extract_jpeg_shape(data)[:2].numpy()
    views = plan.views(positions, np.array([sizes[i] for i in indices]))
    paths += [files[i] for i in indices]
    boxes.append(views.boxes.astype(np.int32))
  return paths, np.concatenate(boxes)


def _plain(config, files):
  """A tf.data pipeline as it is usually written."""
  tf = tensorflow_cpu.load()
  d = config.data

  def decode(file):
    data = tf.io.read_file(file)
    shape = tf.image.extract_jpeg_shape(data)
    begin, size, _ = tf.image.sample_distorted_bounding_box(
      shape,
      tf.zeros((1, 0, 4)),
      min_object_covered=0.0,
      aspect_ratio_range=d.crop_ratio,
      area_range=d.crop_area,
      max_attempts=10,
      use_image_if_no_bounding_boxes=True,
    )
    image = tf.image.decode_and_crop_jpeg(data, tf.concat([begin[:2], size[:2]], 0), channels=3)
    side = (d.image_size, d.image_size)
    image = tf.image.resize(image, side, tf.image.ResizeMethod.BICUBIC)
    image = tf.image.random_flip_left_right(image)
    return (image - tf.constant(d.mean)) / tf.constant(d.std)

  return _dataset((files,), decode, shuffle=True)


def _dataset(parts, decode, shuffle=False):
  tf = tensorflow_cpu.load()
  data = tf.data.Dataset.from_tensor_slices(parts)
  if shuffle:
    data = data.shuffle(len(parts[0]))
  data = data.repeat().map(decode, num_parallel_calls=_cores())
  options = tf.data.Options()
  options.threading.private_threadpool_size = _cores()
  iterator = iter(data.batch(BATCH).prefetch(2).with_options(options))
  while True:
    yield next(iterator)


def image_files(source, folder):
  """Paths of a tree's images; those of another set are written to a folder."""
  if os.path.isfile(source.example_name(0)):
    return [source.example_name(i) for i in range(len(source))]
  paths = [os.path.join(folder, f'{i}.jpg') for i in range(len(source))]
  for i, path in enumerate(paths):
    (data,), _ = source.read(np.array([i]))
    with open(path, 'wb') as f:
      f.write(data)
  return paths


def _cores():
  return len(os.sched_getaffinity(0))


def _start(overrides, rows, ratios):
  """The first batch at step 0 and at step 1,000,000."""
  config = load(overrides)
  source = sources.open_source(config, training=True)
  sharding = mesh_lib.batch_sharding(mesh_lib.create(config))
  seconds = {0: [], 10**6: []}
  for _, step in itertools.product(range(5), seconds):
    begin = time.perf_counter()
    feed = stream_lib.Stream(config, sharding).train(source, BATCH, step)
    jax.block_until_ready(next(feed))
    seconds[step].append(time.perf_counter() - begin)
    feed.close()
  first, later = (statistics.median(s) for s in seconds.values())
  rows.append(
    ('first batch of step 1,000,000 over that of step 0', '', '', f'{later / first:.2f}', '')
  )
  ratios['start_at_1e6_over_0'] = later / first
  ratios['start_at_1e6_later_seconds'] = later - first


def _memory(overrides, flags, rows, ratios):
  """The process's memory over epochs of 512 images."""
  config = load(overrides)
  full_source = sources.open_source(config, training=True)
  config = config_lib.replaced(config, {'data.source': 'folder'})
  sharding = mesh_lib.batch_sharding(mesh_lib.create(config))
  feed = stream_lib.Stream(config, sharding).train(_Part(full_source), BATCH, 0)
  loaded_batches = []
  for _ in range(flags.epochs):
    for _ in range(len(_Part(full_source)) // BATCH):
      next(feed)
    loaded_batches.append(_resident())
  feed.close()
  settled = loaded_batches[flags.epochs // 10 :]
  rows.append(
    (
      f'memory over {flags.epochs} epochs, most over least',
      '',
      '',
      f'{max(settled) / min(settled):.3f}',
      '',
    )
  )
  ratios['memory_most_over_least'] = max(settled) / min(settled)
  ratios['memory_last_over_first'] = settled[-1] / settled[0]


class _Part:
  """The first examples of a source."""

  def __init__(self, source):
    self.kind, self.name = source.kind, source.name
    self.vocabulary, self.read = source.vocabulary, source.read
    self.example_name = source.example_name

  def __len__(self):
    return 512


def _resident():
  with open('/proc/self/statm') as f:
    return int(f.read().split()[1])


if __name__ == '__main__':
  main()
