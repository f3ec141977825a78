"""Calls of oneDNN in XLA's programs: bits, processes, threads, errors."""

import concurrent.futures
import functools
import hashlib
import threading
import types
from unittest import mock

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

from anp_jax.models import layers
from anp_jax.parallel import mesh as mesh_lib
from anp_jax.system import flops
from anp_jax.system.onednn import c_api, custom_call, library, pieces, specs, thread_pool
from tests import launching, onednn_here, programs

P = jax.sharding.PartitionSpec
pytestmark = onednn_here.needed
wide_vectors = onednn_here.wide_vectors
_SIDE, _CHANNELS = 10, 64  # enough to be cut into pieces


@pytest.fixture(autouse=True)
def one_count_of_threads(monkeypatch):
  """Bits depend on it, and other tests may have set another."""
  monkeypatch.setattr(library.find(), 'threads', 2)


def _network(x, kernels, scale, platform):
  """Two convolutions with a batch norm in between: what is summed."""
  x = layers.convolve(x, kernels[0], 1, 1, platform)
  norm = layers.BatchNorm(2, platform=platform, relu=True)
  variables = {
    'params': {'scale': scale, 'bias': scale / 2},
    'batch_stats': {'mean': 0 * scale, 'var': scale},
  }
  x, _ = norm.apply(variables, x, True, mutable=['batch_stats'])
  return layers.convolve(x, kernels[1], 2, ((0, 1), (0, 1)), platform)


def _loss(x, kernels, scale, platform='cpu_onednn'):
  y = _network(x, kernels, scale, platform)
  return (y * jnp.arange(y.size).reshape(y.shape) / y.size).sum()


_gradients = jax.jit(jax.value_and_grad(_loss, (0, 1, 2)))


def _arguments(batch=8, seed=0):
  random = np.random.default_rng(seed)
  shapes = ((batch, _SIDE, _SIDE, _CHANNELS), (3, 3, _CHANNELS, 24), (3, 3, 24, 8))
  x, *kernels = (random.normal(size=s).astype('float32') for s in shapes)
  return x, kernels, np.linspace(0.5, 2, 24, dtype='float32')


def _digest(tree):
  data = b''.join(np.asarray(a).tobytes() for a in jax.tree.leaves(tree))
  return hashlib.sha256(data).hexdigest()


def _compare(got, want, tolerance=1e-5):
  """Arrays of two ways to compute: float32 sums of a few hundred terms."""
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    limit = tolerance * np.abs(b).max()
    np.testing.assert_allclose(a, b, rtol=0, atol=limit)


def test_it_is_called_and_agrees_with_xla():
  arguments = _arguments()
  assert onednn_here.calls(_gradients, *arguments) == 8
  by_xla = jax.jit(jax.value_and_grad(functools.partial(_loss, platform='cpu'), (0, 1, 2)))
  assert onednn_here.calls(by_xla, *arguments) == 0
  _compare(_gradients(*arguments), by_xla(*arguments))


def test_ten_repeats_have_the_same_bits():
  arguments = _arguments()
  digests = {_digest(_gradients(*arguments)) for _ in range(10)}
  assert len(digests) == 1
  other = arguments[0] * np.float32(1.0001)
  assert _digest(_gradients(other, *arguments[1:])) not in digests


_PROGRAM = """
import sys
import jax
hits, misses = [], []
jax.monitoring.register_event_listener(
  lambda event, **_: hits.append(event) if event.endswith('cache_hits')
  else misses.append(event) if event.endswith('cache_misses') else 0)
from tests.system.onednn import test_custom_call as test
test.library.find().threads = 2
result = test._digest(test._gradients(*test._arguments()))
print(result, len(hits), len(misses))
"""


def _in_process(folder, **variables):
  """The digest of the gradients in another process, and hits and misses."""
  done = launching.python(
    '-c',
    _PROGRAM,
    JAX_COMPILATION_CACHE_DIR=str(folder),
    JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS='0',
    JAX_DISABLE_MOST_OPTIMIZATIONS='true',
    status=0,
    **variables,
  )
  digest, hits, misses = done.stdout.split()
  return digest, int(hits), int(misses)


