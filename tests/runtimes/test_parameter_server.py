"""The server strategy equals its references, in one process of threads."""

import jax
import numpy as np
import pytest

from anp_jax import cluster, train
from anp_jax.config import strategy as strategy_lib
from anp_jax.reporting import telemetry
from anp_jax.runtimes.parameter_server import log as log_lib, slice_optimizer
from tests import builders, launching, serving

# A schedule that the length of the run shapes.
_COSINE = {'schedule.name': 'cosine', 'schedule.warmup': '0 steps', 'strategy.in_flight': 1}


_DANA = {'strategy.look_ahead': 'dana', 'strategy.servers': 2, 'optimizer.name': 'nesterov'}


@pytest.fixture
def one_device(monkeypatch):
  serving.on_devices(monkeypatch, 1)


def _close(a, b, tolerance):
  assert a.keys() == b.keys()
  for name, leaf in a.items():
    np.testing.assert_allclose(leaf, b[name], rtol=tolerance, atol=tolerance, err_msg=name)


def _tickets(workdir):
  records = log_lib.read(str(workdir))
  return [p['ticket'] for r in records if 'order' in r for p in r['parts']]


def test_a_server_that_only_serves_needs_no_accelerator_to_train():
  """An evaluation spans all processes, on one platform."""
  keys = {'strategy.name': 'parameter_server', 'strategy.servers': '2'}
  keys['strategy.dedicated'] = 'True'
  config = builders.load('configs/resnet_anp.py:tiny', keys)
  strategy = strategy_lib.find(config)
  for mode, wants in ('train', [True, False, True]), ('evaluate', [True] * 3):
    assert [strategy.needs_platform(config, mode, i) for i in range(3)] == wants


@pytest.mark.slow
def test_one_worker_is_sync(tmp_path, config, one_device, monkeypatch):
  config.duration = '6 steps'
  alone = serving.config_of(config, **serving.FULL, **{'strategy.in_flight': 1})
  scores = serving.run(alone, tmp_path / 'server')
  monkeypatch.setattr(jax, 'devices', jax.local_devices)
  sync = serving.config_of(config, **serving.FULL, **{'strategy.name': 'sync'})
  reference = train.run(sync, str(tmp_path / 'sync'))
  # The gradient and the update are two programs, which XLA rounds elsewhere:
  # 2^-24 an operation, over 6 steps.
  _close(launching.weights(tmp_path / 'sync'), launching.weights(tmp_path / 'server'), 2e-5)
  assert scores['loss'] == pytest.approx(reference['loss'], rel=1e-5)
  losses = serving.losses(tmp_path / 'server')
  for key, loss in serving.losses(tmp_path / 'sync').items():
    assert losses[key] == pytest.approx(loss, rel=1e-5), key
  assert _tickets(tmp_path / 'server') == [[s, 0] for s in range(6)]
  # Both compile before the time of their steps begins.
  for name in 'server', 'sync':
    seconds = telemetry.durations(str(tmp_path / name))['compiling']
    lines = telemetry.of_kind(str(tmp_path / name), 'train')
    rates = [line['seconds'] for line in lines if 'images_per_second' in line]
    # One of the server's took 90 us, for the line before it was late.
    assert len(rates) == 5 and 5e-4 < sum(rates) < seconds


@pytest.mark.slow
def test_number_of_servers_changes_no_bit(tmp_path, config, one_device, monkeypatch):
  runs, steps = [], set()
  beat = cluster.Processes.heartbeat

  def heartbeat(self, phase, step=0):
    steps.add(step)
    beat(self, phase, step)

  monkeypatch.setattr(cluster.Processes, 'heartbeat', heartbeat)
  for servers in (1, 3):
    keys = {
      'duration': '3 steps',
      'strategy.servers': servers,
      'strategy.dedicated': True,
      'strategy.in_flight': 1,
      'optimizer.name': 'adamw',
    }
    server_config = serving.config_of(config, **serving.FULL, **keys)
    serving.run(server_config, tmp_path / str(servers), servers + 1)
    runs.append(launching.weights(tmp_path / str(servers)))
  serving.same_bits(*runs)
  assert 3 in steps and steps <= {0, 1, 2, 3}  # of all processes: a step is a version


