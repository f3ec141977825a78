"""A simulated run has the bits that a real one with its order has."""

import pytest

from anp_jax import config as config_lib
from anp_jax.reporting import telemetry
from anp_jax.runtimes.parameter_server import log as log_lib
from tests import builders, launching, serving

pytestmark = pytest.mark.usefixtures('quick_compiles')


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
  serving.on_devices(monkeypatch, 1)


def _simulated(config, workers, **keys):
  simulated = {'strategy.simulate.workers': workers}
  return serving.config_of(config, **serving.FULL, **simulated, **keys)


def _is_replayed(config, workdir, version):
  """Replay holds each version for as long as the log says."""
  serving.same_bits(launching.weights(workdir), serving.replayed(config, workdir, version))


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
  ],
  ids=['backup', 'bounded'],
)
def test_a_replay_of_its_log_has_the_same_bits(tmp_path, config, keys):
  config = _simulated(
    config, 3, **{'strategy.simulate.spread': 0.3, 'eval.every': '6 steps'}, **keys
  )
  serving.run(config, tmp_path)
  _is_replayed(config, tmp_path, 12)
  records = log_lib.read(str(tmp_path))
  tickets = [p['ticket'] for r in records if 'order' in r for p in r['parts']]
  shards = 2 if 'strategy.backup_workers' in keys else 1
  assert sorted(tickets) == [[s, i] for s in range(12) for i in range(shards)]
  seconds = {r['order'] + 1: r['parts'][0]['seconds'] for r in records[1:]}
  lines = telemetry.read(str(tmp_path))
  scored = [r for r in lines if r['kind'] == 'validation']
  assert [r['step'] for r in scored] == [6, 12]
  for record in [*scored, *(r for r in lines if r['kind'] == 'train')]:
    assert record['simulated_seconds'] == seconds[record['step']]


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
  serving.run(config, tmp_path)
  records = log_lib.read(str(tmp_path))
  tickets = [p['ticket'] for r in records if 'order' in r for p in r['parts']]
  assert sorted(tickets) == [[s, 0] for s in range(12)]
  # Time goes on too: three workers make three updates in each 0.1 s.
  seconds = [p['seconds'] for r in records if 'order' in r for p in r['parts']]
  assert seconds == pytest.approx(
    [0.1, 0.1, 0.1, 0.2, 0.2, *(0.2 + 0.1 * (n // 3 + 1) for n in range(7))]
  )
  _is_replayed(config, tmp_path, 12)


@pytest.mark.slow
def test_averages_are_scored(tmp_path, config):
  """With them the same is learnt, and other weights are scored."""
  for decay in (0.0, 0.9):
    changed = config_lib.replaced(_simulated(config, 3), {'ema': decay})
    serving.run(builders.editable(changed), tmp_path / str(decay))
  plain, averaged = (serving.losses(tmp_path / name) for name in ('0.0', '0.9'))
  differing = {kind for (kind, step), loss in plain.items() if loss != averaged[kind, step]}
  assert differing == {'validation'}


def test_several_processes_are_refused(tmp_path, config):
  with pytest.raises(config_lib.ConfigError, match='workers=3: expected one process.* found 2'):
    serving.run(_simulated(config, 3), tmp_path, 2)
