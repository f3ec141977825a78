"""oneDNN's operations, called without XLA."""

import ctypes
from unittest import mock

import numpy as np
import pytest

from anp_jax.system.onednn import c_api, library, onednn_convolution, operations, pieces, specs
from tests import layer_references, onednn_here

_FORWARD = specs.ConvolutionSpec(
  'forward', 'float32', (2, 9, 8, 16), (3, 3, 16, 24), (2, 9, 8, 24), 1, (1, 1, 1, 1)
)
_DIRECTIONS = ('forward', 'backward_data', 'backward_weights')
_NORM = specs.BatchNormSpec('forward', 'float32', (3, 20, 16), 1e-5, True)


@pytest.fixture
def api():
  return library.find().api


def _random(seed, shape):
  return np.random.default_rng(seed).normal(size=shape).astype('float32')


def _arrays(spec):
  """An operation's arguments and, last, its result."""
  shapes = spec.image, spec.kernel, spec.result
  image, kernel, result = (_random(i, s) for i, s in enumerate(shapes))
  return {
    'forward': (image, kernel, result),
    'backward_data': (result, kernel, image),
    'backward_weights': (image, result, kernel),
  }[spec.direction]


def _run(operation, arrays):
  operation.run(*(a.ctypes.data for a in arrays))
  return arrays[-1]


@pytest.mark.parametrize(
  'spec',
  [
    _FORWARD,
    _FORWARD._replace(groups=4, pads=(0, -1, 2, 1)),
    _FORWARD._replace(after=('norm', 'add', 'relu')),
    _NORM,
    _NORM._replace(epsilon=1.25e-3, dtype='bfloat16', relu=False),
  ],
)
def test_a_name_says_all_of_an_operation(spec):
  again = specs.parse(specs.name(spec))
  assert again == spec and type(again) is type(spec)


def test_a_name_is_read_and_not_run():
  for text in ('convolution exit(3)', 'norm __import__("os").getpid()'):
    with pytest.raises(ValueError):
      specs.parse(text)


@onednn_here.needed
def test_an_operation_is_made_once(api):
  first = operations.create(api, specs.name(_FORWARD), 2)
  assert operations.create(api, specs.name(_FORWARD), 2) is first
  assert operations.create(api, specs.name(_NORM), 2) is not first
  # It is divided among as many threads as there were when it was made.
  assert operations.create(api, specs.name(_FORWARD), 1) is not first


@onednn_here.needed
def test_scratch_memory_grows_and_lies_on_pages(api, monkeypatch):
  memory = pieces.Scratch(api)
  for size in (0, 1, 5000, 100, 2_000_000):
    address = memory.reserve(size)
    assert address % 4096 == 0
    ctypes.memset(address, 1, size)  # all of it may be written
  assert memory.reserve(10) == address  # no smaller one replaces it
  with monkeypatch.context() as patch, pytest.raises(MemoryError):
    patch.setattr(ctypes, 'create_string_buffer', mock.Mock(side_effect=MemoryError))
    memory.reserve(4_000_000)
  ctypes.memset(memory.reserve(100), 1, 100)  # what was not there is asked for again


@onednn_here.needed
@pytest.mark.parametrize('direction', _DIRECTIONS)
def test_what_scratch_memory_held_does_not_matter(api, direction, monkeypatch):
  spec = _FORWARD._replace(direction=direction)
  operation = onednn_convolution.Convolution(api, spec, 2)
  arrays = _arrays(spec)
  want = _run(operation, arrays).copy()
  reserve = pieces.Scratch.reserve
  for fill in (0xFF, 0x7F):  # as float32: NaN, and 3e38

    def filled(memory, size, fill=fill):
      address = reserve(memory, size)
      ctypes.memset(address, fill, size)
      return address

    monkeypatch.setattr(pieces.Scratch, 'reserve', filled)
    arrays[-1].fill(np.nan)
    np.testing.assert_array_equal(_run(operation, arrays), want)


