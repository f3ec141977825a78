"""Tests of prepare: many files, workers, and what kills them."""

import functools
import io
import multiprocessing
import os
import pathlib
import re
import shutil
import signal
import time

import numpy as np
from PIL import Image
import pytest

from anp_jax import config as config_lib
from anp_jax.data.prepare import __main__ as prepare, worker_pool
from tests import builders, prepared


@pytest.fixture(scope='module')
def many(tmp_path_factory):
  """1,400 files, every seventh to be converted; 7 tasks to examine them."""
  files = {}
  for i in range(1400):
    kind = 'BMP' if i % 7 else 'TIFF'
    split = 'train' if i % 5 else 'validation'
    # 5 KB that do not shrink.
    pixels = builders.random_pixels(32, 50, i)
    name = f'{split}/{"ab"[i % 2]}/{i:04}.bmp'
    files[name] = builders.encode_image(pixels, kind)
  for i in (3, 500, 1399):
    name = next(n for n in files if n.endswith(f'{i:04}.bmp'))
    files[name] = files[name][:-1]
  return builders.write_tree(tmp_path_factory.mktemp('many'), files)


def _arguments(many, data_dir, workers=2):
  return [
    f'--from={many}',
    '--name=many',
    f'--data_dir={data_dir}',
    '--shard_megabytes=1',
    f'--workers={workers}',
    '--policy=suffix=keep',
  ]


@pytest.fixture(scope='module')
def undisturbed(many, tmp_path_factory):
  """Digests of the files that every run has to give."""
  data_dir = tmp_path_factory.mktemp('undisturbed')
  prepared.finish(prepared.start(*_arguments(many, data_dir, workers=1)))
  result = prepared.digests(prepared.folder(data_dir, 'many'))
  shards = [n for n in result if 'array_record' in n]
  assert len(shards) == 6  # 5.4 and 1.4 MB, of 1 MiB about
  for split, lost in (('train', 2), ('validation', 1)):
    stored = prepared.examples(data_dir, 'many', split)
    folder = many / split
    files = sorted(os.path.join(*p.parts[-2:]) for p in folder.glob('*/*'))
    names = {name for name, _, _ in stored}
    assert len(names) == len(files) - lost
    assert [name for name, _, _ in stored] == [f for f in files if f in names]
    for name, data, label in stored:
      number = int(pathlib.Path(name).stem)
      assert label == number % 2
      if number % 7:
        assert data == (folder / name).read_bytes()
      else:
        image = Image.open(io.BytesIO(data))
        assert image.format == 'PNG'
        pixels = builders.random_pixels(32, 50, number)
        np.testing.assert_array_equal(image, pixels)
  return result


@pytest.mark.slow
def test_any_number_of_workers_gives_the_same_bytes(many, undisturbed, tmp_path):
  prepared.finish(prepared.start(*_arguments(many, tmp_path, workers=3)))
  assert prepared.digests(prepared.folder(tmp_path, 'many')) == undisturbed


def _work_files(data_dir):
  """Names of the files that tasks have finished so far."""
  return {
    os.path.relpath(path, data_dir)
    for path in pathlib.Path(data_dir).glob('anp_folder/.many.*/**/*')
    if path.is_file() and not path.name.startswith('.')
  }


def _children(process):
  path = f'/proc/{process.pid}/task/{process.pid}/children'
  return [int(pid) for pid in pathlib.Path(path).read_text().split()]


def _runs(pid):
  try:
    with open(f'/proc/{pid}/stat') as file:
      return file.read().rpartition(')')[2].split()[0] != 'Z'
  except FileNotFoundError:
    return False


def _workers(process):
  """The worker processes, without multiprocessing's tracker."""
  return [
    pid
    for pid in _children(process)
    if b'spawn_main' in pathlib.Path(f'/proc/{pid}/cmdline').read_bytes()
  ]


