"""Depthwise, grouped and gated networks under each strategy; of `invariant`: test_invariant."""

import functools

import jax
import numpy as np
import pytest

from tests import builders, small_networks, splitting

_STEPS = 2
# With clipping, a group of `local_sgd` would clip its own gradient.
_KEYS = {'optimizer.clip_norm': 0.0}


def _cases(slow, options):
  """All networks with all options; those of `slow` in every `make test`."""
  return [
    (builders.slow if (name.partition(':')[2], option) in slow else builders.soak)(name, option)
    for name in small_networks.NAMES
    for option in options
  ]


def _trained(strategy, name, data, model=1, **keys):
  """Weights, statistics and values of steps, on data x model devices."""
  keys = {'model.name': name, **_KEYS, **keys}
  program, mesh = splitting.build(strategy, data, model, **keys)
  state, values = splitting.train(program, mesh, _STEPS)
  state = program.eval_state_fn(state)
  return jax.device_get((state.params, state.stats)), values


@functools.cache
def _sync(name, devices):
  return _trained('sync', name, devices, accumulate=2 if devices == 4 else 1)


def _assert_same(result, name):
  """Compares with `sync` on one device, in float64 to splitting.TIGHT."""
  expected, expected_values = _sync(name, 1)
  state, values = result
  splitting.assert_same(state, expected)
  assert np.isfinite(values).all() and len(set(values[:, 0])) == _STEPS
  np.testing.assert_allclose(values[:, 0], expected_values[:, 0], 1e-6)


@pytest.mark.parametrize('name, devices', _cases({('EfficientNet', 4)}, (2, 4)))
def test_sync_trains_alike_on_any_number_of_devices(x64, name, devices):
  _assert_same(_sync(name, devices), name)


@pytest.mark.parametrize('name, devices', _cases((), (2, 4)))
def test_local_that_exchanges_each_step_trains_as_sync(x64, name, devices):
  keys = {'strategy.period': 1, 'strategy.moments': 'average'}
  _assert_same(_trained('local_sgd', name, devices, **keys), name)


@pytest.mark.parametrize('name, data', _cases({('EfficientNet', 1)}, (1, 2)))
def test_channel_split_trains_as_sync(x64, name, data):
  """It divides the dense convolutions; each device computes the others."""
  _assert_same(_trained('channel_split', name, data, 2), name)
