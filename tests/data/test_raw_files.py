"""Tests of raw_files: MNIST and CIFAR-10, whole and broken, byte by byte."""

import gzip
import io
import os
import pickle
import struct
import subprocess
import sys
import warnings

import numpy as np
from PIL import Image
import pytest
import tensorflow_datasets as tfds
from tensorflow_datasets.core import registered

from anp_jax import config as config_lib
from anp_jax.config import command_line
from anp_jax.data import sources
from anp_jax.data.input import batch_plan
from anp_jax.data.input import pipeline
from anp_jax.data.sources import arrays as arrays_lib
from tests import opening


def _read(path, split='train'):
  """Images as bytes, the shape of the first, labels and class names."""
  source = arrays_lib.Arrays(str(path), split)
  images, labels = source.read(np.arange(len(source)))
  assert source.kind == 'pixels' and labels.dtype == np.int32
  assert all(i.dtype == np.uint8 and i.flags.c_contiguous for i in images)
  return (
    [i.tobytes() for i in images],
    images[0].shape,
    labels.tolist(),
    source.vocabulary.names,
  )


# MNIST.

_DIGITS = tuple('0123456789')


def _idx(numbers, *shape):
  """An idx file of uint8; by default of one dimension."""
  shape = shape or (len(numbers),)
  header = struct.pack(f'>{1 + len(shape)}I', 0x800 + len(shape), *shape)
  return header + bytes(numbers)


# Three images of 2 x 4, each byte another; and two more to test on.
_GREY = list(range(10, 34))
_MNIST = {
  'train-images-idx3-ubyte': _idx(_GREY, 3, 2, 4),
  'train-labels-idx1-ubyte': _idx([7, 0, 5]),
  't10k-images-idx3-ubyte': _idx(_GREY[::-1][:16], 2, 2, 4),
  't10k-labels-idx1-ubyte': _idx([3, 8]),
}


def _mnist(root, form='', **changes):
  """The files, some changed; keys are the files' names with underscores."""
  root.mkdir(exist_ok=True)
  for name, data in _MNIST.items():
    data = changes.get(name.replace('-', '_'), data)
    if form.startswith('dots'):
      name = name.replace('-idx', '.idx')
    if form.endswith('gz'):
      name, data = f'{name}.gz', data and gzip.compress(data)
    if data is not None:
      (root / name).write_bytes(data)
  return root


@pytest.mark.parametrize('form', ['', 'gz', 'dots', 'dots gz'])
def test_mnist(tmp_path, form):
  _mnist(tmp_path, form)
  images, shape, labels, names = _read(tmp_path)
  assert shape == (2, 4, 3) and labels == [7, 0, 5] and names == _DIGITS
  assert images[1] == bytes([
    18, 18, 18, 19, 19, 19, 20, 20, 20, 21, 21, 21,
    22, 22, 22, 23, 23, 23, 24, 24, 24, 25, 25, 25,
  ])  # fmt: skip
  assert images[0][:6] == bytes([10, 10, 10, 11, 11, 11])
  assert images[2][-6:] == bytes([32, 32, 32, 33, 33, 33])
  for split in ('test', 't10k', 'validation'):
    images, shape, labels, names = _read(tmp_path, split)
    assert labels == [3, 8] and names == _DIGITS
    assert images[0][::3] == bytes(range(33, 25, -1))
    assert images[1][::3] == bytes(range(25, 17, -1))


def test_mnist_is_trained_and_evaluated_on(tmp_path, config):
  config.data.source = 'arrays'
  config.data.path = str(_mnist(tmp_path))
  assert len(sources.open_source(config, training=True)) == 3
  assert len(sources.open_source(config, training=False)) == 2


