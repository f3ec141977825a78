"""Caffe's files of weights: a NetParameter of caffe.proto, read without protobuf.

A message is a row of fields, each a tag (its number times 8, plus its wire type)
and a value (protobuf.dev/programming-guides/encoding). Only headers are read until
an array is asked for.
"""

from collections.abc import Iterator
import itertools
import math
import os
import re
from typing import Any

import numpy as np

# Caffe's snapshots had no suffix until 2014: DeepSentiBank's has none.
_NAME = re.compile(r'\.caffemodel$|_iter_\d+$')
_LAYERS = ('conv1', 'conv2', 'conv3', 'conv4', 'conv5', 'fc6', 'fc7', 'fc8')
# By field of NetParameter the fields of a layer's type and blobs: LayerParameter,
# V1LayerParameter of 2014, and the one before, which lies in field 1 of a V1.
_LAYER, _V1, _V0 = (2, 7), (5, 6), (2, 50)
# The types of layers whose order tells AlexNet.
_NORMS, _POOLS = (b'LRN', 15, b'lrn'), (b'Pooling', 17, b'pool')
_MOST_AXES = 8  # of a blob; Caffe allows 32, and CaffeNet has 4
# As timm's config.json has it; the means of ImageNet's mean file are BGR 104, 117, 123.
_PREPROCESSING = {
  'input_size': [3, 227, 227],
  'crop_pct': 227 / 256,
  'crop_mode': 'squash',
  'interpolation': 'bilinear',
  'mean': [123 / 255, 117 / 255, 104 / 255],
  'std': [1 / 255] * 3,
}


def has_name(path: str) -> bool:
  """Returns whether a file has the name of one of Caffe's weights."""
  return bool(_NAME.search(path))


def read(path: str) -> tuple[dict[str, np.ndarray], dict]:
  """Reads a CaffeNet.

  Layers are named by their order as in Caffe's reference, since a fine-tuned one has
  another name in Caffe: caffe.conv1.weight to caffe.fc8.bias. Kernels are (out, in,
  height, width), and the first takes RGB, where Caffe's takes BGR.

  Args:
    path: path of the file.

  Returns:
    The tensors by name, mapped from the file; and what the file tells, in the form of
    timm's config.json.

  Raises:
    OSError: if there is no such file.
    ValueError: if it is another, or not whole.
  """
  # An empty file cannot be mapped.
  data: Any = np.memmap(path, np.uint8, 'r') if os.path.getsize(path) else b''
  layers = list(_layers(memoryview(data)))
  weighted = [blobs for _, blobs in layers if blobs]
  if len(weighted) != len(_LAYERS):
    raise ValueError(f'{len(weighted)} layers with weights, expected the 8 of CaffeNet')
  tensors: dict[str, np.ndarray] = {}
  for name, blobs in zip(_LAYERS, weighted, strict=True):
    for leaf, blob in zip(('weight', 'bias'), map(_array, blobs)):
      # Until 2014 every blob had four axes, the first ones of 1.
      axes = 1 if leaf == 'bias' else 4 if name.startswith('conv') else 2
      while blob.ndim > axes and len(blob) == 1:
        blob = blob[0]
      if blob.ndim != axes:
        raise ValueError(f'{name} has a blob of {blob.ndim} axes, expected {axes}')
      tensors[f'caffe.{name}.{leaf}'] = blob
  tensors['caffe.conv1.weight'] = tensors['caffe.conv1.weight'][:, ::-1]
  first = next((kind for kind, _ in layers if kind in _NORMS + _POOLS), None)
  name = 'bvlc_alexnet' if first in _NORMS else 'caffenet'
  return tensors, {'architecture': name, 'pretrained_cfg': _PREPROCESSING}


def _layers(net):
  """Yields each layer's type, or None, and its blobs."""
  for number, message in _fields(net):
    if number not in (2, 100) or isinstance(message, int):
      continue
    form = _LAYER if number == 100 else _V1
    for inner in _values(message, 1, memoryview) if form is _V1 else ():
      message, form = inner, _V0
    kinds = _values(message, form[0], (int, memoryview))
    yield next(kinds, None), [*_values(message, form[1], memoryview)]


def _array(blob):
  """A BlobProto's numbers, in its shape."""
  sizes = (n for s in _values(blob, 7, memoryview) for n in _integers(_values(s, 1)))
  shape = [*itertools.islice(sizes, _MOST_AXES + 1)]
  shape = shape or [sum(_values(blob, axis, int)) for axis in (1, 2, 3, 4)]
  dtype, data = np.dtype('<f4'), _joined(_values(blob, 5, memoryview))
  if not data:
    dtype, data = np.dtype('<f8'), _joined(_values(blob, 8, memoryview))
  if not data or len(data) != math.prod(shape) * dtype.itemsize:
    raise ValueError(f'a blob of shape {tuple(shape)} has {len(data):,} bytes')
  return np.frombuffer(data, dtype).reshape(shape)


def _joined(chunks):
  """The bytes of a repeated field: packed all into one value, a few, or one a number."""
  data = next(chunks, b'')
  for chunk in chunks:
    if isinstance(data, memoryview):  # a view of the file, where there is one chunk
      data = bytearray(data)
    data += chunk
  return data


def _integers(values):
  """The integers of a repeated field, packed or not."""
  for value in values:
    if isinstance(value, int):
      yield value
      continue
    at = 0
    while at < len(value):
      number, at = _varint(value, at)
      yield number


def _values(message, number, kinds=(int, memoryview)):
  """Yields the values of one field, a message's or a number's; others do not count."""
  return (v for n, v in _fields(message) if n == number and isinstance(v, kinds))


def _fields(message: memoryview) -> Iterator[tuple[int, Any]]:
  """Yields the number and the value of each field: an int, or the bytes."""
  at = 0
  while at < len(message):
    tag, at = _varint(message, at)
    wire = tag & 7
    if wire == 0:
      value, at = _varint(message, at)
      yield tag >> 3, value
      continue
    size = {1: 8, 5: 4}.get(wire, len(message))  # no other has a size: refused
    if wire == 2:
      size, at = _varint(message, at)
    if at + size > len(message):
      raise ValueError('it is no whole NetParameter of Caffe')
    yield tag >> 3, message[at : at + size]
    at += size


def _varint(message, at):
  """The integer that begins at a byte, and where the next value does."""
  value = 0
  for i, byte in enumerate(message[at : at + 10]):
    value |= (byte & 127) << 7 * i
    if byte < 128:
      return value, at + i + 1
  raise ValueError('it is no whole NetParameter of Caffe')
