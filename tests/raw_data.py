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


def cifar(root, names=KINDS):
  root.mkdir(parents=True, exist_ok=True)
  for name, (labels, seeds) in contents().items():
    records = [bytes([n]) + planes(seed) for n, seed in zip(labels, seeds)]
    (root / f'{name}.bin').write_bytes(b''.join(records))
  if names:
    (root / 'batches.meta.txt').write_text(''.join(f'{name}\n' for name in names) + '\n')
  return root