@pytest.mark.slow
def test_a_second_process_reads_the_program_and_has_the_same_bits(tmp_path):
  first, hits, misses = _in_process(tmp_path)
  assert hits == 0 and misses > 0
  # Bits depend on the library's count of threads, not on those of the one that traces.
  second, again, missed = _in_process(tmp_path, OMP_NUM_THREADS='3')
  assert first == second and again == misses and missed == 0
  # Compiled for eight devices here, and for one there.
  assert first == _digest(_gradients(*_arguments()))


def test_threads_at_once_have_their_results_and_bits():
  sets = [_arguments(seed=seed) for seed in range(6)]
  wants = [_digest(_gradients(*arguments)) for arguments in sets]
  assert len(set(wants)) == len(sets)

  def compute(arguments):
    return [_digest(_gradients(*arguments)) for _ in range(8)]

  with concurrent.futures.ThreadPoolExecutor(len(sets)) as pool:
    for digests, want in zip(pool.map(compute, sets), wants):
      assert digests == [want] * 8


@pytest.mark.parametrize('devices', [2, 8])
def test_shards_on_devices_have_the_bits_of_one_devices(config, devices):
  x, kernels, scale = _arguments(16)
  mesh = mesh_lib.create(config, jax.devices()[:devices])

  def shard(x, kernels, scale):
    value, gradients = jax.value_and_grad(_loss, (0, 1, 2))(x, kernels, scale)
    return jax.tree.map(lambda a: a[None], (value, gradients))

  program = programs.mapped(shard, mesh, (P(mesh_lib.DATA), P(), P()), P(mesh_lib.DATA))
  result = jax.device_get(program(x, kernels, scale))
  for i, part in enumerate(np.split(x, devices)):
    want = _gradients(part, kernels, scale)
    assert _digest(jax.tree.map(lambda a, i=i: a[i], result)) == _digest(want)


def test_checkpoint_computes_once_more_and_the_same():
  arguments = _arguments()
  again = jax.jit(jax.value_and_grad(jax.checkpoint(_loss), (0, 1, 2)))
  # The first convolution, and the norm; not the last, whose value no gradient
  # needs.
  assert onednn_here.calls(again, *arguments) == 10
  _compare(again(*arguments), _gradients(*arguments), 1e-6)


def test_scan_carries_a_gradient():
  x, kernels, scale = _arguments()
  steps = np.stack([x, -x, 2 * x])

  @jax.jit
  def scanned(steps):
    def one(total, x):
      value, gradient = jax.value_and_grad(_loss, 1)(x, kernels, scale)
      return jax.tree.map(jnp.add, total, gradient), value

    return lax.scan(one, jax.tree.map(jnp.zeros_like, kernels), steps)

  total, values = scanned(steps)
  singles = [_gradients(x, kernels, scale) for x in steps]
  np.testing.assert_allclose(values, [v for v, _ in singles], rtol=1e-5)
  sums = sum(np.asarray(g[1][1]) for _, g in singles)
  np.testing.assert_allclose(total[1], sums, rtol=1e-5, atol=1e-4)


def test_vmap_computes_each():
  x, kernels, scale = _arguments()
  maps = np.stack([x, x[::-1], 3 * x])
  many = jax.jit(jax.vmap(_gradients, (0, None, None)))(maps, kernels, scale)
  for i, x in enumerate(maps):
    part = jax.tree.map(lambda a, i=i: a[i], many)
    # Sums around the calls, XLA's own, are in another order.
    _compare(part, _gradients(x, kernels, scale))