def test_mnist_as_a_tree_of_images(tmp_path):
  """The recipe sees the pixels and labels that it sees of the idx files."""
  grey = np.random.default_rng(0).integers(0, 256, (20, 28, 28), np.uint8)
  labels = np.arange(20) // 2
  files = _mnist(
    tmp_path / 'files',
    train_images_idx3_ubyte=_idx(grey.tobytes(), 20, 28, 28),
    train_labels_idx1_ubyte=_idx(labels.tolist()),
    t10k_images_idx3_ubyte=_idx(grey[::-1].tobytes(), 20, 28, 28),
    t10k_labels_idx1_ubyte=_idx(labels[::-1].tolist()),
  )
  for split, order in (('training', 1), ('testing', -1)):
    for i, (image, label) in enumerate(zip(grey[::order], labels[::order])):
      folder = tmp_path / 'tree' / split / str(label)
      folder.mkdir(parents=True, exist_ok=True)
      Image.fromarray(image).save(folder / f'{i:02}.png')
  config = command_line.load('configs/lenet.py:mnist', {})
  batches = {}
  for kind, path in (('arrays', files), ('folder', tmp_path / 'tree')):
    config.data.source, config.data.path = kind, str(path)
    for training in (True, False):
      source = sources.open_source(config, training)
      assert source.vocabulary.names == _DIGITS
      plan = batch_plan.BatchPlan(config, 20, 20, np.arange(20), False)
      (batch,) = pipeline.batches(source, plan)
      place = np.lexsort([*batch['image'].reshape(20, -1).T, batch['label']])
      batches[kind, training] = batch['image'][place], batch['label'][place]
  for training in (True, False):
    for a, b in zip(batches['arrays', training], batches['folder', training]):
      np.testing.assert_array_equal(a, b)
    assert (batches['folder', training][1] == labels).all()


def test_mnist_keeps_each_grey_byte_once(tmp_path):
  count = 200
  _mnist(
    tmp_path,
    train_images_idx3_ubyte=_idx(bytes(count * 50 * 50), count, 50, 50),
    train_labels_idx1_ubyte=_idx(bytes(count)),
  )
  images = arrays_lib.Arrays(str(tmp_path), 'train')._images
  low, high = np.lib.array_utils.byte_bounds(images)
  assert images.shape == (count, 50, 50, 3) and high - low == count * 50 * 50


def test_mnist_of_more_classes(tmp_path):
  """EMNIST has more: the training labels say how many, in both splits."""
  _mnist(tmp_path, train_labels_idx1_ubyte=_idx([0, 11, 5]))
  names = tuple(str(i) for i in range(12))
  assert _read(tmp_path)[3] == names
  assert _read(tmp_path, 'test')[3] == names


def test_plain_file_is_read_where_both_are(tmp_path):
  _mnist(tmp_path)
  (tmp_path / 'train-labels-idx1-ubyte.gz').write_bytes(b'half')
  assert _read(tmp_path)[2] == [7, 0, 5]


def test_folder_of_a_files_name_is_no_file(tmp_path):
  """Some archives unpack every file into a folder of its own name."""
  _mnist(tmp_path, 'dots')
  (tmp_path / 'train-images-idx3-ubyte').mkdir()
  assert _read(tmp_path)[2] == [7, 0, 5]


_IMAGES = _MNIST['train-images-idx3-ubyte']


