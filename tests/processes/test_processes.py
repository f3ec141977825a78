"""A run over several processes is the run of one, on real processes."""

import json
import re
import shutil
import signal
import time

import numpy as np
import pytest

from anp_jax.reporting import telemetry
from tests import builders, launching, ports, serving

pytestmark = pytest.mark.multiprocess

_LONG = {
  'cluster.elastic': 'off',
  'duration': '100000 steps',
  'eval.every': '100000 steps',
  'checkpoint.every': '100000 steps',
}


def _compare(single, many, rel):
  expected, losses = serving.losses(single), serving.losses(many)
  assert expected.keys() <= losses.keys()  # the end of a part is scored, too
  for key, loss in expected.items():
    assert losses[key] == pytest.approx(loss, rel=rel), key


def _until(ranks, pattern):
  """Waits until rank 0 has written this."""

  def has_written():
    assert ranks.processes[0].poll() is None, ranks.text()
    return re.search(pattern, ranks.text())

  launching.wait_until(has_written, 60, ranks.text)


@pytest.fixture(scope='module')
def alone(tmp_path_factory):
  """The workdir of one process with one device."""
  folder = tmp_path_factory.mktemp('alone')
  launching.run(folder, 1, launching.arguments(folder / 'run', **launching.CONSTANT))
  return folder / 'run'


