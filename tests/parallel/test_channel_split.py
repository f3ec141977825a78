"""The channel split: each device computes some of the channels."""

import fractions
import math

from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from anp_jax import config as config_lib
from anp_jax.parallel import apportionment, mesh as mesh_lib
from anp_jax.parallel.channel_split import split as split_lib
from anp_jax.tools.portability import compiled_collectives
from tests import builders, launching, splitting

BATCH = splitting.BATCH


def _split(data, model, **overrides):
  """The program of a network that is split over devices, and its mesh."""
  return splitting.build('channel_split', data, model, **overrides)


# Shares.


_SHARES = st.lists(st.integers(0, 99), min_size=1, max_size=8).filter(any)


@builders.fuzzed(100, st.integers(0, 2000), _SHARES, st.integers(1, 16))
def test_shares_are_rounded_by_the_largest_remainder(features, shares, multiple):
  counts = np.array(apportionment.apportion(features, shares, multiple))
  counts[np.argmax(shares)] -= features % multiple
  units = features // multiple
  exact = [fractions.Fraction(units * share, sum(shares)) for share in shares]
  added = [n - multiple * math.floor(e) for e, n in zip(exact, counts)]
  assert set(added) <= {0, multiple} and sum(counts) == units * multiple
  assert [n for _, n in sorted((e % 1, n) for e, n in zip(exact, added))] == sorted(added)


# The whole step.


@pytest.mark.slow
@pytest.mark.parametrize(
  'network, data, model, parts',
  [
    ('user_network:WithoutDropout', 1, 4, (3, 0, 1, 2)),
    ('user_network:WithLayersUsedTwice', 1, 2, (2, 1)),
    ('user_network:WithMadeKernels', 1, 2, (2, 1)),
    ('user_network:WithOurLayers', 1, 2, 'nothing'),
    ('user_network:WithOurLayers', 1, 4, 'conv2=0,10,0,0'),
    ('user_network:WithOurLayers', 2, 2, 'conv1=4,3; conv2=0,10'),
    builders.soak('small_networks:ResNet', 1, 2, (3, 1)),
    builders.soak('user_network:WithoutDropout', 1, 1, ()),
    builders.soak('user_network:WithoutDropout', 2, 4, ()),
    builders.soak('user_network:WithoutDropout', 1, 8, (5, 1, 1, 0, 3, 1, 2, 1)),
    builders.soak('user_network:WithOurLayers', 2, 2, (1, 3)),
    builders.soak('user_network:WithOurLayers', 1, 4, (3, 0, 1, 2)),
    builders.soak('user_network:WithOurLayers', 1, 8, 'nothing'),
    builders.soak('user_network:WithOurLayers', 1, 2, 'conv1=4,3; conv2=0,10'),
    builders.soak('user_network:WithOurLayers', 1, 8, f'conv1=4,3{6 * ",0"}; conv2=0,10{6 * ",0"}'),
  ],
)
def test_a_step_is_that_of_the_unsplit_network(x64, network, data, model, parts):
  """By a plan some layers are divided, and others computed by every device."""
  name = {'model.name': f'tests.{network}'}
  key = 'strategy.plan' if isinstance(parts, str) else 'strategy.shares'
  splitting.assert_trains_as_unsplit(*_split(data, model, **name, **{key: parts}), **name)


def _compiled_collectives(data, model, **overrides):
  """The collectives of a compiled step in float32."""
  program, mesh = _split(data, model, **splitting.FLOAT32, **overrides)
  state = program.new_state()
  batch = splitting.batch(mesh, 0)
  compiled = program.train_step.lower(state, batch).compile()
  return compiled_collectives.compiled(compiled.as_text())


@pytest.mark.slow
@pytest.mark.parametrize('shares, first, second', [((1, 1), 150, 800), ((2, 1), 100, 533)])
def test_what_a_step_sends(shares, first, second):
  """Two convolutions send what pools have left of the maps, and no kernel."""
  sent = splitting.sent_by_150x800(shares=shares)
  # Forward both maps, 16 x 16 and 8 x 8 pixels; backward the first one's
  # gradient. Equal parts are one array, which both have in the end; of others
  # the larger one is sent, as wide as it is.
  maps = 4 * 8 * (16 * 16 * first + 8 * 8 * second + 16 * 16 * first)
  large = [c for c in sent if c.size >= 2**16 and c.kind != 'all-reduce']
  assert sum(c.size for c in large) == maps
  # All else is the head's gradient, and some numbers of each channel.
  head = 4 * 12 * (64 * 800 + 1)
  rest = sum(c.size for c in sent) - maps - head
  assert 0 < rest < 4 * 4 * (150 + 800)