@pytest.mark.parametrize(
  'name, data, words',
  [
    ('train-images-idx3-ubyte', _IMAGES[:-1], ['39 bytes', '40', '3 x 2 x 4']),
    ('train-images-idx3-ubyte', _IMAGES + b'x', ['41 bytes', 'expected 40']),
    ('train-images-idx3-ubyte', _IMAGES[:9], ['9 bytes']),
    ('train-images-idx3-ubyte', b'\0\0', ['0x0000,', '0x00000803']),
    ('train-images-idx3-ubyte', b'', ['0x00000803']),
    ('train-images-idx3-ubyte', _idx([7, 0, 5]), ['0x00000801', '0x00000803']),
    # Little-endian, and of 32-bit numbers.
    ('train-images-idx3-ubyte', b'\3\x08\0\0' + _IMAGES[4:], ['0x03080000']),
    ('train-images-idx3-ubyte', b'\0\0\x0c\3' + _IMAGES[4:], ['0x00000c03']),
    # Twice the width; a size that would wrap around in 64 bits.
    ('train-images-idx3-ubyte', _idx(_GREY, 3, 2, 8), ['expected 64']),
    ('train-images-idx3-ubyte', _idx([], 2**31, 2**31, 4), [str(2**64 + 16)]),
    ('train-images-idx3-ubyte', _idx([], 3, 0, 4), ['0 x 4']),
    ('train-labels-idx1-ubyte', _idx([1, 2]), ['2 labels', 'expected 3']),
    ('train-labels-idx1-ubyte', _IMAGES, ['0x00000803', '0x00000801']),
    ('train-labels-idx1-ubyte', _idx([7, 0, 5])[:-1], ['10 bytes', '11']),
    ('train-labels-idx1-ubyte', None, ['.gz']),
    ('train-images-idx3-ubyte', None, ['.gz']),
  ],
)  # fmt: skip
@pytest.mark.parametrize('form', ['', 'gz'])
def test_bad_mnist(tmp_path, config, form, name, data, words):
  _mnist(tmp_path, form, **{name.replace('-', '_'): data})
  opening.refused([tmp_path, name, *words], config, 'arrays', tmp_path)


def test_mnist_labels_out_of_range(tmp_path, config):
  _mnist(tmp_path, t10k_labels_idx1_ubyte=_idx([3, 10]))
  opening.refused(
    [tmp_path / 't10k-labels-idx1-ubyte', '3 to 10', '0 to 9'],
    config,
    'arrays',
    tmp_path,
    'test',
  )


@pytest.mark.parametrize('damage', ['plain', 'cut', 'byte', 'sum', 'empty'])
def test_bad_gzip(tmp_path, config, damage):
  _mnist(tmp_path, 'gz')
  file = tmp_path / 'train-images-idx3-ubyte.gz'
  data = file.read_bytes()
  file.write_bytes({
    'plain': _IMAGES,
    'cut': data[:-9],
    'byte': data[:20] + bytes([data[20] ^ 255]) + data[21:],
    'sum': data[:-8] + bytes([data[-8] ^ 1]) + data[-7:],
    'empty': b'',
  }[damage])  # fmt: skip
  words = [file, '0x00000803' if damage == 'empty' else 'a whole gzip file']
  opening.refused(words, config, 'arrays', tmp_path)


def test_mnist_without_images(tmp_path, config):
  _mnist(
    tmp_path,
    train_images_idx3_ubyte=_idx([], 0, 28, 28),
    train_labels_idx1_ubyte=_idx([], 0),
  )
  opening.refused([tmp_path, 'no examples'], config, 'arrays', tmp_path)


# CIFAR-10.

_BATCHES = [f'data_batch_{i}' for i in range(1, 6)]
_KINDS = (
  'airplane',
  'automobile',
  'bird',
  'cat',
  'deer',
  'dog',
  'frog',
  'horse',
  'ship',
  'truck',
)


def _planes(seed):
  """Planes R, G, B of one image as bytes, row by row."""
  return np.random.default_rng(seed).integers(0, 256, 3072, np.uint8).tobytes()


def _pixels(planes):
  """The same image with the three channels of a pixel side by side."""
  return b''.join(
    planes[i : i + 1]
    + planes[1024 + i : 1025 + i]
    + planes[2048 + i : 2049 + i]
    for i in range(1024)
  )


def _contents():
  """Per batch, the labels and the images' seeds; no two have as many."""
  sizes = dict(zip([*_BATCHES, 'test_batch'], (2, 1, 3, 1, 1, 4)))
  start, result = 0, {}
  for name, size in sizes.items():
    seeds = range(start, start + size)
    result[name] = [(7 * seed + 3) % 10 for seed in seeds], list(seeds)
    start += size
  return result


def _string(data):
  """A text as Python 2 pickles it: bytes, behind a length of 1 or 4 bytes."""
  if len(data) < 256:
    return b'U' + bytes([len(data)]) + data
  return b'T' + struct.pack('<I', len(data)) + data