@pytest.mark.parametrize(
  'shape, kernel, stride, padding, groups',
  [
    ((2, 9, 8, 16), (3, 3, 16, 24), 1, 1, 1),
    ((3, 13, 10, 8), (5, 3, 8, 16), 2, ((2, 0), (1, 3)), 1),
    ((2, 9, 9, 32), (3, 3, 8, 64), 2, 1, 4),
    ((2, 9, 9, 32), (3, 3, 1, 32), 1, 1, 32),
    ((1, 32, 32, 3), (7, 7, 3, 64), 2, 3, 1),
  ],
)
def test_its_operations_are_counted(shape, kernel, stride, padding, groups):
  arrays = [jax.ShapeDtypeStruct(s, 'float32') for s in (shape, kernel)]

  def count(compute):
    return flops.count_call(jax.grad(lambda x, k: jnp.square(compute(x, k)).sum(), (0, 1)), *arrays)

  def by_jax(x, k):
    return lax.conv_general_dilated(
      x,
      k,
      (stride, stride),
      padding if isinstance(padding, tuple) else [(padding, padding)] * 2,
      dimension_numbers=('NHWC', 'HWIO', 'NHWC'),
      feature_group_count=groups,
    )

  def ours(x, k):
    return layers.convolve(x, k, stride, padding, 'cpu_onednn', groups)

  # Three times what the forward pass has; JAX's own program says how much.
  forward = flops.count_call(by_jax, *arrays)
  assert onednn_here.calls(jax.jit(ours), *arrays) == 1
  assert flops.count_call(ours, *arrays) == forward
  assert count(ours) == 3 * forward > 0


def _raw_call(text, x):
  """A call of the handler with any text for an operation."""
  custom_call._register()
  return jax.jit(
    lambda x: jax.ffi.ffi_call(specs.TARGET, jax.ShapeDtypeStruct(x.shape, x.dtype))(
      x, operation=text
    )
  )(x)


@pytest.mark.parametrize(
  'text, words',
  [
    ('', 'anp_onednn: '),
    ('convolution (1, 2)', 'TypeError'),
    ('norm exit(3)', 'ValueError: malformed'),
    (specs.name(specs.BatchNormSpec('forward', 'float32', (1, -4, 4), 1e-5, False)), 'OneDnnError'),
  ],
)
def test_a_call_that_cannot_be_computed_is_an_error_of_jax(text, words):
  for _ in range(2):
    with pytest.raises(jax.errors.JaxRuntimeError, match=words):
      jax.block_until_ready(_raw_call(text, np.ones((2, 3), 'float32')))
  test_ten_repeats_have_the_same_bits()  # the process goes on


def test_without_a_library_a_kept_program_is_an_error(monkeypatch):
  """One that the compile cache holds from a day when there was one."""
  arguments = _arguments()
  jax.block_until_ready(_gradients(*arguments))
  with monkeypatch.context() as patch:
    patch.setattr(library, '_found', lambda: (None, 'it is gone'))
    with pytest.raises(jax.errors.JaxRuntimeError, match='it is gone'):
      jax.block_until_ready(_gradients(*arguments))


def test_another_number_of_threads_is_taken_up():
  """An operation is divided among them when it is made."""
  arguments = _arguments()
  digests, opened = [], library.find()
  wants = _gradients(*arguments)
  for opened.threads in (2, 1, 3, 2, 1, 3):
    result = _gradients(*arguments)
    _compare(result, wants)
    digests.append(_digest(result))
  assert digests[:3] == digests[3:] and len(set(digests)) == 3


def _copies_of_kernels(compiled, shapes):
  """Copies, in a compiled program, of arrays of these shapes."""
  names = [f'f32[{",".join(map(str, s))}]' for s in shapes]
  return [
    line.strip()
    for line in compiled.as_text().splitlines()
    if any(f'= {name}' in line for name in names) and ' copy(' in line
  ]