def _are_gone(pids):
  return not any(map(_runs, pids))


def _has_new_file(data_dir, pattern, before):
  new = _work_files(data_dir) - before
  return any(re.search(pattern, name) for name in new)


def _wait_for(condition, what):
  end = time.monotonic() + 30
  while not condition():
    assert time.monotonic() < end, what
    time.sleep(0.002)


def _interrupt(arguments, data_dir, pattern, signal_number):
  """Sends a signal once a task has left a new file of a matching name.

  Returns:
    The status and the standard error of the command, whose workers are gone.
  """
  before = _work_files(data_dir)
  process = prepared.start(*arguments)
  is_time = functools.partial(_has_new_file, data_dir, pattern, before)
  _wait_for(is_time, pattern)
  children = _children(process)
  # Ctrl-C goes to all processes of a terminal.
  send = os.killpg if signal_number == signal.SIGINT else os.kill
  send(process.pid, signal_number)
  _, err = process.communicate(timeout=30)
  _wait_for(functools.partial(_are_gone, children), 'workers outlive it')
  return process.returncode, err


_needs_proc = pytest.mark.skipif(
  not os.path.exists('/proc/self/task'), reason='children are read from /proc'
)


@pytest.mark.slow
@_needs_proc
def test_a_killed_command_resumes_where_it_was(many, undisturbed, tmp_path):
  """At several moments; each run resumes where the one before it was."""
  arguments = _arguments(many, tmp_path)
  for pattern, signal_number in (
    (r'/examined/train-.*\.jsonl$', signal.SIGKILL),
    (r'/examined/validation-.*\.jsonl$', signal.SIGTERM),
    (r'/converted/', signal.SIGKILL),
    (r'/set/', signal.SIGKILL),
    (r'/written/', signal.SIGINT),
  ):
    status, err = _interrupt(arguments, tmp_path, pattern, signal_number)
    assert not prepared.folder(tmp_path, 'many').exists()
    if signal_number == signal.SIGINT:
      assert status == 130
      assert 'interrupted; run the same command to resume' in err
    else:
      assert status == -signal_number
    assert 'Traceback' not in err and 'Warning' not in err
  # A shard is finished when a record of it is there, too: a moment later.
  names = _work_files(tmp_path)
  times = {
    n: os.stat(tmp_path / n).st_mtime_ns
    for n in names
    if n.replace('/set/', '/written/') + '.json' in names - {n}
  }
  assert 0 < len(times) <= 6 and all('/set/' in n for n in times)
  # As if it had been killed in the last moments, too.
  folder = pathlib.Path(tmp_path, next(iter(times))).parent
  (folder / 'dataset_info.json').write_text('{"na')
  (folder / 'anp_folder-train.array_record-00000-of-00005.x.1.draft').touch()
  prepared.finish(prepared.start(*arguments))
  folder = prepared.folder(tmp_path, 'many')
  assert prepared.digests(folder) == undisturbed
  # No shard was written twice.
  for name, when in times.items():
    assert (folder / os.path.basename(name)).stat().st_mtime_ns == when
  assert os.listdir(tmp_path / 'anp_folder') == ['many']


@pytest.mark.slow
def test_what_several_processes_began_is_finished(many, undisturbed, tmp_path):
  """By versions in which process i of n did every n-th task."""
  arguments = _arguments(many, tmp_path)
  _interrupt(arguments, tmp_path, r'/written/', signal.SIGKILL)
  (work,) = tmp_path.glob('anp_folder/.many.*')
  for path in sorted((work / 'examined').iterdir())[::2]:
    path.unlink()
  for path in work.glob('*-*'):
    shutil.rmtree(path)
  (work / 'lock-0').touch()
  (work / 'lock-1').touch()
  (work / 'failed-1').write_text('["0", "process 1 failed: KeyboardInterrupt"]')
  _, err = prepared.finish(prepared.start(*arguments))
  assert 'verifying: ' in err and 'examining: 1,400/1,400 files' in err
  assert prepared.digests(prepared.folder(tmp_path, 'many')) == undisturbed
  assert os.listdir(tmp_path / 'anp_folder') == ['many']