def _list(items):
  return b'](' + b''.join(items) + b'e'


def _number(value):
  return (
    b'K' + bytes([value]) if value < 256 else b'M' + struct.pack('<H', value)
  )


# dtype('u1', 0, 1), whose state is (3, '|', None x 3, -1, -1, 0).
_UINT8 = (
  b'cnumpy\ndtype\n' + _string(b'u1') + b'K\0K\x01\x87R'
  + b'(K\x03' + _string(b'|') + b'NNN' + 2 * b'J\xff\xff\xff\xff' + b'K\0tb'
)  # fmt: skip


def _python2_array(data, *shape):
  """A uint8 array as NumPy under Python 2 pickles it, in protocol 2."""
  return (
    b'cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n'
    + (_number(0) + b'\x85' + _string(b'b') + b'\x87R')
    + b'(' + _number(1)
    + (b'(' + b''.join(_number(n) for n in shape) + b't')
    + _UINT8
    + b'\x89' + _string(data) + b'tb'
  )  # fmt: skip


def _python2_dict(**entries):
  items = b''.join(_string(k.encode()) + v for k, v in entries.items())
  return b'\x80\x02}(' + items + b'u.'


def _python2_batch(labels, data, /, **changes):
  entries = {
    'batch_label': _string(b'training batch 1 of 5'),
    'labels': _list(_number(n) for n in labels),
    'data': _python2_array(data, len(data) // 3072, 3072),
    'filenames': _list(_string(b'x.png') for _ in labels),
  } | changes
  return _python2_dict(**entries)


def _cifar(root, form, names=_KINDS):
  root.mkdir(exist_ok=True)
  for name, (labels, seeds) in _contents().items():
    images = [_planes(seed) for seed in seeds]
    if form == 'binary':
      records = [bytes([n]) + image for n, image in zip(labels, images)]
      (root / f'{name}.bin').write_bytes(b''.join(records))
    else:
      batch = _python2_batch(labels, b''.join(images))
      (root / name).write_bytes(batch)
  if names and form == 'binary':
    text = ''.join(f'{name}\n' for name in names) + '\n'
    (root / 'batches.meta.txt').write_text(text)
  elif names:
    listed = _list(_string(name.encode()) for name in names)
    meta = _python2_dict(num_cases_per_batch=_number(9999), label_names=listed)
    (root / 'batches.meta').write_bytes(meta)
  return root


@pytest.fixture(params=['binary', 'python'])
def form(request):
  return request.param


def _cifar_file(root, form, name):
  return root / (f'{name}.bin' if form == 'binary' else name)


def _assert_whole(root, names=_KINDS):
  contents = _contents()
  images, shape, labels, class_names = _read(root)
  assert shape == (32, 32, 3) and class_names == names
  assert labels == [n for name in _BATCHES for n in contents[name][0]]
  assert labels[:4] == [3, 0, 7, 4]
  assert images == [_pixels(_planes(seed)) for seed in range(8)]
  for split in ('test', 'validation'):
    images, _, labels, class_names = _read(root, split)
    assert labels == contents['test_batch'][0] and class_names == names
    assert images == [_pixels(_planes(seed)) for seed in range(8, 12)]


def test_hand_made_pickle_is_what_it_should_be():
  """Python's own reader agrees, in the way CIFAR-10's page says to read it."""
  data = bytes(range(256)) * 24
  with warnings.catch_warnings():
    warnings.simplefilter('ignore')  # NumPy's, of Python 2's booleans
    batch = pickle.loads(_python2_batch([3, 255], data), encoding='bytes')
  assert list(batch) == [b'batch_label', b'labels', b'data', b'filenames']
  assert batch[b'labels'] == [3, 255]
  assert batch[b'data'].shape == (2, 3072) and batch[b'data'].dtype == np.uint8
  assert batch[b'data'].tobytes() == data


def test_cifar(tmp_path, form):
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    _assert_whole(_cifar(tmp_path, form))


def test_cifar_pixel_by_hand(tmp_path, form):
  """Row 1, column 2 of channel c is byte 1024 c + 34 of an image."""
  _cifar(tmp_path, form)
  image = arrays_lib.Arrays(str(tmp_path), 'train').read(np.array([5]))[0][0]
  planes = _planes(5)
  assert image[1, 2].tolist() == [planes[34], planes[1058], planes[2082]]
  assert len({*image[1, 2].tolist(), planes[65]}) == 4  # no two alike


def test_cifar_in_a_batch_of_evaluation(tmp_path, config, form):
  """At its own size an image reaches the network as it is on disk."""
  config.data.image_size = config.data.resize = 32
  source = arrays_lib.Arrays(str(_cifar(tmp_path, form)), 'validation')
  plan = batch_plan.BatchPlan(config, 4, 4, np.arange(4), training=False)
  (batch,) = pipeline.batches(source, plan)
  images = [image.tobytes() for image in batch['image']]
  assert images == [_pixels(_planes(seed)) for seed in range(8, 12)]
  assert batch['label'].tolist() == _contents()['test_batch'][0]
  assert batch['image'].flags.c_contiguous


def test_cifar_without_names(tmp_path, form):
  _assert_whole(_cifar(tmp_path, form, names=None), _DIGITS)


def test_cifar_in_the_archives_folder(tmp_path, form):
  name = {'binary': 'bin', 'python': 'py'}[form]
  _cifar(tmp_path / f'cifar-10-batches-{name}', form)
  _assert_whole(tmp_path)


def test_cifar_written_again_by_python_3(tmp_path):
  root = _cifar(tmp_path, 'python')
  for protocol, (name, (labels, seeds)) in enumerate(_contents().items()):
    data = np.frombuffer(b''.join(map(_planes, seeds)), np.uint8)
    batch = {'data': data.reshape(-1, 3072), 'labels': np.array(labels)}
    if protocol % 2:  # as kept from a reading with encoding='bytes'
      batch = {key.encode(): value for key, value in batch.items()}
    (root / name).write_bytes(pickle.dumps(batch, protocol))
  _assert_whole(root)


def test_cifar_arrays_of_numpy_2(tmp_path):
  root = _cifar(tmp_path, 'python')
  for name in _contents():
    data = (root / name).read_bytes()
    assert b'cnumpy.core.multiarray' in data
    data = data.replace(b'cnumpy.core.multi', b'cnumpy._core.multi')
    (root / name).write_bytes(data)
  _assert_whole(root)


@pytest.mark.parametrize('module', [b'numpy.core', b'numpy._core'])
def test_cifar_arrays_of_protocol_5(tmp_path, module):
  root = _cifar(tmp_path, 'python')
  for name, (labels, seeds) in _contents().items():
    data = b''.join(map(_planes, seeds))
    array = (
      b'c' + module + b'.numeric\n_frombuffer\n('
      + (b'B' + struct.pack('<I', len(data)) + data)
      + _UINT8
      + (_number(len(seeds)) + _number(3072) + b'\x86')
      + b'VC\ntR'
    )  # fmt: skip
    (root / name).write_bytes(_python2_batch(labels, data, data=array))
  _assert_whole(root)


def test_cifar_batch_that_is_missing(tmp_path, config, form):
  for name in ('data_batch_1', 'data_batch_4'):
    file = _cifar_file(_cifar(tmp_path, form), form, name)
    file.unlink()
    opening.refused(
      [tmp_path, f'no file {file.name};'], config, 'arrays', tmp_path
    )
  file = _cifar_file(tmp_path, form, 'test_batch')
  file.unlink()
  opening.refused(
    [tmp_path, f'no file {file.name};'], config, 'arrays', tmp_path, 'test'
  )


@pytest.mark.parametrize('left', [0, 1, 3072, 3074, 2 * 3073 - 1])
def test_bad_binary_cifar(tmp_path, config, left):
  file = _cifar(tmp_path, 'binary') / 'data_batch_3.bin'
  file.write_bytes(file.read_bytes()[:left])
  opening.refused([file, f'{left} bytes', '3073'], config, 'arrays', tmp_path)


def test_cifar_labels_out_of_range(tmp_path, config, form):
  file = _cifar_file(_cifar(tmp_path, form), form, 'data_batch_2')
  planes = _planes(0)
  file.write_bytes(
    b'\x0a' + planes if form == 'binary' else _python2_batch([10], planes)
  )
  opening.refused([file, '10 to 10', '0 to 9'], config, 'arrays', tmp_path)


def test_cifar_with_too_few_names(tmp_path, config, form):
  _cifar(tmp_path, form, names=_KINDS[:7])
  opening.refused(
    [_cifar_file(tmp_path, form, 'data_batch_2'), '7', '0 to 6'],
    config,
    'arrays',
    tmp_path,
  )


@pytest.mark.parametrize(
  'text',
  [b'', b'\n\n', b'a\n\nb\n', b'\na\nb\n', b'a\n \nb\n', b'\xff\n'],
)  # fmt: skip
def test_bad_names_of_binary_cifar(tmp_path, config, text):
  file = _cifar(tmp_path, 'binary') / 'batches.meta.txt'
  file.write_bytes(text)
  opening.refused([file], config, 'arrays', tmp_path)


def test_names_with_the_lines_of_windows(tmp_path):
  file = _cifar(tmp_path, 'binary') / 'batches.meta.txt'
  file.write_bytes('\r\n'.join(_KINDS).encode() + b'\r\n\r\n')
  _assert_whole(tmp_path)


@pytest.mark.parametrize(
  'meta',
  [
    _python2_dict(names=_list([])),
    _python2_dict(label_names=_list([])),
    _python2_dict(label_names=_list([_string(b'cat'), _string(b'')])),
    _python2_dict(label_names=_list([_number(1)])),
    _python2_dict(label_names=_list([_string(b'\xff')])),
    _python2_dict(label_names=_string(b'cat')),
    _python2_dict(label_names=_list([_list([]), _list([_number(1)])])),
    b'\x80\x02K\x05.',
    b'cat',
  ],
)
def test_bad_names_of_python_cifar(tmp_path, config, meta):
  file = _cifar(tmp_path, 'python') / 'batches.meta'
  file.write_bytes(meta)
  opening.refused([file], config, 'arrays', tmp_path)


_TWO = _planes(0) + _planes(1)


@pytest.mark.parametrize(
  'batch, words',
  [
    (_python2_batch([1, 2], _TWO)[:-1], []),
    (_python2_batch([1, 2], _TWO)[:3000], []),
    (b'', []),
    (b'PK\3\4', []),
    (b'\x80\x02K\x05.', ['data']),
    (_python2_dict(labels=_list([])), ["'data'"]),
    (_python2_dict(data=_python2_array(_TWO, 2, 3072)), ["'labels'"]),
    (_python2_batch([1], _TWO), ['(1,)', '2 whole']),
    (_python2_batch([1, 2, 3], _TWO), ['(3,)', '2 whole']),
    (
      _python2_batch([1, 2], _TWO, labels=_python2_array(b'ab', 2, 1)),
      ['(2, 1)'],
    ),
    (_python2_batch([1, 2], _TWO, labels=_list([b'N', b'N'])), ['object']),
    (
      _python2_batch([1, 2], _TWO, data=_python2_array(_TWO, 3072, 2)),
      ['(3072, 2)', 'expected uint8 (n, 3072)'],
    ),
    (
      _python2_batch([1, 2], _TWO, data=_python2_array(_TWO, 6144)),
      ['(6144,)'],
    ),
    (_python2_batch([1, 2], _TWO, data=_python2_array(_TWO, 3, 3072)), []),
    (_python2_batch([1, 2], _TWO, data=_string(_TWO)), ['expected uint8']),
    (_python2_batch([1, 2], _TWO).replace(b'u1', b'i1'), ['int8']),
  ],
)
def test_bad_python_cifar(tmp_path, config, batch, words):
  file = _cifar(tmp_path, 'python') / 'data_batch_2'
  file.write_bytes(batch)
  opening.refused([file, *words], config, 'arrays', tmp_path)


class _Command:
  """Pickles as a call of os.system."""

  def __init__(self, marker):
    self.marker = marker

  def __reduce__(self):
    return os.system, (f'touch {self.marker}',)


@pytest.mark.parametrize('protocol', range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize('name', ['data_batch_3', 'batches.meta'])
def test_pickle_that_would_run_a_command(tmp_path, config, protocol, name):
  marker = tmp_path / 'ran'
  key = b'data' if name == 'data_batch_3' else b'label_names'
  attack = pickle.dumps({key: [_Command(marker)]}, protocol)
  pickle.loads(attack)
  assert marker.exists()  # the attack is a real one
  marker.unlink()
  file = _cifar(tmp_path / 'set', 'python') / name
  file.write_bytes(attack)
  opening.refused(
    [file, f"refused '{os.system.__module__}.system'"],
    config,
    'arrays',
    tmp_path / 'set',
  )
  assert not marker.exists()


@pytest.mark.parametrize(
  'code, refused',
  [
    # A name with dots must not be followed, nor a neighbour be admitted.
    (b'\x80\x04\x8c\x05numpy\x8c\x12_core._methods.os.\x93.', 'numpy._core'),
    (b'cnumpy\nload\n.', 'numpy.load'),
    (b'cbuiltins\neval\n.', 'builtins.eval'),
    (b'c__builtin__\neval\n.', '__builtin__.eval'),
    (b'(Vtrue\nios\nsystem\n.', 'os.system'),
    (b'cnumpy.core.multiarray\nfromfile\n.', 'multiarray.fromfile'),
    (b'c_codecs\ndecode\n.', '_codecs.decode'),
    (b'c_codecs\nencode\n(Vtext\nVutf-8\ntR.', 'utf-8'),
    # By numbers of copyreg, and a reference by which others load files.
    (b'\x80\x02\x82\x01.', ''),
    (b'Pfile\n.', ''),
  ],
)
def test_pickle_that_calls_what_no_array_needs(tmp_path, config, code, refused):
  file = _cifar(tmp_path, 'python') / 'data_batch_1'
  file.write_bytes(code)
  opening.refused([file, refused], config, 'arrays', tmp_path)


# What a folder holds.


def test_folder_of_nothing_known(tmp_path, config):
  for names in ([], ['cifar-10-python.tar.gz', 'cat.jpg']):
    for name in names:
      (tmp_path / name).write_bytes(b'')
    opening.refused(
      [
        tmp_path,
        'SPLIT_images.npy',
        'train-images-idx3-ubyte',
        'data_batch_1.bin',
        'cifar-10-batches-py/',
        'unpacked',
      ],
      config,
      'arrays',
      tmp_path,
    )
  opening.refused([tmp_path / 'none'], config, 'arrays', tmp_path / 'none')


def test_folder_of_several_sets(tmp_path, config):
  _mnist(tmp_path)
  _cifar(tmp_path / 'cifar-10-batches-py', 'python')
  opening.refused(
    [
      f'MNIST in {tmp_path} and ',
      f'CIFAR-10 (Python) in {tmp_path / "cifar-10-batches-py"}',
    ],
    config,
    'arrays',
    tmp_path,
  )
  _cifar(tmp_path / 'two', 'python')
  _cifar(tmp_path / 'two', 'binary')
  opening.refused(
    ['(binary) in', '(Python) in'], config, 'arrays', tmp_path / 'two'
  )


def test_array_of_another_purpose_is_no_set(tmp_path):
  np.save(_mnist(tmp_path) / 'mean.npy', np.zeros(3))
  assert _read(tmp_path)[2] == [7, 0, 5]
  np.save(tmp_path / 'train_images.npy', np.zeros(3))
  with pytest.raises(config_lib.ConfigError, match='NumPy in .*each in a'):
    _read(tmp_path)


def test_unknown_split_names_those_there_are(tmp_path, config):
  _mnist(tmp_path / 'mnist')
  opening.refused(
    ["'tset'", 'train, test, t10k, validation', "mean 'test'"],
    config,
    'arrays',
    tmp_path / 'mnist',
    'tset',
  )
  for form in ('binary', 'python'):
    _cifar(tmp_path / form, form)
    opening.refused(
      ["'trian'", 'train, test, validation', "mean 'train'"],
      config,
      'arrays',
      tmp_path / form,
      'trian',
    )


def test_no_tensorflow_is_loaded(tmp_path):
  """Nor JAX: pixels come to a batch by NumPy and Pillow alone."""
  _mnist(tmp_path / 'a', 'gz')
  _cifar(tmp_path / 'b', 'binary')
  _cifar(tmp_path / 'c', 'python')
  code = (
    'import sys\n'
    'from anp_jax.data.sources import arrays\n'
    'from anp_jax.data import sources\n'
    'for path in sys.argv[1:]:\n'
    '  for split in ("train", "validation"):\n'
    '    arrays.Arrays(path, split).read([0, 1])\n'
    'print([m for m in ("tensorflow", "jax", "tensorflow_datasets")\n'
    '       if m in sys.modules])\n'
  )
  folders = [str(tmp_path / name) for name in 'abc']
  result = subprocess.run(
    [sys.executable, '-c', code, *folders], capture_output=True, text=True
  )
  assert (result.stdout, result.returncode) == ('[]\n', 0), result.stderr


# The same sets by their names in TensorFlow Datasets.


def _tfds_mnist():
  """A builder of that name; not registered, since tfds has one."""
  with registered.skip_registration():

    class Mnist(tfds.core.GeneratorBasedBuilder):
      VERSION = tfds.core.Version('3.0.1')
      url_infos = None  # nothing is downloaded

      def _info(self):
        return tfds.core.DatasetInfo(
          builder=self,
          features=tfds.features.FeaturesDict({
            'image': tfds.features.Image(shape=(28, 28, 1)),
            'label': tfds.features.ClassLabel(num_classes=10),
          }),
          supervised_keys=('image', 'label'),
        )  # fmt: skip

      def _split_generators(self, dl_manager):
        del dl_manager
        return {
          'train': self._generate_examples(0, 7),
          'test': self._generate_examples(7, 10),
        }

      def _generate_examples(self, start, stop):
        for i in range(start, stop):
          yield i, {'image': _digit(i), 'label': i}

  return Mnist


def _digit(i):
  return (np.arange(784, dtype=np.uint8) + 20 * i).reshape(28, 28, 1)


@pytest.mark.slow
@pytest.mark.parametrize('stored', ['tfrecord', 'array_record'])
def test_tfds_mnist(tmp_path, config, stored):
  tfds.disable_progress_bar()
  builder = _tfds_mnist()(data_dir=tmp_path, file_format=stored)
  builder.download_and_prepare()
  config.data.dir = str(tmp_path)
  for split, expected in (('train', range(7)), ('test', range(7, 10))):
    source = opening.source(config, 'tfds:mnist', split=split)
    assert source.kind == 'encoded' and source.vocabulary.names == _DIGITS
    images, labels = source.read(np.arange(len(source)))
    assert sorted(labels.tolist()) == list(expected)
    for image, label in zip(images, labels):
      with Image.open(io.BytesIO(image)) as file:
        pixels = np.asarray(file)
      np.testing.assert_array_equal(pixels, _digit(int(label))[..., 0])


def test_tfds_cifar10_that_is_not_prepared(tmp_path, config):
  config.data.dir = str(tmp_path)
  opening.refused(
    [
      tmp_path,
      "no prepared set 'cifar10'",
      f'tfds build cifar10 --data_dir={tmp_path}',
    ],
    config,
    'tfds:cifar10',
  )
