"""Tests of step: what it sends, in which dtype, and the norms it takes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from anp_jax.config import strategy as strategy_lib
from anp_jax.models.layers import sums
from anp_jax.parallel import mesh as mesh_lib
from anp_jax.tools.portability import compiled_collectives
from tests import stepping


def _sent(collectives):
  """(kind, dtype, elements) of each array that collectives send around."""
  return [(c.kind, dtype, count) for c in collectives for dtype, count in c.elements]


def _asked(text):
  """The same of the program handed to XLA."""
  return _sent(compiled_collectives.asked(text))


def _total(actual, kind, dtype='float32'):
  return sum(n for k, d, n in actual if (k, d) == (kind, dtype))


@functools.cache
def _bfloat16(reduce_dtype='float32'):
  config = stepping.config_of('bfloat16', **{'strategy.reduce_dtype': reduce_dtype})
  return stepping.Run(config, 4, stepping.resnet_of(config))


def _count(tree):
  return sum(int(np.prod(s.shape)) for s in jax.tree.leaves(tree))


@pytest.mark.slow
def test_a_bfloat16_network_sums_its_gradients_in_float32():
  run = _bfloat16()
  lowered = run.train_step.lower(run.like, run.put(stepping.batch_of()))
  # Parameters, statistics, the weight, the count of rows without one, the four
  # sums of metrics and the counts of the four votes.
  expected = _count(run.like.params) + _count(run.like.stats) + 10
  compiled = compiled_collectives.compiled(lowered.compile().as_text())
  for actual in (_asked(lowered.as_text()), _sent(compiled)):
    # Nothing else is sent.
    assert {(k, d) for k, d, _ in actual} == {('all-reduce', 'float32')}
    assert _total(actual, 'all-reduce') == expected


def test_gradients_are_summed_in_bfloat16_where_that_is_chosen():
  # Read off the program before XLA: its CPU backend widens the sums again.
  run = _bfloat16('bfloat16')
  actual = _asked(run.train_step.lower(run.like, run.put(stepping.batch_of())).as_text())
  assert _total(actual, 'all-reduce', 'bfloat16') == _count(run.like.params)
  assert _total(actual, 'all-reduce') == _count(run.like.stats) + 10


def test_gradients_leave_in_few_sums_the_last_layers_first():
  run = _bfloat16()
  # The network's own order of use, which is not the alphabet's.
  order = run.init.forward_order
  assert order[0].startswith('stem_conv') and order[-1] == 'head/bias'
  params = mesh_lib.leaves_by_name(run.like.params)
  assert set(order) == {*params}
  specs = jax.tree.map(lambda s: s.sharding.spec, run.like.params)
  config = stepping.config_of('bfloat16', **{'strategy.bucket_megabytes': 1e-9})
  one_by_one = strategy_lib.find(config).build(config, specs, order)
  gradients = jax.tree.map(lambda s: jnp.zeros(s.shape), run.like.params)
  text = (
    jax.jit(
      jax.shard_map(
        lambda g: one_by_one.reduce(g, ())[0],
        mesh=run.mesh,
        in_specs=mesh_lib.P(),
        out_specs=mesh_lib.P(),
        check_vma=False,
      )
    )
    .lower(gradients)
    .as_text()
  )
  assert [n for _, _, n in _asked(text)] == [params[p].size for p in order[::-1]]
  # 25 MB at a time: this network's leave together, the last of them apart.
  lowered = run.train_step.lower(run.like, run.put(stepping.batch_of()))
  sums = [n for _, dtype, n in _asked(lowered.as_text()) if dtype == 'float32']
  assert len(sums) <= 2


def test_divided_parameters_are_gathered_once_and_scattered():
  config = stepping.config_of('bfloat16', sharding=stepping.FSDP)
  run = stepping.Run(config, 4, stepping.resnet_of(config))
  actual = _asked(run.train_step.lower(run.like, run.put(stepping.batch_of())).as_text())
  divided = [
    int(np.prod(s.shape))
    for s in jax.tree.leaves(run.like.params)
    if not s.sharding.is_fully_replicated
  ]
  assert len(divided) >= 10
  # Gathered whole, and the whole gradient is divided among the devices.
  assert _total(actual, 'all-gather') == sum(divided)
  assert _total(actual, 'reduce-scatter') == sum(divided)
  rest = _count(run.like.params) - sum(divided)
  assert _total(actual, 'all-reduce') == (rest + _count(run.like.stats) + 10)


def test_one_device_sends_no_gradient():
  # XLA's CPU backend copies what it "sends" to itself: 100 MB for ResNet-50.
  config = stepping.config_of('float32')
  run = stepping.Run(config, 1, stepping.resnet_of(config))
  lowered = run.train_step.lower(run.like, run.put(stepping.batch_of()))
  assert not _asked(lowered.as_text())


@pytest.mark.slow
def test_norms_do_not_gather_divided_parameters():
  config = stepping.config_of('float32', sharding=stepping.FSDP)
  run = stepping.Run(config, 4, stepping.resnet_of(config))
  lowered = run.train_step.lower(run.like, run.put(stepping.batch_of()))
  actual = _sent(compiled_collectives.compiled(lowered.compile().as_text()))
  assert _total(actual, 'all-gather') == _total(_asked(lowered.as_text()), 'all-gather')


def test_norm_is_that_of_one_vector():
  random = np.random.default_rng(0)
  # Small and large leaves; sizes that eight does and does not divide; a count,
  # which is no part of a norm.
  shapes = ((), (3,), (64, 64), (3, 3, 64, 64), (40001,), (33001, 2))
  tree = [random.normal(size=s).astype('float32') for s in shapes]
  want = np.linalg.norm(np.concatenate([np.float64(x).ravel() for x in tree]))
  # Pairwise sums of 1e5 squares in float32: far less than 1e-6.
  tree.append(np.int32(7))
  norm = jax.jit(sums.norm, static_argnums=(1, 2))
  for divided in (None, (False, True, False, True, False, True, False)):
    for platform in ('cpu', 'gpu'):
      actual = norm(tree, platform, divided)
      np.testing.assert_allclose(actual, want, rtol=1e-6)
  assert sums.norm([np.int32(7)], 'cpu') == 0


@pytest.mark.parametrize('platform', ['cpu', 'gpu'])
def test_norm_of_bfloat16_leaves_is_summed_in_float32(platform):
  # 2^16 ones: in bfloat16 the sum would stop at 256.
  tree = [jnp.ones(2**16, 'bfloat16'), jnp.ones(300, 'bfloat16')]
  actual = sums.norm(tree, platform)
  assert actual.dtype == jnp.float32
  np.testing.assert_allclose(actual, (2**16 + 300) ** 0.5, rtol=1e-6)