@_needs_proc
def test_a_second_command_for_the_same_set_is_refused(many, tmp_path):
  arguments = _arguments(many, tmp_path, workers=1)
  first = prepared.start(*arguments)
  _wait_for(lambda: _has_new_file(tmp_path, 'jsonl', set()), 'it works')
  second = prepared.start(*arguments)
  _, err = second.communicate(timeout=30)
  assert second.returncode == 2
  assert 'by another process' in err and err.count('\n') == 1
  first.send_signal(signal.SIGINT)
  first.communicate(timeout=30)
  assert first.returncode == 130


# Workers that die.


@pytest.mark.slow
@_needs_proc
def test_killed_workers_are_replaced(many, undisturbed, tmp_path):
  process = prepared.start(*_arguments(many, tmp_path))
  _wait_for(lambda: _has_new_file(tmp_path, 'jsonl', set()), 'it works')
  # Both: one of them may still be starting, with no file in its hands.
  for pid in _workers(process):
    os.kill(pid, signal.SIGKILL)
  _, err = prepared.finish(process)
  assert re.search(rf'ended by signal 9 \(out of memory\?\) at {many}/\w+/\S+\.bmp: ', err)
  assert prepared.digests(prepared.folder(tmp_path, 'many')) == undisturbed


# Found by each worker as it starts: a decoder that some files kill.
_CRASHING_DECODER = """
import os
import signal
from PIL import Image
open_image = Image.open
def crash(file, *arguments, **options):
  for name in ('SIGSEGV', 'SIGKILL'):
    if name.encode() in file.getvalue():
      os.kill(os.getpid(), getattr(signal, name))
  return open_image(file, *arguments, **options)
Image.open = crash
"""


def _prepare_with_crashes(tmp_path, *signals):
  """Prepares two good files, and one that crashes for each signal."""
  (tmp_path / 'site').mkdir()
  (tmp_path / 'site' / 'sitecustomize.py').write_text(_CRASHING_DECODER)
  files = {f'a/{i}.png': builders.encode_image(builders.random_pixels(9, 8, i)) for i in (1, 3)}
  for name in signals:
    files[f'a/2{name}.png'] = files['a/1.png'] + name.encode()
  builders.write_tree(tmp_path / 'tree', files)
  return prepared.start(
    f'--from={tmp_path / "tree"}',
    '--name=x',
    f'--data_dir={tmp_path}',
    '--eval_split=',
    '--workers=2',
    PYTHONPATH=str(tmp_path / 'site'),
  )


def test_a_file_that_crashes_the_decoder_is_corrupt(tmp_path):
  _, err = prepared.finish(_prepare_with_crashes(tmp_path, 'SIGSEGV'))
  assert err.count(f'ended by signal 11 at {tmp_path}/tree/a/2SIGSEGV.png') == 2
  names = [name for name, _, _ in prepared.examples(tmp_path, 'x', 'train')]
  assert names == ['a/1.png', 'a/3.png']
  (line,) = prepared.damaged(prepared.folder(tmp_path, 'x')).values()
  assert (line['file'], line['kinds']) == ('a/2SIGSEGV.png', ['corrupt'])
  assert line['reason'] == 'crashes the decoder'


def test_a_file_whose_workers_are_killed_is_named(tmp_path):
  """The set must not depend on the memory that there was."""
  process = _prepare_with_crashes(tmp_path, 'SIGKILL')
  _, err = process.communicate(timeout=60)
  assert process.returncode == 2
  assert err.splitlines()[-1] == (
    f'error: {tmp_path}/tree/a/2SIGKILL.png ended two worker processes, the '
    'last by signal 9 (out of memory?): try fewer --workers'
  )


