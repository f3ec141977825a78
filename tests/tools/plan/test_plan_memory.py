"""Tests of plan: memory, against the state that a run has on a device."""

import math

import jax
import pytest

from anp_jax.config import strategy as strategy_lib
from anp_jax.tools.plan import plan_memory, workload
from tests import builders, plan_settings, programs

_BATCH, _SIDE = 64, 8
# Of `WithoutDropout`, in float32: kernels and biases of 27 inputs to 6, of 54
# to 8 and of 8 to 12; scales and shifts, means and variances of 6.
_PARAMETERS = 4 * (27 * 6 + 6 + 54 * 8 + 8 + 8 * 12 + 12 + 2 * 6)
_STATISTICS = 4 * 2 * 6


def _config(**keys):
  keys = {name.replace('__', '.'): value for name, value in keys.items()}
  return builders.config(
    {
      'batch_size': _BATCH,
      'duration': '10 steps',
      'data.image_size': _SIDE,
      'data.resize': _SIDE,
      'model.name': 'tests.user_network:WithoutDropout',
      'model.dtype': 'float32',
      'model.norm_group': 2,
      'optimizer.name': 'momentum',
      **keys,
    }
  )


def _count(config, devices, images=_BATCH):
  work = workload.count(config, 640, len(programs.NAMES))
  return plan_memory.count(plan_settings.setting(config, work, devices), images)


def _bytes_on_a_device(tree):
  """Bytes of the parts that one device has, from the leaves' shardings."""
  return sum(
    math.prod(s.sharding.shard_shape(s.shape)) * s.dtype.itemsize for s in jax.tree.leaves(tree)
  )


def _state(config, devices):
  """The abstract state of a run on so many devices."""
  return programs.build(config, devices).abstract_state


# A device of several groups, one of each, and groups of several devices.
_SIZES = [(1, 1), (4, 1), (4, 2), (4, 4), (2, 8)]


@pytest.mark.parametrize('groups, devices', _SIZES)
def test_local_holds_its_groups(groups, devices):
  config = _config(strategy__name='local_sgd', strategy__groups=groups)
  count = _count(config, devices)
  # Each group's optimizer counts its steps; the planner counts the run's too.
  assert count.state == pytest.approx(_bytes_on_a_device(_state(config, devices)), abs=4 * groups)
  here = max(1, groups // devices)
  assert count.gradients == here * _PARAMETERS


@pytest.mark.parametrize('optimizer, ema', [('sgd', 0.0), ('momentum', 0.9), ('adam', 0.9)])
def test_sync_holds_the_optimizers_state_and_averages(optimizer, ema):
  config = _config(optimizer__name=optimizer, ema=ema)
  count = _count(config, 4)
  assert count.state == _bytes_on_a_device(_state(config, 4))
  assert count.gradients == _PARAMETERS


@pytest.mark.parametrize(
  'keys, devices, parts',
  [
    ({}, 2, 2),
    ({}, 1, 1),
    ({'strategy__groups': 2}, 4, 2),  # over a group's devices
    ({'strategy__groups': 4}, 4, 1),  # nothing to divide over
    ({'strategy__groups': 4}, 2, 1),
  ],
)
def test_parameters_are_divided_over_the_devices_of_a_group(keys, devices, parts):
  name = 'local_sgd' if keys else 'sync'
  config = _config(strategy__name=name, sharding=(('.*', 'fsdp'),), **keys)
  count = _count(config, devices)
  # Statistics and counters are not divided: at most 56 bytes of each group.
  groups = max(1, keys.get('strategy__groups', 1) // devices)
  assert count.state == pytest.approx(_bytes_on_a_device(_state(config, devices)), abs=56 * groups)
  gathered = _PARAMETERS if parts > 1 else 0
  assert count.gradients == groups * _PARAMETERS / parts + gathered


@pytest.mark.parametrize('mode', ['async', 'rennala', 'synchronous'])
def test_a_worker_of_servers_holds_no_optimizer_and_no_average(mode):
  config = _config(
    strategy__name='parameter_server', strategy__mode=mode, optimizer__name='adam', ema=0.9
  )
  assert _count(config, 4).state == _PARAMETERS + _STATISTICS


# As many threads as pytest has devices.
_INVARIANT = {'strategy__name': 'invariant', 'strategy__threads': 8}


@pytest.mark.parametrize(
  'keys, devices',
  [
    ({'accumulate': 4}, 1),
    ({'accumulate': 4}, 4),
    ({'strategy__name': 'local_sgd', 'strategy__groups': 2, 'accumulate': 4}, 4),
    ({'strategy__name': 'local_sgd', 'strategy__groups': 8, 'accumulate': 2}, 2),
    ({'strategy__name': 'local_sgd', 'strategy__groups': 8}, 1),
    ({**_INVARIANT, 'strategy__logical_shards': 8}, 1),
    ({**_INVARIANT, 'strategy__logical_shards': 8}, 4),
  ],
)
def test_a_device_computes_a_micro_batch_at_a_time(keys, devices):
  """The activations of one are there, as the run divides its batch."""
  config = _config(**keys)
  division = strategy_lib.find(config).batch_division(config, devices)
  count = _count(config, devices, images=_BATCH // devices)
  if config.strategy.name == 'invariant':  # it holds the gradients of its shards
    assert count.gradients == 8 / devices * _PARAMETERS
    assert count.state == _bytes_on_a_device(_state(config, devices))
  assert count.images == _BATCH / division.parts
  assert count.images < _BATCH / devices
