"""Who may train in a workdir, when its last process was killed or is alive."""

import json
import os
import time

import pytest

from anp_jax.cluster import cluster_env, generation, workdir_lock
from anp_jax.system import files
from tests import builders, launching

_HOLD = """
import sys, time
from anp_jax.cluster import cluster_env, workdir_lock
with workdir_lock.held(sys.argv[1], cluster_env.ALONE):
  print('held', flush=True)
  time.sleep(60)
"""


class _Time:
  """A clock that only `sleep` moves on."""

  def __init__(self):
    self.now, self.on_sleep = 0.0, lambda: None

  def sleep(self, seconds):
    self.now += seconds
    self.on_sleep()


def _holder(**values):
  return {**workdir_lock._this_process({}), **values}


def _lock(folder, holder=None):
  clock = _Time()
  lock = workdir_lock.WorkdirLock(str(folder), holder or _holder(), lambda: clock.now, clock.sleep)
  return lock, clock


def _hold(folder, *generation):
  with workdir_lock.held(str(folder), cluster_env.ALONE, *generation):
    pass


def _write(folder, **values):
  """Leaves the lock of a process elsewhere; returns what it wrote."""
  record = {**_holder(host='node7', process=123, machine='another'), 'beat': '1', **values}
  files.write_atomic(str(folder / workdir_lock.NAME), json.dumps(record))
  return record


@pytest.fixture
def process(tmp_path):
  """A process of this machine that holds the lock."""
  with launching.start('-c', _HOLD, tmp_path) as child:
    child.hears('held')
    yield child


def test_a_process_that_lives_is_named_and_nothing_changes(tmp_path, process):
  before = (tmp_path / workdir_lock.NAME).stat().st_ino
  builders.assert_refused([f'in use by process {process.pid} on '], _hold, tmp_path)
  assert (tmp_path / workdir_lock.NAME).stat().st_ino == before
  assert os.listdir(tmp_path) == [workdir_lock.NAME]


def test_a_killed_process_of_this_machine_blocks_nobody(tmp_path, process):
  process.kill()
  # Not waited for: its entry in the table of processes is still there.
  while workdir_lock._start_time(process.pid):
    time.sleep(0.01)
  lock, clock = _lock(tmp_path)
  lock.acquire()
  assert clock.now == 0
  lock.release()
  assert os.listdir(tmp_path) == []


def test_a_number_that_another_process_has_now_blocks_nobody(tmp_path):
  _write(tmp_path, **_holder(started='1'))
  lock, clock = _lock(tmp_path)
  lock.acquire()
  assert clock.now == 0
  lock.release()


@pytest.mark.parametrize('rank', [0, 1])
def test_the_workdir_is_free_after_a_run(tmp_path, rank):
  """And for ranks other than 0, which hold nothing."""
  env = cluster_env.ALONE._replace(index=rank, count=rank + 1)
  with workdir_lock.held(str(tmp_path), env):
    assert os.listdir(tmp_path) == [workdir_lock.NAME] * (rank == 0)
  assert os.listdir(tmp_path) == []


@pytest.mark.parametrize('text', [None, ''], ids=['silent', 'just created'])
def test_a_silent_process_of_another_host_is_waited_for(tmp_path, text):
  _write(tmp_path)
  if text is not None:
    (tmp_path / workdir_lock.NAME).write_text(text)
  lock, clock = _lock(tmp_path)
  lock.acquire()
  assert clock.now == pytest.approx(workdir_lock._STALE_AFTER)
  record = json.loads((tmp_path / workdir_lock.NAME).read_text())
  assert record['process'] == os.getpid()
  lock.release()


@pytest.mark.parametrize('is_written', [True, False])
def test_a_sign_of_life_of_another_host_refuses(tmp_path, is_written):
  """Whatever the clocks of the two hosts say: no time is in the file."""
  _write(tmp_path, job='5')
  if not is_written:  # both began at the same moment
    (tmp_path / workdir_lock.NAME).write_text('')
  lock, clock = _lock(tmp_path)

  def beat():
    if clock.now > 40:
      _write(tmp_path, job='5', beat='2')

  clock.on_sleep = beat
  builders.assert_refused(['in use by process 123 on node7 (job 5)'], lock.acquire)
  assert 40 < clock.now < 42


@pytest.mark.parametrize(
  'job, restart, waits', [('5', '2', False), ('5', '1', True), ('5', '0', True), ('6', '2', True)]
)
def test_a_job_that_slurm_starts_again_does_not_wait(tmp_path, job, restart, waits):
  _write(tmp_path, job='5', restart='1')
  lock, clock = _lock(tmp_path, _holder(job=job, restart=restart))
  lock.acquire()
  assert (clock.now > 0) == waits
  lock.release()


def test_a_run_that_goes_on_takes_over_its_own_lock_alone(tmp_path):
  later = generation.Generation(number=2, started_at=1.5e9)
  _write(tmp_path, run=1.5e9)  # of its process on another machine
  with workdir_lock.held(str(tmp_path), cluster_env.ALONE, later):
    record = json.loads((tmp_path / workdir_lock.NAME).read_text())
    assert (record['run'], record['process']) == (1.5e9, os.getpid())
  another = _write(tmp_path, **_holder(run=1.6e9))
  builders.assert_refused(['in use by'], _hold, tmp_path, later)
  assert json.loads((tmp_path / workdir_lock.NAME).read_text()) == another


def test_of_two_that_take_over_one_is_put_back(tmp_path):
  """The second has judged the file of before; it removes no other."""
  _write(tmp_path)
  stale = (tmp_path / workdir_lock.NAME).read_text()
  first, _ = _lock(tmp_path)
  first.acquire()
  second, _ = _lock(tmp_path)
  second._remove_stale(stale)
  assert first._is_ours()
  assert os.listdir(tmp_path) == [workdir_lock.NAME]
  builders.assert_refused([f'process {os.getpid()} on'], second.acquire)
  first.release()


def test_signs_of_life_never_go_into_the_file_of_another(tmp_path, monkeypatch):
  """A process that was stopped for long ends when it goes on."""
  ends = []
  monkeypatch.setattr(workdir_lock.termination, 'end_process', lambda *args: ends.append(args))
  monkeypatch.setattr(workdir_lock, '_PERIOD', 0.02)
  lock, _ = _lock(tmp_path)
  lock.acquire()
  path = tmp_path / workdir_lock.NAME
  first = path.read_text()
  launching.wait_until(lambda: path.read_text() != first, 20, lambda: 'no sign of life')
  assert not ends
  other = _write(tmp_path)
  launching.wait_until(lambda: ends, 20, lambda: 'does not see who has taken over')
  lock.release()
  assert ends[0][0] == 2 and 'process 123 on node7' in ends[0][1]
  assert json.loads(path.read_text()) == other


def test_a_workdir_that_cannot_be_written_to_is_one_line(tmp_path):
  (tmp_path / 'file').write_text('')
  builders.assert_refused(['cannot be written to: Not'], _hold, tmp_path / 'file' / 'run')
