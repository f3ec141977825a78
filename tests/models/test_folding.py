"""A convolution with the batch norm after it, in evaluation one operation."""

from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from anp_jax.models import layers, resnet
from anp_jax.parallel.channel_split import convolutions
from anp_jax.system import flops, onednn
from anp_jax.system.onednn import c_api, pieces
from tests import layer_references as references, onednn_here

pytestmark = onednn_here.needed
wide_vectors = onednn_here.wide_vectors
PLATFORM = onednn.PLATFORM
# Of the largest value. float32 rounds each sum at 6e-8 a few times. bfloat16
# rounds each weight, and the result, once at 2^-9 of its value.
_TOLERANCES = {'float32': 5e-6, 'bfloat16': 6e-3}


class _Pair(nn.Module):
  """Both layers, as a block has them."""

  features: int = 24
  size: int = 3
  stride: int = 1
  use_bias: bool = False
  relu: bool = True
  dtype: Any = 'float32'
  param_dtype: Any = 'float32'
  platform: str = PLATFORM

  @nn.compact
  def __call__(self, x, train=False, added=None):
    types = dict(dtype=self.dtype, param_dtype=self.param_dtype, platform=self.platform)
    conv = layers.Conv(
      self.features, self.size, self.stride, use_bias=self.use_bias, name='conv', **types
    )
    norm = layers.BatchNorm(0, relu=self.relu, name='norm', **types)
    return layers.conv_norm(conv, norm, x, train, added)


def _variables(pair, channels):
  random = np.random.default_rng(3)
  scale, bias, mean, conv_bias = random.normal(size=(4, pair.features))
  # Where a channel has next to no variance, epsilon is all there is.
  var = random.uniform(0.5, 2, pair.features)
  var[1::5] = 1e-12
  shape = pair.size, pair.size, channels, pair.features
  # Weights that bfloat16 holds: what it makes of them here is one rounding.
  kernel = random.normal(size=shape).astype(ml_dtypes.bfloat16)
  conv = {'kernel': kernel} | ({'bias': conv_bias} if pair.use_bias else {})
  norm = {'scale': scale, 'bias': bias}
  return jax.tree.map(
    lambda a: np.asarray(a, pair.param_dtype),
    {'params': {'conv': conv, 'norm': norm}, 'batch_stats': {'norm': {'mean': mean, 'var': var}}},
  )