class _Touching(worker_pool.Task):
  """Leaves an empty file."""

  def run(self):
    pathlib.Path(self.out).touch()
    return 0


def _touching(path):
  return _Touching(root='root', files=['file'], out=str(path))


@pytest.mark.slow
def test_a_worker_that_dies_while_it_is_idle_is_replaced(tmp_path):
  with worker_pool.Pool(1) as pool:
    pool.make('touching', [_touching(tmp_path / 'first')])
    (worker,) = multiprocessing.active_children()
    worker.kill()
    worker.join()
    pool.make('touching', [_touching(tmp_path / 'second')])
  assert sorted(os.listdir(tmp_path)) == ['first', 'second']
  assert multiprocessing.active_children() == []


@_needs_proc
def test_workers_ignore_the_interrupts_of_a_terminal(tmp_path):
  with worker_pool.Pool(2) as pool:
    pool.make('touching', [_touching(tmp_path / name) for name in 'abcd'])
    workers = multiprocessing.active_children()
    assert len(workers) == 2
    for worker in workers:
      status = pathlib.Path(f'/proc/{worker.pid}/status').read_text()
      blocked = int(re.search(r'SigBlk:\s*(\w+)', status)[1], 16)
      assert blocked & 1 << signal.SIGINT - 1


class _TwoArgumentsError(Exception):
  """An error that pickle cannot restore."""

  def __init__(self, text, number):
    super().__init__(f'{text} {number}')


class _Failing(worker_pool.Task):
  """Ends in the way that its file is called."""

  def run(self):
    if self.files[0] == 'exit':
      os._exit(3)
    if self.files[0] == 'two':
      raise _TwoArgumentsError('the text', 2)
    raise {'OSError': OSError, 'KeyError': KeyError}[self.files[0]]('the text')


@pytest.mark.parametrize(
  'name, text',
  [
    ('OSError', 'the text'),
    ('KeyError', "KeyError: 'the text'"),
    ('two', '_TwoArgumentsError: the text 2'),
    ('exit', 'root/exit ended two worker processes, the last with status 3'),
  ],
)
def test_a_task_that_fails_ends_the_work(name, text, tmp_path):
  task = _Failing(root='root', files=[name], out=str(tmp_path / 'out'))
  with worker_pool.Pool(1) as pool:
    with pytest.raises(config_lib.ConfigError) as error:
      pool.make('failing', [task])
  assert str(error.value).startswith(text)


# What divided the work among hosts.


@pytest.mark.parametrize('argument', ['--process_id=0', '--num_processes=2'])
def test_flags_of_several_processes_are_refused(argument, capsys):
  assert prepare.main(['prepare', '--from=x', '--name=x', argument]) == 2
  line = builders.error_line(capsys)
  assert argument.partition('=')[0] in line and '--workers=N' in line


def test_tasks_of_srun_are_refused(monkeypatch, capsys):
  for name in list(os.environ):
    if name.startswith('SLURM_'):
      monkeypatch.delenv(name)
  for name, value in (('SLURM_JOB_ID', '7'), ('SLURM_PROCID', '0'), ('SLURM_NTASKS', '4')):
    monkeypatch.setenv(name, value)
  # A batch script has these variables of its job, and is one process.
  assert prepare.main(['prepare', '--from=x']) == 2
  assert '--name=NAME is missing' in builders.error_line(capsys)
  monkeypatch.setenv('SLURM_STEP_ID', '0')
  monkeypatch.setenv('SLURM_PROCID', '3')
  assert prepare.main(['prepare', '--from=x']) == 2
  line = builders.error_line(capsys)
  assert 'srun with 4 tasks' in line and '--workers=N' in line
  monkeypatch.setenv('SLURM_NTASKS', '1')
  assert prepare.main(['prepare', '--from=x']) == 2
  assert '--name=NAME is missing' in builders.error_line(capsys)