@pytest.mark.slow
def test_synchronous_mode_is_sync_on_as_many_devices(tmp_path, config, monkeypatch):
  serving.on_devices(monkeypatch, 1)
  # Without dropout: its masks belong to the rows that a device computes.
  keys = {
    'duration': '6 steps',
    'model.name': 'tests.user_network:PlainNet',
    'model.norm_group': 4,
    'data.image_size': 8,
  }
  many = serving.config_of(config, **keys, **{'strategy.mode': 'synchronous'})
  serving.run(many, tmp_path / 'server', 2)
  builders.use_devices(monkeypatch, 2)
  sync = serving.config_of(config, **keys, **{'strategy.name': 'sync'})
  train.run(sync, str(tmp_path / 'sync'))
  # As above, and sums over shards in another order.
  _close(launching.weights(tmp_path / 'sync'), launching.weights(tmp_path / 'server'), 2e-5)


@pytest.mark.parametrize(
  'keys',
  [
    builders.slow({'strategy.mode': 'rennala', 'strategy.parts': 1, 'optimizer.name': 'rmsprop'}),
    builders.soak(_DANA),
    builders.soak({'strategy.mode': 'synchronous', 'strategy.backup_workers': 1}),
    builders.slow({'strategy.mode': 'rennala', 'strategy.parts': 2}),
  ],
  ids=['one part', 'dana', 'backup', 'two parts'],
)
def test_replay_gives_the_same_bits(tmp_path, config, one_device, keys):
  config = serving.config_of(config, **serving.FULL, **keys)
  serving.run(config, tmp_path, 3)
  serving.same_bits(launching.weights(tmp_path), serving.replayed(config, tmp_path, 12))
  shards = keys.get('strategy.parts', 1 + ('strategy.backup_workers' in keys))
  used = sorted(map(tuple, _tickets(tmp_path)))
  assert used == [(s, i) for s in range(12) for i in range(shards)]
  most = 0 if 'strategy.mode' in keys else 12
  assert max(log_lib.staleness(log_lib.read(str(tmp_path)))) <= most


@pytest.mark.slow
def test_failure_ends_the_run_while_slices_are_fetched(tmp_path, config, one_device, monkeypatch):
  """One server waits for a version which the other cannot make."""
  real = slice_optimizer.SliceOptimizer.apply

  def apply(self, state, *more):
    new, finite = real(self, state, *more)
    return new, finite and (self.stats_size > 0 or int(new.step) != 4)

  monkeypatch.setattr(slice_optimizer.SliceOptimizer, 'apply', apply)
  keys = {'strategy.servers': 2, 'strategy.dedicated': True}
  config = serving.config_of(config, **serving.FULL, **keys, **{'checkpoint.every': '4 steps'})
  with pytest.raises(cluster.RunFailedError, match='update 3 is not finite'):
    serving.run(config, tmp_path, 3)


@pytest.mark.slow
def test_replays_a_run_that_was_made_longer(tmp_path, config, one_device):
  """Its first part followed a schedule that ended sooner."""
  keys = {**serving.FULL, **_COSINE}
  for duration in ('2 steps', '4 steps'):
    config = serving.config_of(config, **keys, duration=duration)
    serving.run(config, tmp_path)
  serving.same_bits(launching.weights(tmp_path), serving.replayed(config, tmp_path, 4))
  assert config.duration == '4 steps'


@pytest.mark.soak
def test_resumes_as_itself_and_as_sync(tmp_path, config, one_device, monkeypatch, capsys):
  keys = {**serving.FULL, 'schedule.name': 'constant', 'strategy.in_flight': 1}
  straight = serving.config_of(config, **keys)
  serving.run(straight, tmp_path / 'straight')
  half = serving.config_of(config, **keys, duration='6 steps')
  serving.run(half, tmp_path / 'parts')
  serving.run(straight, tmp_path / 'parts')
  assert 'continuing from step 6 of 12' in capsys.readouterr().out
  serving.same_bits(launching.weights(tmp_path / 'straight'), launching.weights(tmp_path / 'parts'))
  serving.same_bits(
    launching.weights(tmp_path / 'parts'), serving.replayed(straight, tmp_path / 'parts', 12)
  )
  monkeypatch.setattr(jax, 'devices', jax.local_devices)
  longer = serving.config_of(config, **keys, **{'duration': '16 steps', 'strategy.name': 'sync'})
  scores = train.run(longer, str(tmp_path / 'parts'))
  assert scores['examples'] == 64
  assert 'continuing from step 12 of 16' in capsys.readouterr().out
  assert ('train', 16) in serving.losses(tmp_path / 'parts')