def test_a_donated_update_copies_no_kernel():
  """XLA would, were the kernel's gradient not to wait for the image's."""
  x, kernels, scale = _arguments()

  @functools.partial(jax.jit, donate_argnums=0)
  def update(kernels, x):
    gradients = jax.grad(_loss, 1)(x, kernels, scale)
    return [k - 0.1 * g for k, g in zip(kernels, gradients)]

  compiled = update.lower(kernels, x).compile()
  shapes = [k.shape for k in kernels]
  assert not _copies_of_kernels(compiled, shapes)
  assert 'input_output_alias={ {0}' in compiled.as_text()


def test_a_call_whose_piece_fails_waits_for_the_others():
  """What they write to is XLA's again once the call has returned."""
  has_begun, may_end, has_returned = (threading.Event() for _ in range(3))
  errors = []

  def slow(memory, addresses):
    has_begun.set()
    assert may_end.wait(10)

  fail = mock.Mock(side_effect=c_api.OneDnnError('piece of a test'))
  operation = types.SimpleNamespace(api=library.find().api, threads=1)
  parts = [types.SimpleNamespace(run=run) for run in (slow, fail)]
  phase = thread_pool._Phase(operation, parts, ())

  def call():
    phase.work(pieces.Scratch(operation.api))
    try:
      phase.wait()
    except c_api.OneDnnError as e:
      errors.append(str(e))
    has_returned.set()

  threads = [threading.Thread(target=phase.help)]
  threads[0].start()
  assert has_begun.wait(10)
  threads.append(threading.Thread(target=call))
  threads[1].start()
  assert not has_returned.wait(0.2)
  may_end.set()
  assert has_returned.wait(10) and errors == ['piece of a test']
  for thread in threads:
    thread.join()


def test_an_error_of_a_piece_is_the_calls():
  arguments = _arguments()
  want = _digest(_gradients(*arguments))
  calls, run = [], pieces.Piece.run

  def fail_once(piece, memory, addresses):
    calls.append(piece)
    if len(calls) == 2:
      raise KeyError('no memory for \N{GREEK SMALL LETTER ALPHA}')
    run(piece, memory, addresses)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(pieces.Piece, 'run', fail_once)
    with pytest.raises(jax.errors.JaxRuntimeError, match='KeyError.*no memory'):
      jax.block_until_ready(_gradients(*arguments))
  assert _digest(_gradients(*arguments)) == want


def test_without_xlas_pool_the_caller_computes_all_pieces(monkeypatch):
  arguments = _arguments()
  want = _digest(_gradients(*arguments))
  threads = set()
  run = pieces.Piece.run

  def note(piece, memory, addresses):
    threads.add(threading.get_ident())
    run(piece, memory, addresses)

  with monkeypatch.context() as patch:
    patch.setattr(thread_pool, '_SCHEDULE', 10**6)  # past the table's end
    patch.setattr(pieces.Piece, 'run', note)
    # Tasks of the call above may still wait for a thread of the pool.
    before = set(thread_pool._tasks)
    assert _digest(_gradients(*arguments)) == want
  assert threads and set(thread_pool._tasks) <= before


def test_threads_of_the_pool_help():
  """In many calls, other threads than the call's compute some pieces."""
  arguments = _arguments()
  jax.block_until_ready(_gradients(*arguments))
  helped, helper = [], thread_pool._Phase.help

  def note(phase):
    helped.append(bool(phase._waiting))
    helper(phase)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(thread_pool._Phase, 'help', note)
    for _ in range(50):
      jax.block_until_ready(_gradients(*arguments))
  assert any(helped)


@pytest.mark.parametrize('places, count', [(0, 1), (1, 1), ((0, 1), 2)])
def test_a_gradient_alone_computes_no_other(places, count):
  """The kernel's is computed alone where convolutions are split."""
  x, kernel = jnp.ones((2, 8, 8, 16)), jnp.ones((3, 3, 16, 8))
  gradient = jax.grad(lambda *a: layers.convolve(*a, 1, 1, 'cpu_onednn').sum(), places)
  text = jax.jit(gradient).lower(x, kernel).compile().as_text()
  assert text.count(f'custom_call_target="{specs.TARGET}"') == count