@pytest.mark.parametrize(
  'topologies, sharding',
  [
    ([[2, 2], [4], [1, 1]], 'replicate'),
    builders.soak([[2, 2], [1], [4], [1, 1]], 'fsdp'),
    *(builders.soak([devices], 'replicate') for devices in ([1, 1], [1] * 4)),
  ],
  ids=str,
)
def test_any_topology_continues_any_other_as_if_alone(tmp_path, alone, topologies, sharding):
  """Also where the environment names a proxy: nobody asks it."""
  steps = [12 * (i + 1) // len(topologies) for i in range(len(topologies))]
  keys = {'sharding': f"(('.*', '{sharding}'),)", **launching.CONSTANT}
  for devices, step in zip(topologies, steps):
    texts = launching.run(
      tmp_path / str(step),
      len(devices),
      launching.arguments(tmp_path / 'run', duration=f'{step} steps', **keys),
      devices,
      environment=launching.dead_proxy(),
    )
    assert 'validation at step' in texts[0] and 'validation at step' not in ''.join(texts[1:])
  # Another order of sums in float32; another batch would be off by far more.
  _compare(alone, tmp_path / 'run', 1e-5)


@pytest.fixture(scope='module')
def colours(tmp_path_factory):
  """Arguments of a run in float64 that learns three colours in 50 steps."""
  folder = tmp_path_factory.mktemp('colours')
  rng = np.random.default_rng(0)
  labels = np.arange(48, dtype=np.int32) % 3
  images = rng.integers(0, 100, (48, 32, 32, 3), np.uint8)
  images[np.arange(48), :, :, labels] += 100
  np.savez(
    folder / 'set.npz',
    train_images=images,
    train_labels=labels,
    test_images=images[:8],
    test_labels=labels[:8],
  )
  keys = {
    'data.source': 'arrays',
    'data.path': str(folder / 'set.npz'),
    'data.eval_split': 'test',
    'duration': '50 steps',
    'eval.every': '50 steps',
    'checkpoint.every': '50 steps',
    **launching.FLOAT64,
    'optimizer.learning_rate': '0.1',
  }

  def run(name, devices):
    arguments = launching.arguments(folder / name / 'run', **keys)
    launching.run(folder / name, len(devices), arguments, devices, environment=launching.X64)
    return folder / name / 'run'

  return run


@pytest.fixture(scope='module')
def float64_alone(colours):
  return colours('one', [1])


@pytest.mark.parametrize(
  'devices', [[1] * 4, *(builders.soak(d) for d in ([1, 1], [2, 2]))], ids=str
)
def test_loss_curve_in_float64(colours, float64_alone, devices):
  losses = serving.losses(float64_alone)
  assert losses['train', 50] < losses['train', 1] / 2
  many = colours('-'.join(map(str, devices)), devices)
  # 2^-53 a sum; 50 steps each amplify the error of the last.
  _compare(float64_alone, many, 1e-9)


def test_a_disk_that_reads_badly_on_one_sends_all_to_another_step(tmp_path, alone):
  """Where each decided for itself, one would wait for the others for ever."""
  work = tmp_path / 'run'
  shutil.copytree(alone, work)
  before, newest = sorted(int(p.name) for p in (work / 'checkpoints').iterdir() if p.name.isdigit())
  arguments = launching.arguments(work, duration=f'{newest} steps', **launching.CONSTANT)
  texts = launching.run(tmp_path, 2, arguments, environment={'ANP_BAD_READ': f'1 {newest}'})
  for text in texts:
    assert f'checkpoint {newest} is damaged (rank 1: OSError: Input/output error)' in text
  assert f'continuing from step {before} of {newest}' in texts[0]
  _compare(alone, work, 1e-5)


@pytest.mark.parametrize('name', ['TERM', *(builders.soak(n) for n in ('USR1', 'INT'))])
def test_a_signal_to_one_stops_all_at_one_step(tmp_path, name):
  """Until then the run listens at the ports that docs/security.md names."""
  with launching.Ranks(tmp_path, 2, launching.arguments(tmp_path / 'run', **_LONG)) as ranks:
    _until(ranks, r'\b5/')
    ports.assert_those_of_sync(ranks.processes)
    ranks.processes[1].send_signal(getattr(signal, f'SIG{name}'))
    texts = ranks.ends(0, 130 if name == 'INT' else 0)
  assert f'SIG{name}: saving' in texts[1]
  step = int(re.search(r'stopped at step (\d+)', texts[0])[1])
  members = tmp_path / 'run/members.json'
  assert not members.exists() or 'ended' not in members.read_text()  # it goes on
  marker = json.loads((tmp_path / 'run/stopped.json').read_text())
  assert marker == {'step': step, 'total': 100000, 'reason': 'a signal'}
  keys = {**_LONG, 'duration': f'{step + 2} steps'}
  launching.run(tmp_path / 'again', 2, launching.arguments(tmp_path / 'run', **keys))
  assert not (tmp_path / 'run/stopped.json').exists()
  lines = telemetry.of_kind(str(tmp_path / 'run'), 'train')
  assert [line['step'] for line in lines] == list(range(1, step + 3))


def test_a_dead_rank_ends_the_others_by_name(tmp_path):
  arguments = launching.arguments(tmp_path / 'run', **_LONG, batch_size='48')
  with launching.Ranks(tmp_path, 3, arguments) as ranks:
    _until(ranks, r'\b5/')
    ranks.processes[1].kill()
    start = time.monotonic()
    assert ranks.wait_for(0, 30) == 75
    assert ranks.wait_for(2, 30) == 75
    assert time.monotonic() - start < 30
    for rank in (0, 2):
      assert re.search(r'error: rank 1 on \S+ has gone', ranks.text(rank))


def test_a_stopped_rank_ends_the_others_by_name(tmp_path):
  keys = {**_LONG, 'cluster.heartbeat_timeout': '5.0'}
  with launching.Ranks(tmp_path, 2, launching.arguments(tmp_path / 'run', **keys)) as ranks:
    _until(ranks, r'\b5/')
    ranks.processes[1].send_signal(signal.SIGSTOP)
    assert ranks.wait_for(0, 20) == 75
    assert re.search(r'rank 1 on \S+ has been silent for \d+ s', ranks.text(0))


def test_a_stalled_input_ends_all_and_names_the_late_rank(tmp_path):
  keys = {**_LONG, 'cluster.stall_timeout': '3.0'}
  arguments = launching.arguments(tmp_path / 'run', **keys)
  texts = launching.ended(tmp_path, [75, 75], arguments, environment={'ANP_STALL': '1 6'})
  assert all(re.search(r'rank 1 on \S+ is late', text) for text in texts)
  assert 'rank 0 on' not in texts[0].split('error:')[1]
  # What it was doing, by its own stack.
  assert 'stall_here' in texts[1]


def test_a_stop_that_cannot_be_ends_all_in_time(tmp_path):
  """A stalled input, and SIGTERM: nobody reaches the step to stop at."""
  keys = {**_LONG, 'cluster.stop_timeout': '4.0'}
  arguments = launching.arguments(tmp_path / 'run', **keys)
  with launching.Ranks(tmp_path, 2, arguments, environment={'ANP_STALL': '1 6'}) as ranks:
    _until(ranks, r'\b4/')
    time.sleep(2)
    ranks.processes[0].send_signal(signal.SIGTERM)
    start = time.monotonic()
    assert ranks.wait(30) == [75, 75]
    assert 3 < time.monotonic() - start < 15
    # Of the four seconds, and what some steps take.
    assert re.search(r'could not stop within 4(\.\d)? s of SIGTERM', ranks.text(1))


def test_the_time_limit_saves_in_time(tmp_path):
  keys = {**_LONG, 'time_limit': '0.3'}
  texts = launching.run(tmp_path, 2, launching.arguments(tmp_path / 'run', **keys))
  # Whose clock says so first stops all; the other may have had no time to.
  assert any('of time are left: saving' in text for text in texts)
  marker = json.loads((tmp_path / 'run/stopped.json').read_text())
  assert marker['reason'] == 'the time limit' and marker['step'] > 0
  assert (tmp_path / f'run/checkpoints/{marker["step"]}').is_dir()


def test_ranks_that_differ_do_not_start(tmp_path):
  arguments = launching.arguments(tmp_path / 'run')
  for text in launching.ended(tmp_path, [2, 2], arguments, last_arguments=['--config.seed=1']):
    (error,) = [line for line in text.splitlines() if 'error:' in line]
    assert re.search(r'rank 1 on \S+ has config.seed 1, but rank 0 on', error)


def test_uneven_devices_are_refused(tmp_path):
  for text in launching.ended(tmp_path, [2, 2], launching.arguments(tmp_path / 'run'), [2, 1]):
    assert re.search(r'rank 1 on \S+ has 1 devices, rank 0 on \S+ has 2', text)


@pytest.mark.parametrize('where', ['import', builders.soak('devices')])
def test_a_rank_that_is_stuck_while_jax_starts_is_named(tmp_path, where):
  """A file system that hangs, or a driver."""
  keys = {'cluster.rendezvous_timeout': '8', 'cluster.elastic': 'off'}
  arguments = launching.arguments(tmp_path / 'run', **keys)
  texts = launching.ended(tmp_path, [75, 75], arguments, environment={'ANP_STUCK': f'1 {where}'})
  assert all(re.search(r'error: .*rank 1 on \S+ is late', text) for text in texts)
  assert 'phased.py' in texts[1]  # its stack


def test_ctrl_c_while_jax_waits_for_the_others(tmp_path):
  """In native code, which no exception gets into; the others hear of it."""
  arguments = launching.arguments(tmp_path / 'run')
  with launching.Ranks(tmp_path, 2, arguments, environment={'ANP_STUCK': '1 import'}) as ranks:
    # JAX's own port: rank 0 waits there for rank 1, which never comes.
    launching.wait_until(lambda: len(ports.listening(ranks.processes)[0]) >= 2, 60, ranks.text)
    time.sleep(1)
    ranks.processes[0].send_signal(signal.SIGINT)
    for text in ranks.ends(130, 130, timeout=20):
      assert re.search('error: .*interrupted', text)
      assert 'Traceback' not in text


def test_one_process_opens_no_port(tmp_path):
  with launching.Ranks(tmp_path, 1, launching.arguments(tmp_path / 'run', **_LONG)) as ranks:
    _until(ranks, r'\b5/')
    assert ports.listening(ranks.processes) == [[]]


@pytest.fixture
def photographs(tmp_path):
  """A tree with one file that is no image; the keys that name it."""
  root = builders.photographs(tmp_path / 'tree', 24)
  (root / 'train/class_b/003.png').write_bytes(b'no image')
  return {'data.source': 'folder', 'data.path': str(root)}


@pytest.mark.soak
def test_processes_count_damage_like_one(tmp_path, photographs):
  for name, count in (('one', 1), ('many', 2)):
    arguments = launching.arguments(tmp_path / name / 'run', **photographs)
    launching.run(tmp_path / name, count, arguments)
  _compare(tmp_path / 'one/run', tmp_path / 'many/run', 1e-5)
  last = [telemetry.read(str(tmp_path / w / 'run'))[-2] for w in ('one', 'many')]
  # 12 steps of 16 rows are eight epochs of 24.
  assert [r['damaged'] for r in last] == [8, 8]


def test_damage_ends_all_processes(tmp_path, photographs):
  """Also the one whose own rows are all whole."""
  arguments = launching.arguments(tmp_path / 'run', **photographs, **{'data.max_damaged': '0'})
  for text in launching.ended(tmp_path, [1, 1], arguments):
    assert 'config.data.max_damaged=0 allows' in text
