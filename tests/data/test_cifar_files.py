"""Tests of raw_files: CIFAR-10's files, whole and broken, byte by byte."""

import os
import pickle
import struct
import warnings

import numpy as np
import pytest

from anp_jax.data.input import batch_plan, pipeline
from anp_jax.data.sources import arrays as arrays_lib
from tests import opening, raw_data


@pytest.fixture(params=['binary', 'python'])
def form(request):
  return request.param


def _assert_whole(root, names=raw_data.KINDS):
  contents = raw_data.contents()
  images, shape, labels, class_names = raw_data.read(root)
  assert shape == (32, 32, 3) and class_names == names
  assert labels == [n for name in raw_data.BATCHES for n in contents[name][0]]
  assert labels[:4] == [3, 0, 7, 4]
  assert images == [raw_data.pixels(raw_data.planes(seed)) for seed in range(8)]
  for split in ('test', 'validation'):
    images, _, labels, class_names = raw_data.read(root, split)
    assert labels == contents['test_batch'][0] and class_names == names
    assert images == [raw_data.pixels(raw_data.planes(seed)) for seed in range(8, 12)]


def test_hand_made_pickle_is_what_it_should_be():
  """Python's own reader agrees, in the way CIFAR-10's page says to read it."""
  data = bytes(range(256)) * 24
  with warnings.catch_warnings():
    warnings.simplefilter('ignore')  # NumPy's, of Python 2's booleans
    batch = pickle.loads(raw_data.python2_batch([3, 255], data), encoding='bytes')
  assert list(batch) == [b'batch_label', b'labels', b'data', b'filenames']
  assert batch[b'labels'] == [3, 255]
  assert batch[b'data'].shape == (2, 3072) and batch[b'data'].dtype == np.uint8
  assert batch[b'data'].tobytes() == data


def test_cifar(tmp_path, form):
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    _assert_whole(raw_data.cifar(tmp_path, form))


def test_cifar_pixel_by_hand(tmp_path, form):
  """Row 1, column 2 of channel c is byte 1024 c + 34 of an image."""
  raw_data.cifar(tmp_path, form)
  image = arrays_lib.Arrays(str(tmp_path), 'train').read(np.array([5]))[0][0]
  planes = raw_data.planes(5)
  assert image[1, 2].tolist() == [planes[34], planes[1058], planes[2082]]
  assert len({*image[1, 2].tolist(), planes[65]}) == 4  # no two alike


def test_cifar_in_a_batch_of_evaluation(tmp_path, config, form):
  """At its own size an image reaches the network as it is on disk."""
  config.data.image_size = config.data.resize = 32
  source = arrays_lib.Arrays(str(raw_data.cifar(tmp_path, form)), 'validation')
  plan = batch_plan.BatchPlan(config, 4, 4, np.arange(4), training=False)
  (batch,) = pipeline.batches(source, plan)
  images = [image.tobytes() for image in batch['image']]
  assert images == [raw_data.pixels(raw_data.planes(seed)) for seed in range(8, 12)]
  assert batch['label'].tolist() == raw_data.contents()['test_batch'][0]
  assert batch['image'].flags.c_contiguous


def test_cifar_without_names(tmp_path, form):
  _assert_whole(raw_data.cifar(tmp_path, form, names=None), raw_data.DIGITS)


def test_cifar_in_the_archives_folder(tmp_path, form):
  name = {'binary': 'bin', 'python': 'py'}[form]
  raw_data.cifar(tmp_path / f'cifar-10-batches-{name}', form)
  _assert_whole(tmp_path)


def test_cifar_written_again_by_python_3(tmp_path):
  root = raw_data.cifar(tmp_path, 'python')
  for protocol, (name, (labels, seeds)) in enumerate(raw_data.contents().items()):
    data = np.frombuffer(b''.join(map(raw_data.planes, seeds)), np.uint8)
    batch = {'data': data.reshape(-1, 3072), 'labels': np.array(labels)}
    if protocol % 2:  # as kept from a reading with encoding='bytes'
      batch = {key.encode(): value for key, value in batch.items()}
    (root / name).write_bytes(pickle.dumps(batch, protocol))
  _assert_whole(root)


def test_cifar_arrays_of_numpy_2(tmp_path):
  root = raw_data.cifar(tmp_path, 'python')
  for name in raw_data.contents():
    data = (root / name).read_bytes()
    assert b'cnumpy.core.multiarray' in data
    data = data.replace(b'cnumpy.core.multi', b'cnumpy._core.multi')
    (root / name).write_bytes(data)
  _assert_whole(root)


@pytest.mark.parametrize('module', [b'numpy.core', b'numpy._core'])
def test_cifar_arrays_of_protocol_5(tmp_path, module):
  root = raw_data.cifar(tmp_path, 'python')
  for name, (labels, seeds) in raw_data.contents().items():
    data = b''.join(map(raw_data.planes, seeds))
    array = (
      b'c'
      + module
      + b'.numeric\n_frombuffer\n('
      + (b'B' + struct.pack('<I', len(data)) + data)
      + raw_data.UINT8
      + (raw_data.number(len(seeds)) + raw_data.number(3072) + b'\x86')
      + b'VC\ntR'
    )
    (root / name).write_bytes(raw_data.python2_batch(labels, data, data=array))
  _assert_whole(root)


def test_cifar_batch_that_is_missing(tmp_path, config, form):
  for name in ('data_batch_1', 'data_batch_4'):
    file = raw_data.cifar_file(raw_data.cifar(tmp_path, form), form, name)
    file.unlink()
    opening.refused([tmp_path, f'no file {file.name};'], config, 'arrays', tmp_path)
  file = raw_data.cifar_file(tmp_path, form, 'test_batch')
  file.unlink()
  opening.refused([tmp_path, f'no file {file.name};'], config, 'arrays', tmp_path, 'test')


