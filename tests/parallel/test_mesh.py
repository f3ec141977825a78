"""Meshes and the rules by which arrays lie on them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from anp_jax.parallel import mesh as mesh_lib, state as state_lib
from tests import builders

P = mesh_lib.P


def _mesh(config, data=-1, model=1, devices=8):
  config.mesh.data, config.mesh.model = data, model
  return mesh_lib.create(config, jax.devices()[:devices])


def _shape(*shape):
  return jax.ShapeDtypeStruct(shape, jnp.float32)


@pytest.mark.parametrize(
  'data, model, devices, want',
  [(-1, 1, 8, (8, 1)), (4, 2, 8, (4, 2)), (-1, 4, 8, (2, 4)), (3, -1, 6, (3, 2))],
)
def test_shapes(config, data, model, devices, want):
  mesh = _mesh(config, data, model, devices)
  assert mesh.axis_names == ('group', 'data', 'model')
  assert mesh.devices.shape == (1, *want)
  # The order of the devices is that of the list: neighbours share a batch row.
  assert mesh.devices.ravel().tolist() == jax.devices()[:devices]
  assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}


@pytest.mark.parametrize(
  'groups, devices, model, want',
  [
    (2, 8, 1, (2, 4, 1)),
    (8, 8, 1, (8, 1, 1)),
    (2, 8, 2, (2, 2, 2)),
    (3, 6, 1, (3, 2, 1)),
    # Fewer devices than groups: each has several.
    (4, 2, 1, (2, 1, 1)),
    (6, 1, 1, (1, 1, 1)),
    (4, 4, 2, (2, 1, 2)),
  ],
)
def test_groups_are_neighbours(config, groups, devices, model, want):
  config.strategy.name, config.strategy.groups = 'local_sgd', groups
  mesh = _mesh(config, model=model, devices=devices)
  assert mesh.devices.shape == want
  assert mesh.devices.ravel().tolist() == jax.devices()[:devices]
  assert mesh_lib.batch_devices(mesh) == devices // model


@pytest.mark.parametrize('groups, devices', [(4, 6), (3, 2), (3, 8)])
def test_groups_that_do_not_fit_are_refused(config, groups, devices):
  config.strategy.name, config.strategy.groups = 'local_sgd', groups
  words = [f'strategy.groups={groups}: expected ', f' {devices} devices']
  builders.assert_refused(words, _mesh, config, devices=devices)


def test_all_devices_without_a_list(config):
  assert mesh_lib.create(config).size == len(jax.devices()) == 8


@pytest.mark.parametrize(
  'data, model, devices',
  [(-1, -1, 8), (3, 1, 8), (-1, 3, 8), (4, 1, 8), (16, 1, 8), (2, 2, 2), (5, -1, 8)],
)
def test_counts_that_do_not_fit_are_refused(config, data, model, devices):
  text = f'data={data}, model={model}) does not fit {devices} cpu'
  builders.assert_refused([text], _mesh, config, data, model, devices)


def test_platform_and_shardings(config):
  mesh = _mesh(config, 4, 2)
  assert mesh_lib.platform(mesh) == 'cpu'
  batch = jax.device_put(np.arange(8), mesh_lib.batch_sharding(mesh))
  assert {s.data.shape for s in batch.addressable_shards} == {(2,)}
  # Each row lies on both devices of its row of the mesh.
  for row in range(4):
    for device in mesh.devices[0, row]:
      shard = next(s for s in batch.addressable_shards if s.device == device)
      np.testing.assert_array_equal(shard.data, [2 * row, 2 * row + 1])
  array = jax.device_put(np.arange(8), mesh_lib.replicated(mesh))
  assert array.is_fully_replicated


def test_path_names_of_every_kind_of_key():
  tree = {'a': [jnp.ones(1), (jnp.ones(1),)], 'b': optax.EmptyState()}
  tree['c'] = optax.TraceState({'kernel': jnp.ones(1)})
  names = [mesh_lib.path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
  assert names == ['a/0', 'a/1/0', 'c/trace/kernel']


def test_the_first_rule_that_matches_wins(config):
  mesh = _mesh(config)
  params = {
    'stem_conv': {'kernel': _shape(7, 7, 3, 16)},
    'head': {'kernel': _shape(16, 24), 'bias': _shape(24)},
  }
  rules = (('head/kernel', 'replicate'), ('head', 'fsdp'), ('.*', 'replicate'))
  assert mesh_lib.param_specs(rules, params, mesh) == {
    'stem_conv': {'kernel': P()},
    'head': {'kernel': P(), 'bias': P('data')},
  }
  # Searched for, not matched from the start.
  rules = (('kernel$', 'fsdp'), ('.*', 'replicate'))
  specs = mesh_lib.param_specs(rules, params, mesh)
  assert specs['stem_conv']['kernel'] == P(None, None, None, 'data')
  assert specs['head'] == {'kernel': P(None, 'data'), 'bias': P()}


def test_a_parameter_that_no_rule_matches_is_named(config):
  params = {'head': {'kernel': _shape(4, 4), 'bias': _shape(4)}}
  rules, words = (('kernel', 'fsdp'),), ['no rule ', ' head/bias']
  builders.assert_refused(words, mesh_lib.param_specs, rules, params, _mesh(config))


@pytest.mark.parametrize(
  'shape, want',
  [
    ((3, 3, 8, 64), P(None, None, None, 'data')),
    ((3, 3, 64, 8), P(None, None, 'data')),
    ((100, 16), P(None, 'data')),  # 100 is longer, but 4 x 25: not by 8
    ((16, 16), P('data')),  # of equals the first
    ((8,), P('data')),
    ((12,), P()),
    ((4, 2), P()),
    ((), P()),
    ((0, 3), P()),
  ],
)
def test_fsdp_divides_the_longest_axis_it_can(config, shape, want):
  specs = mesh_lib.param_specs((('.*', 'fsdp'),), {'w': _shape(*shape)}, _mesh(config))
  assert specs == {'w': want}


def test_fsdp_counts_the_data_axis_only(config):
  rules, params = (('.*', 'fsdp'),), {'w': _shape(6, 4)}
  specs = mesh_lib.param_specs(rules, params, _mesh(config, 2, 4))
  assert specs == {'w': P('data')}
  specs = mesh_lib.param_specs(rules, params, _mesh(config, 1, 8))
  assert specs == {'w': P()}


@pytest.mark.parametrize(
  'optimizer',
  [
    optax.sgd(0.1, momentum=0.9),
    optax.adam(0.1),
    optax.chain(
      optax.clip(1.0),
      optax.masked(optax.add_decayed_weights(0.1), lambda p: jax.tree.map(jnp.ndim, p)),
      optax.scale_by_adam(),
      optax.scale_by_schedule(lambda step: 0.1),
    ),
  ],
  ids=['momentum', 'adam', 'chain'],
)
def test_moments_and_averages_lie_like_their_parameters(config, optimizer):
  mesh = _mesh(config)
  params = {
    'stage1_block1': {
      'conv1': {'kernel': jnp.zeros((3, 3, 4, 16))},
      'norm1': {'scale': jnp.zeros(16), 'bias': jnp.zeros(16)},
    },
    'head': {'kernel': jnp.zeros((16, 12)), 'bias': jnp.zeros(12)},
  }
  stats = {'batch_stats': {'stage1_block1': {'norm1': {'mean': jnp.zeros(16)}}}}
  state = state_lib.TrainState(
    step=jnp.zeros((), jnp.int32),
    params=params,
    stats=stats,
    opt_state=optimizer.init(params),
    average={'params': params, 'stats': stats},
  )
  rules = (('norm1/scale', 'replicate'), ('.*', 'fsdp'))
  want = {
    'stage1_block1/conv1/kernel': P(None, None, None, 'data'),
    'stage1_block1/norm1/scale': P(),
    'stage1_block1/norm1/bias': P('data'),
    'head/kernel': P('data'),
    'head/bias': P(),
  }
  specs = mesh_lib.state_specs(state, mesh_lib.param_specs(rules, params, mesh))
  assert jax.tree.structure(specs, is_leaf=lambda s: isinstance(s, P)) == jax.tree.structure(state)
  counts = dict.fromkeys(want, 0)
  for path, spec in jax.tree_util.tree_leaves_with_path(specs, is_leaf=lambda s: isinstance(s, P)):
    name = mesh_lib.path_name(path)
    matches = [n for n in want if name.endswith(n)]
    assert spec == (want[matches[0]] if matches else P()), name
    for n in matches:
      counts[n] += 1
  # Parameters, averages and one or two moments.
  moments = 1 if 'TraceState' in str(state.opt_state) else 2
  assert set(counts.values()) == {2 + moments}


@pytest.mark.parametrize('hosts', [('',), ('a', 'b')])
def test_processes_that_nobody_told_of_are_refused(config, monkeypatch, hosts):
  """Those of a TPU pod, who would each write the checkpoints of all."""
  monkeypatch.setattr(jax, 'process_count', lambda: 3)
  text = f'JAX computes with 3 processes, but this one was told of {len(hosts)}'
  builders.assert_refused([text], mesh_lib.create, config, hosts=hosts)
