"""A simulated run has the bits that a real one with its order has."""

import pytest

from anp_jax import config as config_lib
from anp_jax.reporting import telemetry
from anp_jax.runtimes.parameter_server import log as log_lib
from tests import launching, serving


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
  serving.on_devices(monkeypatch, 1)


def _simulated(config, workers, **keys):
  simulated = {'strategy.simulate.workers': workers}
  return serving.config_of(config, **serving.FULL, **simulated, **keys)


def _train(config, workdir):
  """Trains; returns the log's tickets and seconds, once a replay has the same bits."""
  serving.run(config, workdir)
  records = [r for r in log_lib.read(str(workdir)) if 'order' in r]
  # Replay holds each version for as long as the log says.
  replayed = serving.replayed(config, workdir, len(records))
  serving.same_bits(launching.weights(workdir), replayed)
  parts = [part for r in records for part in r['parts']]
  return [p['ticket'] for p in parts], [p['seconds'] for p in parts]


@pytest.mark.slow
@pytest.mark.parametrize(
  'keys',
  [
    {'strategy.mode': 'synchronous', 'strategy.backup_workers': 1},
    {
      'strategy.mode': 'bounded',
      'strategy.max_staleness': 1,
      'strategy.look_ahead': 'dana',
      'strategy.in_flight': 2,
    },
    {'strategy.mode': 'ringmaster', 'strategy.max_staleness': 1, 'strategy.parts': 2},
  ],
  ids=['backup', 'bounded', 'ringmaster'],
)
def test_a_replay_of_its_log_has_the_same_bits(tmp_path, config, keys):
  config = _simulated(
    config, 3, **{'strategy.simulate.spread': 0.3, 'eval.every': '6 steps'}, **keys
  )
  tickets, seconds = _train(config, tmp_path)
  shards = 1 if keys['strategy.mode'] == 'bounded' else 2
  assert sorted(tickets) == [[s, i] for s in range(12) for i in range(shards)]
  lines = telemetry.read(str(tmp_path))
  scored = [r for r in lines if r['kind'] == 'validation']
  assert [r['step'] for r in scored] == [6, 12]
  for record in [*scored, *(r for r in lines if r['kind'] == 'train')]:
    assert record['simulated_seconds'] == seconds[shards * (record['step'] - 1)]


@pytest.mark.slow
def test_an_interrupted_run_goes_on(tmp_path, config):
  keys = {
    'schedule.name': 'constant',
    'schedule.warmup': '0 steps',
    'duration': '5 steps',
    'strategy.look_ahead': 'dana',
  }
  serving.run(_simulated(config, 3, **keys), tmp_path)
  config = _simulated(config, 3, **keys | {'duration': '12 steps'})
  tickets, seconds = _train(config, tmp_path)
  assert sorted(tickets) == [[s, 0] for s in range(12)]
  # Time goes on too: three workers make three updates in each 0.1 s.
  assert seconds == pytest.approx(
    [0.1, 0.1, 0.1, 0.2, 0.2, *(0.2 + 0.1 * (n // 3 + 1) for n in range(7))]
  )


def test_a_batch_that_does_not_divide_into_the_parts_is_refused(tmp_path, config):
  keys = {'strategy.mode': 'ringmaster', 'strategy.parts': 3, 'batch_size': 32}
  message = 'batch_size=32 does not divide by the 3 parts that an update is made of'
  with pytest.raises(config_lib.ConfigError, match=message):
    serving.run(_simulated(config, 4, **keys), tmp_path)


def test_several_processes_are_refused(tmp_path, config):
  with pytest.raises(config_lib.ConfigError, match='workers=3: expected one process.* found 2'):
    serving.run(_simulated(config, 3), tmp_path, 2)
