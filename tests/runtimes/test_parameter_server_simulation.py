"""A simulated run has the weights that a real one with its order has."""

import types

import jax
import numpy as np
import pytest

from anp_jax import train
from anp_jax.config import strategy as strategy_lib
from anp_jax.reporting import telemetry
from anp_jax.runtimes.parameter_server import log as log_lib
from tests import builders, launching, serving


def _simulated(config, workers, **keys):
  full = serving.FULL | {'optimizer.clip_norm': 0.0, 'model.norm_momentum': 0.5}
  return serving.config_of(config, **full | {'strategy.simulate.workers': workers} | keys)


def _run(config, workdir, devices=1):
  devices = tuple(jax.devices()[:devices])
  train.start(strategy_lib.Invocation(config, str(workdir), None, devices=devices))


def _replayed(config, workdir, monkeypatch, devices=1):
  """Returns the log's tickets and seconds, once a replay has the same weights.

  A replay computes as real workers and servers do: from flat vectors on the host.
  """
  serving.on_devices(monkeypatch, devices)
  records = [r for r in log_lib.read(str(workdir)) if 'order' in r]
  replayed = serving.replayed(config, workdir, len(records))
  for name, leaf in launching.weights(workdir).items():
    # Up to sixty steps of float32 in programs that round otherwise.
    np.testing.assert_allclose(leaf, replayed[name], rtol=1e-4, atol=1e-5, err_msg=name)
  parts = [part for r in records for part in r['parts']]
  return [p['ticket'] for p in parts], [p['seconds'] for p in parts]


# One pass computes all parts of an update: batch norm by groups is the same, dropout not.
_BY_GROUPS = {
  'data.mixup': 0.0,  # its random numbers are of one step, where parts are of several
  'model.name': 'tests.user_network:WithOurLayers',
  'model.norm_momentum': 0.9,
}
_SETTINGS = {
  'async': {},
  'dana': {'strategy.look_ahead': 'dana', 'strategy.in_flight': 2, 'optimizer.clip_norm': 1.0},
  'nesterov': {
    'optimizer.name': 'nesterov',
    'strategy.look_ahead': 'dana',
    'optimizer.multipliers': (('norm', 0), ('conv', 0.5)),
    'strategy.simulate.slow': ((0, 40.0),),
    'duration': '60 steps',
  },
  'backup': {**_BY_GROUPS, 'strategy.mode': 'synchronous', 'strategy.backup_workers': 1},
  'rennala': {**_BY_GROUPS, 'strategy.mode': 'rennala', 'strategy.parts': 2},
}


_SLOW = [builders.slow(name) for name in ('async', 'nesterov', 'backup')]


@pytest.mark.parametrize('name', ['dana', 'rennala', *_SLOW])
def test_a_replay_of_its_log_has_the_same_weights(tmp_path, config, monkeypatch, name):
  keys = _SETTINGS[name]
  times = {'strategy.simulate.spread': 0.3, 'eval.every': '6 steps'}
  config = _simulated(config, 3, **times | keys)
  _run(config, tmp_path)
  tickets, seconds = _replayed(config, tmp_path, monkeypatch)
  shards = 2 if keys.keys() & {'strategy.backup_workers', 'strategy.parts'} else 1
  steps = len(tickets) // shards
  assert sorted(tickets) == [[s, i] for s in range(steps) for i in range(shards)]
  lines = telemetry.read(str(tmp_path))
  scored = [r for r in lines if r['kind'] == 'validation']
  assert [r['step'] for r in scored] == [*range(6, steps + 1, 6)]
  for record in [*scored, *(r for r in lines if r['kind'] == 'train')]:
    assert record['simulated_seconds'] == seconds[shards * (record['step'] - 1)]


@pytest.mark.slow
@pytest.mark.parametrize('devices', [2, 4, 8])
def test_on_several_devices(tmp_path, config, monkeypatch, devices):
  config = _simulated(config, 3, batch_size=32)
  _run(config, tmp_path, devices)
  _replayed(config, tmp_path, monkeypatch, devices)


@pytest.mark.slow
@pytest.mark.parametrize('source', ['synthetic', 'digits'])  # the second is read in blocks
def test_an_interrupted_run_goes_on(tmp_path, config, monkeypatch, source):
  keys = {
    'data.source': source,
    **launching.CONSTANT,
    'duration': '5 steps',
    'strategy.look_ahead': 'dana',
  }
  _run(_simulated(config, 3, **keys), tmp_path)
  config = _simulated(config, 3, **keys | {'duration': '12 steps'})
  _run(config, tmp_path)
  tickets, seconds = _replayed(config, tmp_path, monkeypatch)
  assert sorted(tickets) == [[s, 0] for s in range(12)]
  # Time goes on too: three workers make three updates in each 0.1 s.
  assert seconds == pytest.approx(
    [0.1, 0.1, 0.1, 0.2, 0.2, *(0.2 + 0.1 * (n // 3 + 1) for n in range(7))]
  )


def test_a_batch_that_does_not_divide_into_the_parts_is_refused(tmp_path, config):
  keys = {'strategy.mode': 'rennala', 'strategy.parts': 3}
  text = '=32 does not divide by the 3 parts that an update is made of; config.strategy.parts'
  config = _simulated(config, 4, batch_size=32, **keys)
  builders.assert_refused([text], _run, config, tmp_path)


def test_statistics_that_real_servers_do_not_carry_are_refused(tmp_path, config):
  config = _simulated(config, 3, **{'model.name': 'tests.user_network:WithCounter'})
  words = ["'parameter_server' carries float32 only", 'batch_stats/count is int32']
  builders.assert_refused(words, _run, config, tmp_path)


def test_several_processes_are_refused(config):
  config = _simulated(config, 3)
  invocation = strategy_lib.Invocation(config, '', processes=types.SimpleNamespace(count=2))
  words = ['workers=3: expected one process', ' found 2']
  builders.assert_refused(words, strategy_lib.find(config).run, invocation, None)
