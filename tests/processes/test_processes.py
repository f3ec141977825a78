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

# Other numbers of processes and devices: `make soak`.
_SOAK = pytest.mark.soak


def _compare(single, many, rel):
  expected, losses = serving.losses(single), serving.losses(many)
  assert expected.keys() <= losses.keys()  # the end of a part is scored, too
  for key, loss in expected.items():
    assert losses[key] == pytest.approx(loss, rel=rel), key


def _until(ranks, pattern, rank=0, timeout=60):
  """Waits until a rank has written this."""
  end = time.monotonic() + timeout
  while not re.search(pattern, ranks.text(rank)):
    assert time.monotonic() < end, ranks.text(rank)
    assert ranks.processes[rank].poll() is None, ranks.text(rank)
    time.sleep(0.05)


# The rate does not end with a part of a run: one that goes on has the same.
_CONSTANT = {'schedule.name': 'constant', 'schedule.warmup': '0 steps'}


@pytest.fixture(scope='module')
def alone(tmp_path_factory):
  """The workdir of one process with one device."""
  folder = tmp_path_factory.mktemp('alone')
  launching.run(folder, 1, launching.arguments(folder / 'run', **_CONSTANT))
  return folder / 'run'


@pytest.mark.parametrize(
  'topologies, sharding',
  [
    ([[2, 2], [4], [1, 1]], 'replicate'),
    pytest.param([[2, 2], [1], [4], [1, 1]], 'fsdp', marks=_SOAK),
    *(pytest.param([devices], 'replicate', marks=_SOAK) for devices in ([1, 1], [1] * 4)),
  ],
  ids=str,
)
def test_any_topology_continues_any_other_as_if_alone(tmp_path, alone, topologies, sharding):
  """Also where the environment names a proxy: nobody asks it."""
  steps = [4 * (i + 1) for i in range(len(topologies) - 1)] + [12]
  for devices, step in zip(topologies, steps):
    texts = launching.run(
      tmp_path / str(step),
      len(devices),
      launching.arguments(
        tmp_path / 'run', duration=f'{step} steps', sharding=f"(('.*', '{sharding}'),)", **_CONSTANT
      ),
      devices,
      environment=launching.dead_proxy(),
    )
    for rank, text in enumerate(texts):
      lines = [line for line in text.splitlines() if line]
      assert len(devices) == 1 or all(line.startswith(f'[{rank} ') for line in lines), text
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
    'model.dtype': 'float64',
    'model.param_dtype': 'float64',
    'strategy.reduce_dtype': 'float64',
    'optimizer.learning_rate': '0.1',
  }

  def run(name, devices):
    launching.run(
      folder / name,
      len(devices),
      launching.arguments(folder / name / 'run', **keys),
      devices,
      environment={'JAX_ENABLE_X64': '1'},
    )
    return folder / name / 'run'

  return run


@pytest.fixture(scope='module')
def float64_alone(colours):
  return colours('one', [1])