@pytest.mark.parametrize('left', [0, 1, 3072, 3074, 2 * 3073 - 1])
def test_bad_binary_cifar(tmp_path, config, left):
  file = raw_data.cifar(tmp_path, 'binary') / 'data_batch_3.bin'
  file.write_bytes(file.read_bytes()[:left])
  opening.refused([file, f'{left} bytes', '3073'], config, 'arrays', tmp_path)


def test_cifar_labels_out_of_range(tmp_path, config, form):
  file = raw_data.cifar_file(raw_data.cifar(tmp_path, form), form, 'data_batch_2')
  planes = raw_data.planes(0)
  file.write_bytes(b'\x0a' + planes if form == 'binary' else raw_data.python2_batch([10], planes))
  opening.refused([file, '10 to 10', '0 to 9'], config, 'arrays', tmp_path)


def test_cifar_with_too_few_names(tmp_path, config, form):
  raw_data.cifar(tmp_path, form, names=raw_data.KINDS[:7])
  opening.refused(
    [raw_data.cifar_file(tmp_path, form, 'data_batch_2'), '7', '0 to 6'], config, 'arrays', tmp_path
  )


@pytest.mark.parametrize('text', [b'', b'\n\n', b'a\n\nb\n', b'\na\nb\n', b'a\n \nb\n', b'\xff\n'])
def test_bad_names_of_binary_cifar(tmp_path, config, text):
  file = raw_data.cifar(tmp_path, 'binary') / 'batches.meta.txt'
  file.write_bytes(text)
  opening.refused([file], config, 'arrays', tmp_path)


def test_names_with_the_lines_of_windows(tmp_path):
  file = raw_data.cifar(tmp_path, 'binary') / 'batches.meta.txt'
  file.write_bytes('\r\n'.join(raw_data.KINDS).encode() + b'\r\n\r\n')
  _assert_whole(tmp_path)


@pytest.mark.parametrize(
  'meta',
  [
    raw_data.python2_dict(names=raw_data.list_of([])),
    raw_data.python2_dict(label_names=raw_data.list_of([])),
    raw_data.python2_dict(
      label_names=raw_data.list_of([raw_data.string(b'cat'), raw_data.string(b'')])
    ),
    raw_data.python2_dict(label_names=raw_data.list_of([raw_data.number(1)])),
    raw_data.python2_dict(label_names=raw_data.list_of([raw_data.string(b'\xff')])),
    raw_data.python2_dict(label_names=raw_data.string(b'cat')),
    raw_data.python2_dict(
      label_names=raw_data.list_of([raw_data.list_of([]), raw_data.list_of([raw_data.number(1)])])
    ),
    b'\x80\x02K\x05.',
    b'cat',
  ],
)
def test_bad_names_of_python_cifar(tmp_path, config, meta):
  file = raw_data.cifar(tmp_path, 'python') / 'batches.meta'
  file.write_bytes(meta)
  opening.refused([file], config, 'arrays', tmp_path)


_TWO = raw_data.planes(0) + raw_data.planes(1)


@pytest.mark.parametrize(
  'batch, words',
  [
    (raw_data.python2_batch([1, 2], _TWO)[:-1], []),
    (raw_data.python2_batch([1, 2], _TWO)[:3000], []),
    (b'', []),
    (b'PK\3\4', []),
    (b'\x80\x02K\x05.', ['data']),
    (raw_data.python2_dict(labels=raw_data.list_of([])), ["'data'"]),
    (raw_data.python2_dict(data=raw_data.python2_array(_TWO, 2, 3072)), ["'labels'"]),
    (raw_data.python2_batch([1], _TWO), ['(1,)', '2 whole']),
    (raw_data.python2_batch([1, 2, 3], _TWO), ['(3,)', '2 whole']),
    (raw_data.python2_batch([1, 2], _TWO, labels=raw_data.python2_array(b'ab', 2, 1)), ['(2, 1)']),
    (raw_data.python2_batch([1, 2], _TWO, labels=raw_data.list_of([b'N', b'N'])), ['object']),
    (
      raw_data.python2_batch([1, 2], _TWO, data=raw_data.python2_array(_TWO, 3072, 2)),
      ['(3072, 2)', 'expected uint8 (n, 3072)'],
    ),
    (raw_data.python2_batch([1, 2], _TWO, data=raw_data.python2_array(_TWO, 6144)), ['(6144,)']),
    (raw_data.python2_batch([1, 2], _TWO, data=raw_data.python2_array(_TWO, 3, 3072)), []),
    (raw_data.python2_batch([1, 2], _TWO, data=raw_data.string(_TWO)), ['expected uint8']),
    (raw_data.python2_batch([1, 2], _TWO).replace(b'u1', b'i1'), ['int8']),
  ],
)
def test_bad_python_cifar(tmp_path, config, batch, words):
  file = raw_data.cifar(tmp_path, 'python') / 'data_batch_2'
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
  file = raw_data.cifar(tmp_path / 'set', 'python') / name
  file.write_bytes(attack)
  opening.refused(
    [file, f"refused '{os.system.__module__}.system'"], config, 'arrays', tmp_path / 'set'
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
  file = raw_data.cifar(tmp_path, 'python') / 'data_batch_1'
  file.write_bytes(code)
  opening.refused([file, refused], config, 'arrays', tmp_path)