@pytest.mark.slow
def test_a_device_holds_its_own_channels_alone():
  """Kernels, momentum and averages are divided; zeros stay zeros."""
  keys = {'model.name': 'tests.user_network:WithOurLayers', 'strategy.plan': 'conv2=5,2,0,3'}
  program, mesh = _split(1, 4, ema=0.9, **splitting.FLOAT32, **keys)
  state, _ = splitting.train(program, mesh, steps=2)
  leaves = mesh_lib.leaves_by_name(state)
  kernels = [leaf for name, leaf in leaves.items() if name.endswith('conv2/kernel')]
  assert len(kernels) == 3
  for kernel in kernels:
    for shard, count in zip(kernel.addressable_shards, (5, 2, 0, 3), strict=True):
      assert shard.data.shape == (*kernel.shape[:-1], 5)
      assert (np.asarray(shard.data) != 0).any((0, 1, 2)).sum() == count


@pytest.mark.slow
def test_a_state_goes_on_with_another_split(x64):
  """What a checkpoint holds is that of one network, in every split."""
  network = {'model.name': 'tests.user_network:WithOurLayers'}
  first, mesh = _split(1, 2, **network, **{'strategy.shares': (2, 1)})
  state, _ = splitting.train(first, mesh)
  saved = first.checkpoint_layout.pack(state)
  assert jax.tree.map(jnp.shape, saved) == jax.tree.map(jnp.shape, first.checkpoint_layout.abstract)
  second, _ = _split(1, 2, **network, **{'strategy.plan': 'conv2=1,9'})
  again = second.checkpoint_layout.pack(second.checkpoint_layout.unpack(saved))
  for leaf, expected in zip(jax.tree.leaves(again), jax.tree.leaves(saved), strict=True):
    np.testing.assert_array_equal(leaf, expected)


def _unlike(batch, name, values, mesh):
  """Gives each device other values, as if it had erred."""
  rows = BATCH // mesh.shape[mesh_lib.DATA]
  batch[name] = jax.make_array_from_single_device_arrays(
    (BATCH,),
    batch[name].sharding,
    [
      jax.device_put(np.full(rows, value, batch[name].dtype), device)
      for value, device in zip(values, mesh.devices.flat, strict=True)
    ],
  )


@pytest.mark.slow
@pytest.mark.parametrize('plan', ['nothing', 'conv1=3,3'])
def test_the_first_device_counts(plan):
  """In weights, statistics, metrics and scores, on devices that differ."""
  keys = {'model.name': 'tests.user_network:WithoutDropout', 'strategy.plan': plan}
  program, mesh = _split(1, 2, **splitting.FLOAT32, **keys)
  batch = splitting.batch(mesh, 0)
  # The first device counts all of its examples.
  _unlike(batch, 'weight', (1.0, 0.5), mesh)
  state = program.new_state()
  evaluated = program.eval_state_fn(state)
  scores = program.eval_step(evaluated.params, evaluated.stats, batch)
  weights = scores['weight'].addressable_shards
  assert [float(shard.data) for shard in weights] == [16, 16]
  state, values = program.train_step(state, batch)
  first, second = (np.asarray(s.data) for s in values.addressable_shards)
  np.testing.assert_array_equal(first, second)
  if plan == 'nothing':
    for leaf in jax.tree.leaves(state.params):
      a, b = (np.asarray(s.data) for s in leaf.addressable_shards)
      np.testing.assert_array_equal(a, b)


def test_a_plan_for_another_network_is_refused(x64):
  with pytest.raises(config_lib.ConfigError, match="no convolution 'conv11'; did you mean 'conv1"):
    _split(1, 2, **{'strategy.plan': 'conv11=3,3'})