@onednn_here.needed
@pytest.mark.parametrize('direction', _DIRECTIONS)
def test_an_operation_writes_only_its_result(api, direction):
  spec = _FORWARD._replace(direction=direction)
  operation = onednn_convolution.Convolution(api, spec, 2)
  edge = 64
  buffers = [np.pad(a.ravel(), edge, constant_values=7) for a in _arrays(spec)]
  before = [b.copy() for b in buffers]
  inner = [b[edge:-edge] for b in buffers]
  _run(operation, inner)
  for buffer, old in zip(buffers[:2], before):
    np.testing.assert_array_equal(buffer, old)
  assert (inner[2] != before[2][edge:-edge]).all()
  np.testing.assert_array_equal(buffers[2][:edge], 7)
  np.testing.assert_array_equal(buffers[2][-edge:], 7)


@onednn_here.needed
def test_an_array_that_is_awaited_is_not_read(api):
  spec = _FORWARD._replace(direction='backward_weights')
  x, dy, dkernel = _arrays(spec)
  operation = onednn_convolution.Convolution(api, spec, 2)
  want = _run(operation, (x, dy, dkernel))
  result = np.zeros_like(dkernel)
  # No memory is there: to read it would end the process.
  operation.run(x.ctypes.data, dy.ctypes.data, 1, result.ctypes.data)
  np.testing.assert_array_equal(result, want)


