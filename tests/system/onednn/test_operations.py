"""oneDNN's operations, called without XLA."""

import concurrent.futures
import ctypes

import numpy as np
import pytest

from anp_jax.system.onednn import c_api
from anp_jax.system.onednn import library
from anp_jax.system.onednn import operations

needs_library = pytest.mark.skipif(
  library.find() is None, reason=f'no oneDNN: {library.missing_reason()}'
)
_FORWARD = operations.ConvolutionSpec(
  'forward', 'float32', (2, 9, 8, 16), (3, 3, 16, 24), (2, 9, 8, 24), 1,
  (1, 1, 1, 1),
)  # fmt: skip
_DIRECTIONS = ('forward', 'backward_data', 'backward_weights')
_NORM = operations.BatchNormSpec('forward', 'float32', (3, 20, 16), 1e-5, True)


@pytest.fixture
def api():
  return library.find().api


def _random(seed, shape):
  return np.random.default_rng(seed).normal(size=shape).astype('float32')


def _arrays(spec, seed=0):
  """An operation's arguments and, last, its result."""
  image, kernel, result = (
    _random(seed + i, s)
    for i, s in enumerate((spec.image, spec.kernel, spec.result))
  )
  return {
    'forward': (image, kernel, result),
    'backward_data': (result, kernel, image),
    'backward_weights': (image, result, kernel),
  }[spec.direction]


def _run(operation, memory, arrays):
  operation.run(memory, *(a.ctypes.data for a in arrays))
  return arrays[-1]


def _center(spec, arrays):
  """The result of a kernel's middle, where a 3x3 window is whole."""
  x, kernel, _ = (np.float64(a) for a in arrays)
  return np.einsum('bijc,ijcf->bf', x[:, 3:6, 2:5], kernel)


@pytest.mark.parametrize(
  'spec',
  [_FORWARD, _FORWARD._replace(groups=4, waits=True, pads=(0, -1, 2, 1)),
   _NORM, _NORM._replace(epsilon=1.25e-3, dtype='bfloat16', relu=False)],
)  # fmt: skip
def test_a_name_says_all_of_an_operation(spec):
  again = operations.parse(operations.name(spec))
  assert again == spec and type(again) is type(spec)


def test_a_name_is_read_and_not_run():
  for text in ('convolution exit(3)', 'norm __import__("os").getpid()'):
    with pytest.raises(ValueError):
      operations.parse(text)


@needs_library
def test_an_operation_is_made_once(api):
  first = operations.create(api, operations.name(_FORWARD), 2)
  assert operations.create(api, operations.name(_FORWARD), 2) is first
  assert operations.create(api, operations.name(_NORM), 2) is not first
  # It is divided among as many threads as there were when it was made.
  assert operations.create(api, operations.name(_FORWARD), 1) is not first


@needs_library
def test_scratch_memory_grows_and_lies_on_pages(api):
  memory = operations.Scratch(api)
  for size in (0, 1, 5000, 100, 2_000_000):
    address = memory.reserve(size)
    assert address % 4096 == 0
    ctypes.memset(address, 1, size)  # all of it may be written
  assert memory.reserve(10) == address  # no smaller one replaces it


@needs_library
@pytest.mark.parametrize('direction', _DIRECTIONS)
def test_what_scratch_memory_held_does_not_matter(api, direction):
  spec = _FORWARD._replace(direction=direction)
  operation, memory = operations.Convolution(api, spec), operations.Scratch(api)
  arrays = _arrays(spec)
  want = _run(operation, memory, arrays).copy()
  for fill in (0xFF, 0x7F):  # as float32: NaN, and 3e38
    size = 1 << 20
    ctypes.memset(memory.reserve(size), fill, size)
    arrays[-1].fill(np.nan)
    np.testing.assert_array_equal(_run(operation, memory, arrays), want)


@needs_library
@pytest.mark.parametrize('direction', _DIRECTIONS)
def test_an_operation_writes_only_its_result(api, direction):
  spec = _FORWARD._replace(direction=direction)
  operation, memory = operations.Convolution(api, spec), operations.Scratch(api)
  edge = 64
  buffers = [np.pad(a.ravel(), edge, constant_values=7) for a in _arrays(spec)]
  before = [b.copy() for b in buffers]
  inner = [b[edge:-edge] for b in buffers]
  _run(operation, memory, inner)
  for buffer, old in zip(buffers[:2], before):
    np.testing.assert_array_equal(buffer, old)
  assert (inner[2] != before[2][edge:-edge]).all()
  np.testing.assert_array_equal(buffers[2][:edge], 7)
  np.testing.assert_array_equal(buffers[2][-edge:], 7)


