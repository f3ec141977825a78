"""Files that PyTorch writes, read without it."""

import collections
import pickle
import random
import zipfile

import ml_dtypes
import numpy as np
import pytest

from anp_jax import config as config_lib
from anp_jax.checkpoint.weights import published_weights, torch_files
from tests import builders, mutations

_FORMS = pytest.mark.parametrize('is_zip', [True, False])


def _save(path, value, is_zip):
  torch = pytest.importorskip('torch')
  torch.save(value, path, _use_new_zipfile_serialization=is_zip)


def _state(torch):
  """Tensors of each kind that a file of weights can have."""
  numbers = torch.arange(24.0).reshape(2, 3, 4)
  return collections.OrderedDict(
    numbers=numbers,
    transposed=numbers.permute(2, 0, 1),
    part=numbers[1, 1:],
    one_number=torch.tensor(7),
    empty=torch.zeros(0, 3),
    parameter=torch.nn.Parameter(numbers[0]),
    **{str(t): torch.arange(5).to(t) for t in (torch.float64, torch.float16, torch.bfloat16)},
    **{str(t): torch.arange(5).to(t) for t in (torch.int32, torch.int8, torch.uint8, torch.bool)},
  )


@_FORMS
@pytest.mark.parametrize('key', ['', 'state_dict', 'model'])
def test_tensors_are_those_of_torch(tmp_path, is_zip, key):
  torch = pytest.importorskip('torch')
  state, path = _state(torch), str(tmp_path / 'x.pth')
  extras = {'epoch': 3, 'optimizer': {'momentum': torch.zeros(2)}}
  _save(path, {key: state, **extras} if key else state, is_zip)
  got = torch_files.read(path)
  assert list(got) == list(state)
  for name, want in state.items():
    assert got[name].shape == tuple(want.shape), name
    assert str(want.dtype) == f'torch.{got[name].dtype}', name
    np.testing.assert_array_equal(got[name].astype('f8'), want.detach().double().numpy(), name)


@_FORMS
def test_modules_of_torch_are_read_with_their_wrappers_removed(tmp_path, is_zip):
  torch = pytest.importorskip('torch')
  module = torch.nn.DataParallel(torch.nn.Sequential(torch.nn.Linear(3, 2)))
  path = str(tmp_path / 'x.pt')
  _save(path, module.state_dict(), is_zip)
  assert {n: v.shape for n, v in published_weights.tensors(path).items()} == {
    '0.weight': (2, 3),
    '0.bias': (2,),
  }
  # A numbers module names its classes.
  _save(path, module.module, is_zip)
  builders.assert_refused(r'cannot be read: .*Sequential is none', published_weights.tensors, path)


class _Malicious:
  """Makes a file when it is unpickled."""

  def __init__(self, path):
    self.path = path

  def __reduce__(self):
    return open, (self.path, 'w')


def _pickled(value):
  """Its bytes in each form: that of today, and the one before."""
  yield 'zip', pickle.dumps(value, 2)
  header = (0x1950A86A20F9469CFC6C, 1001, {'little_endian': True})
  yield 'pickles', b''.join(pickle.dumps(v, 2) for v in (*header, value))


@pytest.mark.parametrize(
  'value', [{'a': 1}, 3, {'state_dict': [1]}, _Malicious], ids=['numbers', 'int', 'list', 'code']
)
def test_what_is_no_dictionary_of_tensors_is_one_line(tmp_path, value):
  trace = tmp_path / 'trace'
  for form, data in _pickled(value(str(trace)) if value is _Malicious else value):
    path = tmp_path / f'{form}.pth'
    if form == 'zip':
      with zipfile.ZipFile(path, 'w') as archive:
        archive.writestr('x/data.pkl', data)
    else:
      path.write_bytes(data)
    with pytest.raises(config_lib.ConfigError, match='expected .* tensors') as e:
      published_weights.read(str(path))
    assert '\n' not in str(e.value) and repr(str(path)) in str(e.value)
  assert not trace.exists()


def _tensor(size, stride):
  """A pickled dictionary of one vector, written by hand."""
  function = "(dS'x'\nctorch._utils\n_rebuild_tensor_v2\n"
  storage = "(S'storage'\nctorch\nFloatStorage\nS'0'\nS'cpu'\nI4\ntQ"
  return f'{function}({storage}I0\n(L{size}L\nt(L{stride}L\ntI00\n(dtRs.'.encode()


