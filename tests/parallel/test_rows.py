"""Unequal parts of a batch: the numbers are those of equal ones."""

import itertools

from hypothesis import strategies as st
import jax
import numpy as np
import pytest

from anp_jax.config import strategy as strategy_lib
from anp_jax.data.input import feed
from anp_jax.parallel import division, mesh as mesh_lib
from anp_jax.runtimes.calibration import row_speeds
from anp_jax.system import cores
from tests import builders, programs, splitting

# Of this process's pool, whose size JAX has decided; see test_invariant.py.
_THREADS = max(8, cores.count())
# Its batch norm has the group of the config, two images.
OURS = {'model.name': 'tests.user_network:WithOurLayers'}


def _batch(step, program):
  """Noise with unreadable examples, as the run's feed places it."""
  spec, size = program.spec, program.spec.batch_size
  host = programs.batch(step, size, spec.config.data.image_size)
  host['weight'][step % size] = host['weight'][-1] = 0
  sharding = mesh_lib.batch_sharding(spec.mesh)
  counts = strategy_lib.find(spec.config).row_counts(spec.config, size, feed.parts(sharding))
  return feed.Placement.create(sharding, size, counts).put(host, np.arange(size))


def _train(program):
  return jax.device_get(programs.train(program, (_batch(i, program) for i in range(3))))


@pytest.mark.parametrize(
  'rows, expected',
  [
    ('equal', ()),
    ('measured', ()),
    ('1,1', ()),
    ('3,1', (12, 4)),
    ('2,1', (10, 6)),  # of eight pairs 5.3 and 2.7
    ('9,3,2,2', (10, 2, 2, 2)),  # of eight pairs 4.5, 1.5, 1 and 1: the first remainder wins
  ],
)
def test_rows_are_in_proportion_to_the_shares(rows, expected):
  config = builders.config({'strategy.rows': rows, 'model.norm_group': 2, **OURS})
  assert strategy_lib.find(config).row_counts(config, 16, 1 + rows.count(',')) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
  'rows, devices, overrides',
  [
    ('1,2', 2, {'accumulate': 2, 'data.mixup': 0.2}),
    ('9,3,2,2', 4, {'sharding': (('.*', 'fsdp'),), 'ema': 0.9}),
    builders.soak('3,1', 2, {}),
    builders.soak('1,1,1,1,1,1,1,9', 8, {'batch_size': 32}),
  ],
)
def test_steps_are_those_of_one_device(x64, rows, devices, overrides):
  overrides = OURS | overrides
  program, _ = splitting.build('sync', devices, 1, **{'strategy.rows': rows}, **overrides)
  state, values = _train(program)
  alone, _ = splitting.build('sync', 1, 1, **overrides)
  expected, expected_values = _train(alone)
  splitting.assert_same(state, expected)
  splitting.assert_same(values, expected_values)


@pytest.mark.slow
@pytest.mark.parametrize('rows, devices', [('5,3', 2), ('6,2', 2), builders.soak('4,2,1,1', 4)])
def test_invariant_has_the_same_bits(rows, devices):
  """Five and three of eight logical shards are sent one by one, six and two in pairs."""

  def trained(rows, devices):
    keys = {'batch_size': 32, 'strategy.threads': _THREADS, 'strategy.rows': rows}
    config = splitting.config('invariant', **keys, **splitting.FLOAT32, **OURS)
    program = programs.build(config, devices)
    state, values = _train(program)
    scored = program.eval_state_fn(program.new_state())
    batch = programs.put(programs.batch(9, 32, 8), program.spec.mesh)
    return state, values, jax.device_get(program.eval_step(scored.params, scored.stats, batch))

  leaves, expected = map(jax.tree.leaves, (trained(rows, devices), trained('equal', 1)))
  for leaf, same in zip(leaves, expected, strict=True):
    np.testing.assert_array_equal(leaf, same)


@pytest.mark.parametrize(
  'rows, overrides, message',
  [
    ('2,1,1', {}, "rows='2,1,1': expected 2 numbers, one for each device"),
    ('99,1', {}, 'of 16 images, in multiples of 2, a device gets none'),
    ('99,1', {'strategy.name': 'invariant', 'batch_size': 8}, 'in multiples of 1, a device'),
    # Fewer than the shards.
    ('2,1', {'strategy.name': 'invariant', 'batch_size': 4}, 'batch_size=4 does not divide by'),
  ],
)
def test_shares_that_do_not_fit_are_refused(rows, overrides, message):
  keys = {
    'batch_size': 16,
    'model.norm_group': 2 if not overrides else 1,
    'strategy.rows': rows,
    **overrides,
    **OURS,
  }
  if overrides:
    keys['strategy.threads'] = _THREADS
  config = builders.config(keys)
  mesh = mesh_lib.create(config, jax.devices()[:2])
  builders.assert_refused([message], division.check, config, config.batch_size, mesh)


def test_invariant_is_evaluated_on_any_number_of_devices():
  keys = {'strategy.name': 'invariant', 'strategy.rows': '3,1', 'strategy.threads': _THREADS}
  config = builders.config({'batch_size': 32, 'model.norm_group': 2, **keys, **OURS})
  mesh = mesh_lib.create(config, jax.devices()[:1])
  strategy = strategy_lib.find(config)
  strategy.check_evaluation(config, mesh)
  builders.assert_refused(['expected 1 numbers'], strategy.check_mesh, config, mesh)


_SECONDS = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), min_size=1, max_size=3)


@builders.fuzzed(50, _SECONDS, st.integers(0, 8), st.integers(1, 4))
def test_no_other_division_is_ready_earlier(seconds, more, multiple):
  """However slow, a device has one multiple."""
  batch = (len(seconds) + more) * multiple
  every = itertools.product(range(multiple, batch + 1, multiple), repeat=len(seconds))
  ends = {c: max(a + b * n for (a, b), n in zip(seconds, c)) for c in every if sum(c) == batch}
  costs = row_speeds.RowCosts(*map(list, zip(*seconds)), 0.25)
  rows = costs.division(batch, multiple)
  assert ends[rows] == min(ends.values())
  assert costs.step_seconds(rows) == ends[rows] + 0.25