@needs_library
def test_an_array_that_is_awaited_is_not_read(api):
  spec = _FORWARD._replace(direction='backward_weights')
  x, dy, dkernel = _arrays(spec)
  memory = operations.Scratch(api)
  want = _run(operations.Convolution(api, spec), memory, (x, dy, dkernel))
  waiting = operations.Convolution(api, spec._replace(waits=True))
  result = np.zeros_like(dkernel)
  # No memory is there: to read it would end the process.
  waiting.run(memory, x.ctypes.data, dy.ctypes.data, 1, result.ctypes.data)
  np.testing.assert_array_equal(result, want)


@needs_library
def test_threads_share_an_operation(api):
  """Each with arrays of its own, all at once, many times."""
  operation = operations.Convolution(api, _FORWARD)
  sets = [_arrays(_FORWARD, 10 * i) for i in range(8)]
  wants = [_center(_FORWARD, arrays) for arrays in sets]

  def compute(arrays):
    library.find().set_threads()
    memory = operations.Scratch(api)
    results = []
    for _ in range(40):
      arrays[-1].fill(0)
      results.append(_run(operation, memory, arrays).copy())
    return results

  with concurrent.futures.ThreadPoolExecutor(len(sets)) as pool:
    for results, want in zip(pool.map(compute, sets), wants):
      # float32 sums of 144 terms of order one.
      np.testing.assert_allclose(results[0][:, 4, 3], want, atol=1e-4)
      for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


@needs_library
def test_groups_of_a_norm_are_their_own(api):
  groups, rows, channels = _NORM.shape
  x = _random(0, _NORM.shape) * [[[1]], [[10]], [[100]]] + [[[0]], [[5]], [[9]]]
  x = x.astype('float32')
  scale, shift = _random(1, (2, channels))
  y, statistics = np.zeros_like(x), np.zeros((2, groups, channels), 'float32')
  norm = operations.BatchNorm(api, _NORM)
  mask = np.zeros((groups, norm.mask_bytes), 'uint8')
  arrays = (x, scale, shift, y, *statistics, mask)
  norm.run(operations.Scratch(api), *(a.ctypes.data for a in arrays))
  wide = np.float64(x)
  mean, var = wide.mean(1), wide.var(1)
  np.testing.assert_allclose(statistics[0], mean, rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(statistics[1], var, rtol=1e-5)
  unit = (wide - mean[:, None]) / np.sqrt(var + 1e-5)[:, None]
  np.testing.assert_allclose(y, np.maximum(unit * scale + shift, 0), atol=1e-4)
  assert norm.mask_bytes >= rows * channels / 8


@needs_library
@pytest.mark.parametrize(
  'change',
  [{'result': (2, 9, 9, 24)}, {'groups': 5}, {'image': (2, 9, 8, 15)},
   {'stride': 0}],
)  # fmt: skip
def test_shapes_that_do_not_fit_are_an_error(api, change):
  with pytest.raises(c_api.OneDnnError, match='status'):
    operations.Convolution(api, _FORWARD._replace(**change))


@needs_library
def test_the_slow_reference_is_an_error(api, monkeypatch):
  monkeypatch.setattr(c_api.Api, 'implementation', lambda *_: 'ref:any')
  for make, spec in (
    (operations.Convolution, _FORWARD), (operations.BatchNorm, _NORM),
  ):  # fmt: skip
    with pytest.raises(c_api.OneDnnError, match='only ref:any'):
      make(api, spec)


@needs_library
def test_a_fault_of_a_run_is_an_error(api, monkeypatch):
  operation = operations.Convolution(api, _FORWARD)
  memory, arrays = operations.Scratch(api), _arrays(_FORWARD)
  place = operation._reorder or operation._primitive
  monkeypatch.setattr(place, '_primitive', None)
  with pytest.raises(c_api.OneDnnError, match='status'):
    _run(operation, memory, arrays)


def test_scratch_memory_that_was_not_there_is_asked_for_again(monkeypatch, api):
  memory = operations.Scratch(api)
  memory.reserve(10_000)

  def fail(size):
    raise MemoryError

  with monkeypatch.context() as patch, pytest.raises(MemoryError):
    patch.setattr(operations.ctypes, 'create_string_buffer', fail)
    memory.reserve(20_000)
  sizes = []
  make = operations.ctypes.create_string_buffer
  monkeypatch.setattr(
    operations.ctypes,
    'create_string_buffer',
    lambda size: sizes.append(size) or make(size),
  )
  memory.reserve(100)
  assert sizes and sizes[0] >= 100
