"""Processor time per image of the training input, against its limit and its peers.

  python -m scripts.bench.input [--photographs=DIR] [--seconds=1] [--rounds=5]

DIR is a tree of class folders (default: the clothing photographs next to the project;
without them only the embedded set is measured). All read the same images to 224 px with one
thread, in turns within one process, so that other programs on the machine count less: the
photographs as they are, ones like ImageNet's (500 x 375, quality 96), and those reduced by
`prepare --shorter_side=256`.

  decode and crop   the limit: JPEG to crops of the same sizes, without a resize
  fast, exact, ...  config.data.decode and, of the photographs, other keys
  no pixels, ...    what `fast` takes with a part of its work: with nothing decoded; whole
                    images decoded; these at 1/2, 1/4 or 1/8; these resized, not mirrored
  tf.data           as Flax's ImageNet example describes its own: random crop decoded,
                    bicubic, flip, float32 on the host
  torch             PyTorch's DataLoader with Pillow, or with simplejpeg and OpenCV

Last, batches of 256 whose images are neither decoded nor resized, in images a second: as
they are assembled, and as a feed puts them on eight CPU devices.
"""

import argparse
from concurrent import futures
import contextlib
import glob
import io
import itertools
import os
import pathlib
import statistics
import tempfile
import time

import jax
import numpy as np
from PIL import Image, ImageOps

from anp_jax.data import sources
from anp_jax.data.input import (
  batch_reader,
  batch_sampler,
  corruption,
  decode_opencv,
  feed,
  pipeline,
  tensorflow_cpu,
)
from anp_jax.data.prepare import examine
from anp_jax.tools import input_cost
from scripts.bench import _common

_PHOTOGRAPHS = os.path.join(_common.ROOT, '..', 'shared', 'data', 'clothing', 'train')
_BATCH = 64
_KEYS = {
  'data.image_size': '224',
  'data.resize': '256',
  'data.crop_area': '(0.08, 1.0)',
  'data.max_damaged': '0',
  'data.threads': '1',
}
_LIMIT = 'decode and crop'
_DEVICES = 8


def main():
  """Prints milliseconds per image, and shares of the limit."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--photographs', default=_PHOTOGRAPHS)
  parser.add_argument('--seconds', type=float, default=1.0)
  parser.add_argument('--rounds', type=int, default=5)
  flags = parser.parse_args()
  jax.config.update('jax_num_cpu_devices', _DEVICES)
  rows, ratios = [('input', 'ms', 'images/s a core', 'of the limit', 'fast over it')], {}
  with tempfile.TemporaryDirectory() as folder:
    for name, keys in _sets(flags.photographs, folder).items():
      contestants = _contestants(name, keys, os.path.join(folder, 'files'))
      _time(name, contestants, flags, rows, ratios)
  rows += _assembly(flags.seconds)
  _common.show('training input, processor time', rows, ratios)


def _sets(photographs, folder):
  """Keys by name: the embedded set, photographs, ones like ImageNet's, and those reduced."""
  embedded = {'embedded set': {'data.dir': os.path.join(folder, 'sets')}}
  if not os.path.isdir(photographs):
    print(f'skipped: no photographs at {photographs}')
    return embedded
  trees = {name: os.path.join(folder, name) for name in ('like ImageNet', 'reduced')}
  for path in sorted(glob.glob(os.path.join(photographs, '*', '*.jpg')))[::4]:
    file = io.BytesIO()
    with Image.open(path) as image:
      ImageOps.fit(image.convert('RGB'), (500, 375)).save(file, 'JPEG', quality=96)
    reduced = examine.convert(file.getvalue(), shorter=256)
    for tree, data in zip(trees.values(), (file.getvalue(), reduced)):
      target = pathlib.Path(tree, os.path.relpath(path, photographs))
      target.parent.mkdir(parents=True, exist_ok=True)
      target.write_bytes(data)
  place = embedded['embedded set'] | {'data.source': 'folder', 'data.train_split': '.'}
  trees = {'photographs': photographs, **trees}
  return embedded | {name: place | {'data.path': tree} for name, tree in trees.items()}


def _contestants(name, keys, folder):
  """Endless batches by contestant."""
  settings = {'fast': {}, 'exact': {'decode': 'exact'}}
  if name == 'photographs':
    settings['fast, mapped'] = {'cache': 'mapped'}
  if 'data.path' in keys:
    settings['fast, strong_crop'] = {'augment': 'strong_crop'}
  ours = {}
  for contestant, more in settings.items():
    config = _common.load(_KEYS | keys | {f'data.{key}': value for key, value in more.items()})
    source = sources.open_source(config, training=True)
    ours[contestant] = pipeline.batches(source, _sampler(config, len(source), _BATCH))
  config = _common.load(_KEYS | keys)
  source = sources.open_source(config, training=True)
  if 'data.path' in keys:
    ours |= _stages(config, source)
  files = _files(source, os.path.join(folder, name))
  peers = {'tf.data': _plain(config, files)}
  try:
    from scripts.bench import _torch_input
  except ImportError as e:
    print(f'skipped: torch: {e}')
  else:
    d = config.data
    for label, decode in _torch_input.DECODERS.items():
      peers[label] = _torch_input.batches(
        files, d.image_size, d.crop_area, d.crop_ratio, _BATCH, decode
      )
  return {_LIMIT: _bare(config, source, files)} | ours | peers