@pytest.mark.parametrize(
  'size, stride, is_good',
  [(4, 1, True), (2, 2, True), (5, 1, False), (3, 2, False), (10**12, 0, False), (-1, 1, False)],
)
def test_a_tensor_is_no_larger_than_its_numbers(tmp_path, size, stride, is_good):
  path = tmp_path / 'x.pth'
  with zipfile.ZipFile(path, 'w') as archive:
    archive.writestr('x/data.pkl', _tensor(size, stride))
    archive.writestr('x/data/0', np.arange(4, dtype='f4').tobytes())
  if is_good:
    got = torch_files.read(str(path))['x']
    np.testing.assert_array_equal(got, np.arange(0, 4, stride))
  else:
    with pytest.raises(ValueError, match='beyond its numbers'):
      torch_files.read(str(path))


def test_neither_a_memo_nor_an_archive_grows_without_bounds(tmp_path):
  path = tmp_path / 'x.pth'
  path.write_bytes(b'\x80\x02}r\xff\xff\xff\xff.')  # LONG_BINPUT: 64 GiB of memo
  with pytest.raises(ValueError, match='of another kind'):
    torch_files.read(str(path))
  with zipfile.ZipFile(path, 'w', zipfile.ZIP_DEFLATED) as archive:
    archive.writestr('x/data.pkl', pickle.dumps({}))
  with pytest.raises(ValueError, match='is compressed'):
    torch_files.read(str(path))


def _refused(path, data, words):
  with zipfile.ZipFile(path, 'w') as archive:
    archive.writestr('x/data.pkl', data)
  with pytest.raises(ValueError, match=words):
    torch_files.read(str(path))


def test_a_pickle_changes_no_type_of_the_process(tmp_path):
  before = np.dtype(ml_dtypes.bfloat16).itemsize
  # BUILD calls what has a __setstate__, as a dtype does.
  state = b"(I3\nS'<'\nNNNI1048576\nI1\nI0\nt"
  _refused(tmp_path / 'x.pth', b'ctorch\nBFloat16Storage\n' + state + b'b.', 'expected')
  assert np.dtype(ml_dtypes.bfloat16).itemsize == before == 2


# Views of numbers that hold each other, as tuples do: the last is the memo's second.
_VIEWS = (
  b"ctorch._utils\n_rebuild_tensor_v2\np0\n0(S's'\nctorch\nFloatStorage\nS'0'\nS'cpu'\nI4\ntQ"
  b'p1\np2\n0' + b'g0\n(g1\ng2\ng2\ng2\ntRp2\n0' * 60 + b'g2\n'
)


@pytest.mark.parametrize(
  'nested',
  [
    b')' + b'\x85' * 10**6,  # the hash overflows the stack
    b'K\x01\x85' + b'2\x86' * 60,  # or is of 2^60 numbers
    b'K\x01\x85q\x000' + b'(h\x00h\x00tq\x000' * 60 + b'h\x00',
    b'K\x01\x85' + b'2K\x01\x87' * 60,
    _VIEWS,
    b'(K\x01\x91',  # a frozenset
  ],
  ids=['deep', 'pairs', 'memo', 'triples', 'views', 'set'],
)
def test_a_pickle_hashes_nothing_nested(tmp_path, nested):
  _refused(tmp_path / 'x.pth', b'\x80\x02}' + nested + b'K\x00s.', r'unhashable|KeyError\(145\)')


@_FORMS
@pytest.mark.parametrize('seed', range(3))
def test_damaged_files_are_refused_or_read(tmp_path, is_zip, seed):
  torch = pytest.importorskip('torch')
  path = tmp_path / 'x.pth'
  _save(path, _state(torch), is_zip)
  numbers, draw = path.read_bytes(), random.Random(seed)
  for _ in range(100):
    data = bytearray(numbers[: draw.choice([None, draw.randrange(len(numbers))])])
    for _ in range(draw.randrange(4) if data else 0):
      data[draw.randrange(len(data))] = draw.randrange(256)
    mutations.replace_file(path, bytes(data))
    try:
      for value in torch_files.read(str(path)).values():
        assert value.sum() is not None  # all of it can be read
    except OSError:
      pass  # a place in the archive that is none
    except ValueError as e:
      assert 'expected' in str(e)