def test_no_sum_is_in_a_narrower_dtype():
  program, mesh = _split(
    1, 2, **{**splitting.FLOAT32, 'model.dtype': 'bfloat16', 'strategy.shares': (1, 1)}
  )
  state = program.new_state()
  text = program.train_step.lower(state, splitting.batch(mesh, 0)).as_text()
  summed = compiled_collectives.sums(compiled_collectives.totals(compiled_collectives.asked(text)))
  assert set(summed) == {'float32'}
  # Among them that of the second convolution's maps, 8 images of 4 x 4 x 6.
  assert summed['float32'] > 8 * 16 * 6


@pytest.mark.slow
def test_no_collective_is_within_a_branch():
  """Devices take different ones, and would wait for each other forever."""
  sent = _compiled_collectives(2, 2, **{'strategy.shares': (3, 1)})
  assert not any(c.conditional for c in sent)
  # Forward, two convolutions of 6 and 8 features at 4 x 4 and 2 x 2 pixels: for
  # 8 images, in parts padded to the wider, 3/4 (4.5: the first of equal
  # remainders is rounded up).
  maps = [8 * 4 * 2 * 6 * 4, 8 * 16 * 2 * 5 * 4]
  # And no kernel, nor its gradient.
  gathered = [c.size for c in sent if c.kind == 'all-gather']
  assert sorted(gathered) == sorted(maps)
  # Backward: the second's maps, and not the images.
  summed = sorted(c.size for c in sent if c.kind == 'all-reduce')
  assert summed.count(8 * 16 * 6 * 4) == 1 and 8 * 64 * 3 * 4 not in summed


@pytest.mark.slow
@pytest.mark.parametrize('voter', [1, 2])
def test_every_device_votes(voter):
  """Also each of two that have the same images."""
  program, mesh = _split(2, 2, **splitting.FLOAT32)
  batch = splitting.batch(mesh, 0)
  _unlike(batch, 'vote', [int(i == voter) for i in range(4)], mesh)
  _, values = program.train_step(program.new_state(), batch)
  assert values[-1] == 1


@pytest.mark.parametrize(
  'overrides, message',
  [
    ({'strategy.shares': (1, -1)}, r'shares=\(1, -1\): expected a number from'),
    ({'strategy.shares': (0, 0)}, 'expected a number from 0 to 1e9 for each device'),
    ({'strategy.shares': (math.inf, 1)}, 'expected a number from'),
    ({'strategy.shares': (1e308, 1e308)}, 'expected a number from'),
    ({'strategy.shares': (True, 1)}, 'expected a number from'),
    ({'strategy.shares': (1, 2, 3)}, 'expected 2, one for each device along'),
    ({'strategy.split_layers': '('}, 'expected a regular expression'),
    ({'strategy.plan': 'conv1'}, 'expected a text such as'),
    (
      {'strategy.plan': 'nothing', 'strategy.shares': (1, 2)},
      r'shares=\(1, 2\): expected \(\) where strategy.plan is given',
    ),
    ({'sharding': (('.*', 'fsdp'),)}, "expected 'replicate' where strategy"),
  ],
)
def test_bad_values_are_refused(overrides, message):
  builders.assert_refused(message, _split, 1, 2, **overrides)


def test_layers_outside_the_pattern_are_not_split():
  shares = split_lib.Shares((3, 1), 'stage[34]|^conv1$')
  assert shares.counts('stage3_block1/conv2', 8, 2) == (6, 2)
  assert shares.counts('conv1', 4, 2) == (3, 1)
  assert shares.counts('stage2_block1/conv1', 8, 2) is None
  assert shares.counts('conv1', 4, 1) is None


@pytest.mark.multiprocess
def test_a_run_resumes_split_and_unsplit(tmp_path):
  split = {'strategy.name': 'channel_split', 'mesh.data': '1', 'mesh.model': '2'}

  def train(name, steps, processes, **more):
    keys = {**launching.FLOAT64, **launching.CONSTANT, 'duration': f'{steps} steps', **more}
    arguments = launching.arguments(tmp_path / name, **keys)
    launching.run(tmp_path / f'{name}{steps}', processes, arguments, environment=launching.X64)

  train('unsplit', 6, 1)
  train('split', 2, 1)
  # Without shares, the processes are timed.
  train('split', 4, 2, **split)
  assert (tmp_path / 'split' / 'channel_split.json').exists()
  train('split', 6, 1)
  splitting.assert_same_weights(tmp_path / 'split', tmp_path / 'unsplit', '6/params/conv1/kernel')