def _want(pair, variables, x, added=None):
  """In float64."""
  wide = jax.tree.map(np.float64, variables)
  conv, norm = wide['params']['conv'], wide['params']['norm']
  stats, kernel = wide['batch_stats']['norm'], conv['kernel']
  pads = (((pair.size - 1) // 2,) * 2,) * 2
  y = references.convolution(x, kernel, pair.stride, pads) + conv.get('bias', 0.0)
  y = (y - stats['mean']) / np.sqrt(stats['var'] + 1e-5)
  y = y * norm['scale'] + norm['bias']
  if added is not None:
    y = y + np.float64(added)
  return np.maximum(y, 0) if pair.relu else y


def _calls(function, *arguments):
  """How often a compiled program calls oneDNN."""
  compiled = jax.jit(function).lower(*arguments).compile()
  return compiled.as_text().count('custom_call_target="anp_onednn"')


def _compare(got, want, tolerance):
  error = np.abs(np.float64(got) - want).max() / np.abs(want).max()
  assert error < tolerance, f'{error:.1e}'


@pytest.mark.parametrize('dtype', onednn_here.DTYPES)
@pytest.mark.parametrize(
  'shape, settings, adds',
  [
    ((4, 9, 11, 16), dict(), True),
    ((7, 9, 8, 5), dict(stride=2, features=33), True),
    ((2, 13, 10, 3), dict(size=7, stride=2), False),
    # The kernel is cut, by its features or by its channels.
    ((2, 14, 14, 256), dict(size=1, features=264), True),
    ((8, 30, 30, 64), dict(size=1, stride=2, relu=False), True),
    ((3, 9, 9, 8), dict(use_bias=True), False),
  ],
)
def test_one_call_equals_numpy(shape, settings, adds, dtype, monkeypatch):
  # The larger ones are cut in two; 7 images are not.
  monkeypatch.setattr(onednn.find(), 'threads', 2)
  pair = _Pair(dtype=dtype, **settings)
  variables, x = _variables(pair, shape[-1]), references.values(0, shape, dtype)
  size = [-(-n // pair.stride) for n in shape[1:3]]
  added = None
  if adds:
    # As large as the rest, which some channels make 300 times as large.
    added = references.values(1, (shape[0], *size, pair.features), dtype)
    added *= np.asarray(300, added.dtype)
  program = jax.jit(lambda v, x, added: pair.apply(v, x, False, added))
  assert _calls(program, variables, x, added) == 1
  before = np.array(added)
  y = program(variables, x, added)
  assert y.dtype == x.dtype
  want = _want(pair, variables, x, added)
  # Each feature by itself: those without variance are the largest by far.
  for i in range(pair.features):
    _compare(y[..., i], want[..., i], _TOLERANCES[dtype])
  if adds:  # the caller's array is not written to
    np.testing.assert_array_equal(np.array(added), before)


def test_an_added_array_that_is_used_again_stays():
  pair = _Pair()
  variables = _variables(pair, 24)
  x, added = (references.values(i, (2, 9, 9, 24), 'float32') for i in range(2))

  @jax.jit
  def twice(v, x, added):
    inside = added * 1  # XLA's own array, which it might give away
    first = pair.apply(v, x, False, inside)
    return first, pair.apply(v, first, False, inside), inside

  first, second, inside = twice(variables, x, added)
  want = _want(pair, variables, x, added)
  _compare(first, want, 5e-6)
  _compare(second, _want(pair, variables, np.asarray(first), added), 5e-6)
  np.testing.assert_array_equal(inside, added)


@pytest.mark.parametrize('dtype', onednn_here.DTYPES)
def test_an_empty_batch(dtype):
  pair = _Pair(dtype=dtype, stride=2)
  x = references.values(0, (0, 9, 9, 16), dtype)
  y = jax.jit(pair.apply)(_variables(pair, 16), x)
  assert y.shape == (0, 5, 5, 24) and y.dtype == x.dtype


def test_what_onednn_cannot_compute_at_once_is_computed_apart(monkeypatch):
  compile_fast = pieces.compile_fast

  def refuse(api, spec, *arguments):
    if spec.after:
      raise c_api.OneDnnError('no sum in a test')
    return compile_fast(api, spec, *arguments)

  monkeypatch.setattr(pieces, 'compile_fast', refuse)
  pair = _Pair(features=21)  # no other test makes a primitive for it
  x, added = (references.values(i, (2, 9, 9, 21), 'float32') for i in range(2))
  variables = _variables(pair, 21)
  want = _want(pair, variables, x, added)
  program = jax.jit(lambda v, x, added: pair.apply(v, x, False, added))
  _compare(program(variables, x, added), want, 5e-6)
  assert _calls(program, variables, x, added) == 1


def test_training_normalises_by_the_batch():
  pair = _Pair()
  x, variables = references.values(0, (4, 9, 9, 16), 'float32'), _variables(pair, 16)
  y, _ = pair.apply(variables, x, True, mutable=['batch_stats'])
  conv, norm = variables['params']['conv'], variables['params']['norm']
  convolved = references.convolution(x, conv['kernel'], 1, ((1, 1), (1, 1)))
  want, *_ = references.normalisation(convolved, norm['scale'], norm['bias'], len(x), relu=True)
  _compare(y, want, 1e-4)


def test_gradients_equal_those_of_xla():
  pair, on_xla = _Pair(use_bias=True), _Pair(use_bias=True, platform='cpu')
  variables = _variables(pair, 24)
  x, added, dy = (references.values(i, (2, 9, 9, 24), 'float32') for i in range(3))

  def loss(pair):
    return lambda v, x, a: (pair.apply(v, x, False, a) * dy).sum()

  got, want = (jax.jit(jax.grad(loss(p), (0, 1, 2)))(variables, x, added) for p in (pair, on_xla))
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    _compare(a, np.float64(b), 2e-5)


def test_float64_and_other_platforms_compute_apart(x64):
  for settings in (dict(dtype='float64', param_dtype='float64'), dict(platform='cpu')):
    pair = _Pair(**settings)
    variables = _variables(pair, 16)
    x = references.values(0, (2, 9, 9, 16), pair.dtype)
    assert _calls(pair.apply, variables, x) == 0
    tolerance = 1e-13 if pair.dtype == 'float64' else 5e-6
    y = jax.jit(pair.apply)(variables, x)
    _compare(y, _want(pair, variables, x), tolerance)


@pytest.mark.slow
@pytest.mark.parametrize('bottleneck', [False, True])
def test_a_residual_network(bottleneck):
  """Its convolutions are all its calls, and its logits those of XLA alone."""
  nets = [
    resnet.ResNet(7, (1, 2), bottleneck, 16, platform=platform, zero_init=False)
    for platform in (PLATFORM, 'cpu')
  ]
  x = references.values(0, (2, 64, 64, 3), 'float32')
  variables = jax.jit(lambda x: nets[1].init(jax.random.key(0), x, False))(x)
  variables = jax.tree.map(lambda a: a + 0.25, variables)
  programs = [jax.jit(lambda v, x, n=n: n.apply(v, x, False)) for n in nets]
  kernels = sum(a.ndim == 4 for a in jax.tree.leaves(variables))
  assert _calls(programs[0], variables, x) == kernels
  counts = [flops.count_call(p, variables, x) for p in programs]
  assert counts[0] == counts[1]
  got, want = (np.float64(program(variables, x)) for program in programs)
  _compare(got, want, 1e-5)


def test_a_strategy_finds_and_computes_each_convolution():
  net = resnet.ResNet(7, (1, 1), True, 16, platform=PLATFORM)
  x = references.values(0, (2, 64, 64, 3), 'float32')
  variables = jax.jit(lambda x: net.init(jax.random.key(0), x, False))(x)
  paths = []

  def halves(path, convolve, x, kernel):
    paths.append(path)
    return jnp.concatenate([convolve(x, k) for k in jnp.split(kernel, 2, -1)], -1)

  want = jax.jit(lambda v, x: net.apply(v, x, False))(variables, x)
  with convolutions.computed_by(halves):
    got = jax.jit(lambda v, x: net.apply(v, x, False))(variables, x)
  _compare(got, np.float64(want), 1e-5)
  calls = convolutions.find(net, variables, x)
  assert sorted(call.layer for call in calls) == sorted(paths)
  kernels = sum(a.ndim == 4 for a in jax.tree.leaves(variables))
  assert len(set(paths)) == kernels