@pytest.mark.parametrize(
  'devices', [[1] * 4, *(pytest.param(d, marks=_SOAK) for d in ([1, 1], [2, 2]))], ids=str
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
  with launching.Ranks(
    tmp_path,
    2,
    launching.arguments(work, duration=f'{newest} steps', **_CONSTANT),
    environment={'ANP_BAD_READ': f'1 {newest}'},
  ) as ranks:
    assert ranks.wait(60) == [0, 0], ranks.text(0) + ranks.text(1)
    for rank in (0, 1):
      assert (
        f'checkpoint {newest} is damaged (rank 1: OSError: Input/output error)'
      ) in ranks.text(rank)
    assert f'continuing from step {before} of {newest}' in ranks.text(0)
  _compare(alone, work, 1e-5)


@pytest.mark.parametrize(
  'name', ['TERM', *(pytest.param(n, marks=pytest.mark.soak) for n in ('USR1', 'INT'))]
)
def test_a_signal_to_one_stops_all_at_one_step(tmp_path, name):
  """Until then the run listens at the ports that docs/security.md names."""
  with launching.Ranks(tmp_path, 2, launching.arguments(tmp_path / 'run', **_LONG)) as ranks:
    _until(ranks, r'\b5/')
    ports.assert_those_of_sync(ranks.processes)
    ranks.processes[1].send_signal(getattr(signal, f'SIG{name}'))
    ended = [0, 130 if name == 'INT' else 0]
    assert ranks.wait(60) == ended, ranks.text(0) + ranks.text(1)
    assert f'SIG{name}: saving' in ranks.text(1)
    step = int(re.search(r'stopped at step (\d+)', ranks.text(0))[1])
  marker = json.loads((tmp_path / 'run/stopped.json').read_text())
  members = tmp_path / 'run/members.json'
  assert not members.exists() or 'ended' not in members.read_text()  # it goes on
  assert marker == {'step': step, 'total': 100000, 'reason': 'a signal'}
  launching.run(
    tmp_path / 'again',
    2,
    launching.arguments(tmp_path / 'run', **{**_LONG, 'duration': f'{step + 2} steps'}),
  )
  assert not (tmp_path / 'run/stopped.json').exists()
  steps = [r['step'] for r in telemetry.read(str(tmp_path / 'run')) if r['kind'] == 'train']
  assert steps == list(range(1, step + 3))


def test_a_dead_rank_ends_the_others_by_name(tmp_path):
  with launching.Ranks(
    tmp_path, 3, launching.arguments(tmp_path / 'run', **_LONG, batch_size='48')
  ) as ranks:
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
  with launching.Ranks(
    tmp_path, 2, launching.arguments(tmp_path / 'run', **keys), environment={'ANP_STALL': '1 6'}
  ) as ranks:
    assert ranks.wait(90) == [75, 75], ranks.text(0)
    for rank in (0, 1):
      assert re.search(r'rank 1 on \S+ is late', ranks.text(rank))
    assert 'rank 0 on' not in ranks.text(0).split('error:')[1]
    # What it was doing, by its own stack.
    assert 'stall_here' in ranks.text(1)


def test_a_stop_that_cannot_be_ends_all_in_time(tmp_path):
  """A stalled input, and SIGTERM: nobody reaches the step to stop at."""
  keys = {**_LONG, 'cluster.stop_timeout': '4.0'}
  with launching.Ranks(
    tmp_path, 2, launching.arguments(tmp_path / 'run', **keys), environment={'ANP_STALL': '1 6'}
  ) as ranks:
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
  with launching.Ranks(tmp_path, 2, arguments, last_arguments=['--config.seed=1']) as ranks:
    assert ranks.wait(60) == [2, 2], ranks.text(0) + ranks.text(1)
    for rank in (0, 1):
      (error,) = [line for line in ranks.text(rank).splitlines() if 'error:' in line]
      assert re.search(r'rank 1 on \S+ has config.seed 1, but rank 0 on', error)


def test_uneven_devices_are_refused(tmp_path):
  with launching.Ranks(tmp_path, 2, launching.arguments(tmp_path / 'run'), [2, 1]) as ranks:
    assert ranks.wait(60) == [2, 2]
    for rank in (0, 1):
      assert re.search(r'rank 1 on \S+ has 1 devices, rank 0 on \S+ has 2', ranks.text(rank))


@pytest.mark.parametrize('where', ['import', pytest.param('devices', marks=_SOAK)])
def test_a_rank_that_is_stuck_while_jax_starts_is_named(tmp_path, where):
  """A file system that hangs, or a driver."""
  keys = {'cluster.rendezvous_timeout': '8', 'cluster.elastic': 'off'}
  with launching.Ranks(
    tmp_path,
    2,
    launching.arguments(tmp_path / 'run', **keys),
    environment={'ANP_STUCK': f'1 {where}'},
  ) as ranks:
    assert ranks.wait(60) == [75, 75], ranks.text(0) + ranks.text(1)
    for rank in (0, 1):
      assert re.search(r'error: .*rank 1 on \S+ is late', ranks.text(rank))
    assert 'phased.py' in ranks.text(1)  # its stack


def test_ctrl_c_while_jax_waits_for_the_others(tmp_path):
  """In native code, which no exception gets into; the others hear of it."""
  with launching.Ranks(
    tmp_path, 2, launching.arguments(tmp_path / 'run'), environment={'ANP_STUCK': '1 import'}
  ) as ranks:
    # JAX's own port: rank 0 waits there for rank 1, which never comes.
    launching.wait_until(lambda: len(ports.listening(ranks.processes)[0]) >= 2, 60, ranks.text)
    time.sleep(1)
    ranks.processes[0].send_signal(signal.SIGINT)
    assert ranks.wait(20) == [130, 130], ranks.text(0) + ranks.text(1)
    for rank in (0, 1):
      assert re.search('error: .*interrupted', ranks.text(rank))
      assert 'Traceback' not in ranks.text(rank)


def test_one_process_opens_no_port(tmp_path):
  with launching.Ranks(tmp_path, 1, launching.arguments(tmp_path / 'run', **_LONG)) as ranks:
    _until(ranks, r'\b5/')
    assert ports.listening(ranks.processes) == [[]]


def test_nobody_at_the_coordinator(tmp_path):
  done = launching.python(
    'main.py',
    '--num_processes=2',
    '--process_id=1',
    f'--coordinator=127.0.0.1:{launching.free_port()}',
    '--config.cluster.rendezvous_timeout=3',
    *launching.arguments(tmp_path / 'run'),
    timeout=60,
  )
  assert done.returncode == 69
  assert 'no answer from rank 0' in done.stderr
  assert 'loopback' in done.stderr


@pytest.fixture
def photographs(tmp_path):
  """A tree with one file that is no image; the keys that name it."""
  root = builders.photographs(tmp_path / 'tree', 24)
  (root / 'train/class_b/003.png').write_bytes(b'no image')
  return {'data.source': 'folder', 'data.path': str(root)}


@pytest.mark.soak
def test_processes_count_damage_like_one(tmp_path, photographs):
  for name, count in (('one', 1), ('many', 2)):
    launching.run(
      tmp_path / name, count, launching.arguments(tmp_path / name / 'run', **photographs)
    )
  _compare(tmp_path / 'one/run', tmp_path / 'many/run', 1e-5)
  last = [telemetry.read(str(tmp_path / w / 'run'))[-2] for w in ('one', 'many')]
  # 12 steps of 16 rows are eight epochs of 24.
  assert [r['damaged'] for r in last] == [8, 8]


def test_damage_ends_all_processes(tmp_path, photographs):
  """Also the one whose own rows are all whole."""
  keys = {**photographs, 'data.max_damaged': '0'}
  with launching.Ranks(tmp_path, 2, launching.arguments(tmp_path / 'run', **keys)) as ranks:
    assert ranks.wait() == [1, 1]
    for rank in (0, 1):
      assert 'config.data.max_damaged=0 allows' in ranks.text(rank)
