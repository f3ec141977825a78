"""MNIST's and CIFAR-10's files, made byte by byte for the tests."""

import gzip
import struct

import numpy as np

from anp_jax.data.sources import arrays


def read(path, split='train'):
  """Images as bytes, the shape of the first, labels and class names."""
  source = arrays.Arrays(str(path), split)
  images, labels = source.read(np.arange(len(source)))
  assert source.kind == 'pixels' and labels.dtype == np.int32
  assert all(i.dtype == np.uint8 and i.flags.c_contiguous for i in images)
  return ([i.tobytes() for i in images], images[0].shape, labels.tolist(), source.vocabulary.names)


DIGITS = tuple('0123456789')


def idx(numbers, *shape):
  """An idx file of uint8; by default of one dimension."""
  shape = shape or (len(numbers),)
  header = struct.pack(f'>{1 + len(shape)}I', 0x800 + len(shape), *shape)
  return header + bytes(numbers)


# Three images of 2 x 4, each byte another; and two more to test on.
GREY = list(range(10, 34))
MNIST = {
  'train-images-idx3-ubyte': idx(GREY, 3, 2, 4),
  'train-labels-idx1-ubyte': idx([7, 0, 5]),
  't10k-images-idx3-ubyte': idx(GREY[::-1][:16], 2, 2, 4),
  't10k-labels-idx1-ubyte': idx([3, 8]),
}


def mnist(root, form='', **changes):
  """The files, some changed; keys are the files' names with underscores."""
  root.mkdir(exist_ok=True)
  for name, data in MNIST.items():
    data = changes.get(name.replace('-', '_'), data)
    if form.startswith('dots'):
      name = name.replace('-idx', '.idx')
    if form.endswith('gz'):
      name, data = f'{name}.gz', data and gzip.compress(data)
    if data is not None:
      (root / name).write_bytes(data)
  return root


BATCHES = [f'data_batch_{i}' for i in range(1, 6)]
KINDS = ('airplane', 'automobile', 'bird', 'cat', 'deer', 'dog', 'frog', 'horse', 'ship', 'truck')


def planes(seed):
  """Planes R, G, B of one image as bytes, row by row."""
  return np.random.default_rng(seed).integers(0, 256, 3072, np.uint8).tobytes()


def pixels(planes):
  """The same image with the three channels of a pixel side by side."""
  return b''.join(
    planes[i : i + 1] + planes[1024 + i : 1025 + i] + planes[2048 + i : 2049 + i]
    for i in range(1024)
  )


def contents():
  """Per batch, the labels and the images' seeds; no two have as many."""
  sizes = dict(zip([*BATCHES, 'test_batch'], (2, 1, 3, 1, 1, 4)))
  start, result = 0, {}
  for name, size in sizes.items():
    seeds = range(start, start + size)
    result[name] = [(7 * seed + 3) % 10 for seed in seeds], list(seeds)
    start += size
  return result


def string(data):
  """A text as Python 2 pickles it: bytes, behind a length of 1 or 4 bytes."""
  if len(data) < 256:
    return b'U' + bytes([len(data)]) + data
  return b'T' + struct.pack('<I', len(data)) + data


def list_of(items):
  return b'](' + b''.join(items) + b'e'


def number(value):
  return b'K' + bytes([value]) if value < 256 else b'M' + struct.pack('<H', value)


# dtype('u1', 0, 1), whose state is (3, '|', None x 3, -1, -1, 0).
UINT8 = (
  b'cnumpy\ndtype\n'
  + string(b'u1')
  + b'K\0K\x01\x87R'
  + b'(K\x03'
  + string(b'|')
  + b'NNN'
  + 2 * b'J\xff\xff\xff\xff'
  + b'K\0tb'
)


def python2_array(data, *shape):
  """A uint8 array as NumPy under Python 2 pickles it, in protocol 2."""
  return (
    b'cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n'
    + (number(0) + b'\x85' + string(b'b') + b'\x87R')
    + b'('
    + number(1)
    + (b'(' + b''.join(number(n) for n in shape) + b't')
    + UINT8
    + b'\x89'
    + string(data)
    + b'tb'
  )


def python2_dict(**entries):
  items = b''.join(string(k.encode()) + v for k, v in entries.items())
  return b'\x80\x02}(' + items + b'u.'


def python2_batch(labels, data, /, **changes):
  entries = {
    'batch_label': string(b'training batch 1 of 5'),
    'labels': list_of(number(n) for n in labels),
    'data': python2_array(data, len(data) // 3072, 3072),
    'filenames': list_of(string(b'x.png') for _ in labels),
  } | changes
  return python2_dict(**entries)


def cifar(root, form, names=KINDS):
  root.mkdir(exist_ok=True)
  for name, (labels, seeds) in contents().items():
    images = [planes(seed) for seed in seeds]
    if form == 'binary':
      records = [bytes([n]) + image for n, image in zip(labels, images)]
      (root / f'{name}.bin').write_bytes(b''.join(records))
    else:
      batch = python2_batch(labels, b''.join(images))
      (root / name).write_bytes(batch)
  if names and form == 'binary':
    text = ''.join(f'{name}\n' for name in names) + '\n'
    (root / 'batches.meta.txt').write_text(text)
  elif names:
    listed = list_of(string(name.encode()) for name in names)
    meta = python2_dict(num_cases_per_batch=number(9999), label_names=listed)
    (root / 'batches.meta').write_bytes(meta)
  return root


def cifar_file(root, form, name):
  return root / (f'{name}.bin' if form == 'binary' else name)