@onednn_here.needed
def test_groups_of_a_norm_are_their_own(api):
  groups, rows, channels = _NORM.shape
  x = _random(0, _NORM.shape) * [[[1]], [[10]], [[100]]] + [[[0]], [[5]], [[9]]]
  x = x.astype('float32')
  scale, shift = _random(1, (2, channels))
  y, statistics = np.zeros_like(x), np.zeros((2, groups, channels), 'float32')
  norm = operations.BatchNorm(api, _NORM, 2)
  mask = np.zeros((groups, norm.mask_bytes), 'uint8')
  arrays = (x, scale, shift, y, *statistics, mask)
  norm.run(*(a.ctypes.data for a in arrays))
  wide = np.float64(x)
  mean, var = wide.mean(1), wide.var(1)
  np.testing.assert_allclose(statistics[0], mean, rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(statistics[1], var, rtol=1e-5)
  unit = (wide - mean[:, None]) / np.sqrt(var + 1e-5)[:, None]
  np.testing.assert_allclose(y, np.maximum(unit * scale + shift, 0), atol=1e-4)
  assert norm.mask_bytes >= rows * channels / 8


def _cut(direction, dtype, size, channels, features):
  """A spec of eight images, enough to be cut into pieces."""
  side = 6
  return specs.ConvolutionSpec(
    direction,
    dtype,
    (8, side, side, channels),
    (size, size, channels, features),
    (8, side, side, features),
    1,
    (size // 2,) * 4,
  )


def _wide_reference(spec, arrays):
  """The result in float64, tap by tap."""
  first, second, result = arrays
  image, kernel, dy = {
    'forward': (first, second, result),
    'backward_data': (result, second, first),
    'backward_weights': (first, result, second),
  }[spec.direction]
  pads = [(spec.pads[0],) * 2] * 2
  results = layer_references.convolution(image, kernel, 1, pads, dy=dy)
  return results[_DIRECTIONS.index(spec.direction)]


@onednn_here.needed
@pytest.mark.parametrize('direction', _DIRECTIONS)
@pytest.mark.parametrize(
  ('size', 'channels', 'features'), [(3, 64, 64), (1, 512, 256), (3, 48, 72), (1, 512, 2048)]
)
@pytest.mark.parametrize('threads', [1, 2, 8])
def test_pieces_make_the_whole(api, direction, size, channels, features, threads):
  for dtype in library.find().dtypes:
    spec = _cut(direction, dtype, size, channels, features)
    arrays = [a.astype(dtype) for a in _arrays(spec)]
    operation = onednn_convolution.Convolution(api, spec, threads)
    result = np.float64(_run(operation, arrays))
    want = _wide_reference(spec, arrays)
    error = np.abs(result - want).max() / np.abs(want).max()
    # As a whole convolution's: float32 sums, bfloat16's rounding of the result.
    assert error < {'float32': 2e-6, 'bfloat16': 4.1e-3}[dtype], dtype
    counts = [len(phase) for phase in operation.phases]
    if direction == 'backward_weights':  # large kernels of small maps: whole
      assert max(counts) == 1 and operation.threads == threads
    else:
      assert max(counts) == threads and operation.threads == 1


@onednn_here.needed
def test_a_large_kernel_is_copied_and_summed_by_slices(api):
  """Each slice of either kernel has a place of its own."""
  spec = _cut('forward', 'float32', 3, 128, 256)
  copies = onednn_convolution.Convolution(api, spec, 2).phases[0]
  assert len(copies) == 2
  assert {piece.places[0] for piece in copies} != {(1, 0)}
  # oneDNN may pad these features, or channels, to a multiple of 48: the others are cut.
  for direction in ('forward', 'backward_data'):
    padded = _cut(direction, library.find().dtypes[-1], 1, 512, 2048)
    assert len(onednn_convolution.Convolution(api, padded, 2).phases[0]) == 2
  # Few features of many pixels: the parts' gradients are added.
  image, result = (8, 48, 48, 128), (8, 48, 48, 512)
  gradient = specs.ConvolutionSpec(
    'backward_weights',
    'bfloat16' if 'bfloat16' in library.find().dtypes else 'float32',
    image,
    (1, 1, 128, 512),
    result,
    1,
    (0,) * 4,
  )
  x, dy, dkernel = (a.astype(gradient.dtype) for a in _arrays(gradient))
  operation = onednn_convolution.Convolution(api, gradient, 2)
  assert [len(phase) for phase in operation.phases] == [2, 2]
  result = np.float64(_run(operation, (x, dy, dkernel)))[0, 0]
  want = np.einsum(
    'nc,nf->cf', np.float64(x).reshape(-1, 128), np.float64(dy).reshape(-1, 512), optimize=True
  )
  assert np.abs(result - want).max() / np.abs(want).max() < 4.1e-3


@onednn_here.needed
@pytest.mark.parametrize(
  ('images', 'threads', 'parts'),
  [(8, 2, (2, 1)), (9, 2, (3, 1)), (7, 2, (1, 2)), (8, 1, (1, 1)), (36, 16, (18, 1))],
)
def test_a_batch_is_cut_into_equal_parts_or_not_at_all(images, threads, parts):
  assert pieces.count_parts(images, threads, 1e9) == parts
  assert pieces.count_parts(images, threads, 1e5) == (1, 1)


@onednn_here.needed
@pytest.mark.parametrize(
  'change', [{'result': (2, 9, 9, 24)}, {'groups': 5}, {'image': (2, 9, 8, 15)}, {'stride': 0}]
)
def test_shapes_that_do_not_fit_are_an_error(api, change):
  with pytest.raises(c_api.OneDnnError, match='status'):
    onednn_convolution.Convolution(api, _FORWARD._replace(**change), 2)


@onednn_here.needed
def test_the_slow_reference_is_an_error(api, monkeypatch):
  monkeypatch.setattr(c_api.Api, 'implementation', lambda *_: 'ref:any')
  for make, spec in ((onednn_convolution.Convolution, _FORWARD), (operations.BatchNorm, _NORM)):
    with pytest.raises(c_api.OneDnnError, match='only ref:any'):
      make(api, spec, 2)


@onednn_here.needed
def test_a_fault_of_a_run_is_an_error(api, monkeypatch):
  operation, arrays = (onednn_convolution.Convolution(api, _FORWARD, 2), _arrays(_FORWARD))
  primitive = operation.phases[-1][0].primitive
  monkeypatch.setattr(primitive, '_primitive', None)
  with pytest.raises(c_api.OneDnnError, match='status'):
    _run(operation, arrays)


@onednn_here.needed
def test_a_number_of_threads_that_another_library_set_is_noticed(api):
  """OpenMP keeps one number for a thread, whoever sets it."""
  for count in (2, 3):
    api.use_threads(count)
    api.functions.omp_set_num_threads(1)
    api.use_threads(count)
    assert api.functions.omp_get_max_threads() == count


@onednn_here.needed
def test_no_more_pieces_at_once_than_threads(api):
  norms = [operations.BatchNorm(api, _NORM, n) for n in (1, 3, 2)]
  assert [(n.at_once, n.threads) for n in norms] == [(1, 1), (3, 1), (1, 2)]
  # Three groups, computed one after another where they cannot be divided.
  assert [list(map(len, n.phases)) for n in norms] == [[3], [3], [1, 1, 1]]
  spec = _cut('forward', 'float32', 3, 64, 64)._replace(image=(9, 6, 6, 64), result=(9, 6, 6, 64))
  cut = onednn_convolution.Convolution(api, spec, 2)
  assert (cut.at_once, cut.threads, len(cut.phases[-1])) == (2, 1, 3)