def _time(name, contestants, flags, rows, ratios):
  seconds = {contestant: [] for contestant in contestants}
  for _ in range(flags.rounds):
    for contestant, batches in contestants.items():
      cost = input_cost.processor_time(batches.__next__, flags.seconds)
      seconds[contestant].append(cost / _BATCH)
  for contestant, values in seconds.items():
    of_limit = statistics.median(a / b for a, b in zip(seconds[_LIMIT], values))
    over = sorted(a / b for a, b in zip(values, seconds['fast']))
    key = f'{name}: {contestant}'
    ratios[f'{key}, of the limit'] = of_limit
    ratios[f'{key}, fast over it'] = statistics.median(over)
    median = statistics.median(values)
    cells = f'{statistics.median(over):.2f} ({over[0]:.2f} to {over[-1]:.2f})'
    rows.append((key, f'{median * 1e3:.3f}', f'{1 / median:.0f}', f'{of_limit:.2f}', cells))


def _stages(config, source):
  """Endless batches by the part of the work of `fast` that they take."""
  side = config.data.image_size

  def reduced(image, box, *_):
    decode_opencv.decoded(image, decode_opencv.reduced(box, side)[0])

  cuts = {
    'no pixels': lambda *_: None,
    'decoded whole': lambda image, *_: decode_opencv.decoded(image, 0),
    'decoded': reduced,
    'not mirrored': lambda image, box, _, out: decode_opencv.view(image, box, False, out),
  }
  sampler = _sampler(config, len(source), _BATCH)
  return {stage: _cut(source, sampler, _opened, cut) for stage, cut in cuts.items()}


def _opened(file):
  return decode_opencv.opened(file, 100)


def _cut(source, sampler, prepare, cut):
  """What `pipeline.batches` yields, by one thread and with other operations."""
  with futures.ThreadPoolExecutor(1) as pool:
    reader = batch_reader.BatchReader(source, sampler, corruption.Registry(source), pool)
    yield from reader.batches(prepare, cut)


def _sampler(config, examples, batch):
  return batch_sampler.BatchSampler(config, examples, batch, np.arange(batch), True)


def _bare(config, source, files):
  """Crops decoded in tf.data's threads: those of the stream's first ten thousand rows."""
  tf = tensorflow_cpu.load()
  sampler = _sampler(config, len(source), _BATCH)
  paths, boxes, sizes = [], [], {}
  for step in range(10000 // _BATCH):
    positions, indices, _ = sampler.indices(step)
    for i in set(indices.tolist()) - sizes.keys():
      data = tf.io.read_file(files[i])
      sizes[i] = tf.image.extract_jpeg_shape(data)[:2].numpy()
    views = sampler.views(positions, np.array([sizes[i] for i in indices]))
    paths += [files[i] for i in indices]
    boxes.append(views.boxes.astype(np.int32))

  def decode(file, box):
    data = tf.io.read_file(file)
    image = tf.image.decode_and_crop_jpeg(data, box, channels=3, dct_method='INTEGER_ACCURATE')
    return tf.size(image)

  return _dataset((paths, np.concatenate(boxes)), decode)


def _plain(config, files):
  """A tf.data pipeline as it is usually written."""
  tf, d = tensorflow_cpu.load(), config.data

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
  data = data.repeat().map(decode, num_parallel_calls=1)
  options = tf.data.Options()
  options.threading.private_threadpool_size = 1
  iterator = iter(data.batch(_BATCH).prefetch(2).with_options(options))
  while True:
    yield next(iterator)


def _files(source, folder):
  """Paths of a tree's images; those of another set are written to a folder."""
  if os.path.isfile(source.example_name(0)):
    return [source.example_name(i) for i in range(len(source))]
  os.makedirs(folder)
  paths = [os.path.join(folder, f'{i}.jpg') for i in range(len(source))]
  for i, path in enumerate(paths):
    (data,), _ = source.read(np.array([i]))
    pathlib.Path(path).write_bytes(data)
  return paths


class _Blank:
  """A file again and again."""

  def __init__(self, file):
    self._file = file

  def read(self, indices):
    return [self._file] * len(indices), np.zeros(len(indices))


def _assembly(seconds):
  """Images a second of one process where nothing is decoded."""
  file = io.BytesIO()
  Image.new('RGB', (400, 300)).save(file, 'JPEG')
  blank = _Blank(file.getvalue())
  sampler = _sampler(_common.load(_KEYS), 10**6, 256)
  prepare = {'an array': lambda _: np.broadcast_to(np.uint8(0), (256, 341, 3)), 'a file': _opened}
  for (name, function), is_fed in itertools.product(prepare.items(), (False, True)):
    batches = itertools.islice(_cut(blank, sampler, function, lambda *_: None), 4, None)
    if is_fed:
      with contextlib.closing(_fed(batches, sampler)) as stream:
        rate = _rate(stream, seconds)
    else:
      rate = _rate(batches, seconds)
    place = f', on {_DEVICES} devices' * is_fed
    yield f'assembly, {name} not decoded{place}', '', f'{rate:.0f} a process', '', ''


def _fed(batches, plan):
  """The batches on all CPU devices, each with its part of the rows."""
  mesh = jax.sharding.Mesh(np.array(jax.devices('cpu')), ('data',))
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('data'))
  placement = feed.Placement.create(sharding, len(plan.rows))
  hosts = (dict(zip(('image', 'label', 'weight'), batch)) for batch in batches)
  return feed.Feed(feed.on_device(hosts, plan.rows, placement), 2)


def _rate(batches, seconds):
  """Images a second, each batch of 256."""
  next(batches)
  start, count = time.perf_counter(), 0
  while time.perf_counter() - start < seconds:
    jax.block_until_ready(next(batches))
    count += 256
  return count / (time.perf_counter() - start)


if __name__ == '__main__':
  main()
