"""Tests of prepare: many files, workers, and what kills them."""

import multiprocessing
import os
import pathlib
import re
import signal

import pytest

from anp_jax.data.prepare import worker_pool
from tests import builders, launching, pool_tasks, prepared


@pytest.fixture(scope='module')
def many(tmp_path_factory):
  """350 files, every seventh to be converted."""
  files = {}
  for i in range(350):
    kind = 'BMP' if i % 7 else 'TIFF'
    split = 'train' if i % 5 else 'validation'
    # 20 KB that do not shrink.
    pixels = builders.random_pixels(64, 100, i)
    name = f'{split}/{"ab"[i % 2]}/{i:04}.bmp'
    files[name] = builders.encode_image(pixels, kind)
  for i in (3, 125, 349):
    name = next(n for n in files if n.endswith(f'{i:04}.bmp'))
    files[name] = files[name][:-1]
  return builders.write_tree(tmp_path_factory.mktemp('many'), files)


def _arguments(many, data_dir, workers=2):
  more = ['--shard_megabytes=1', f'--workers={workers}', '--policy=suffix=keep']
  return prepared.flags(many, data_dir, *more)


@pytest.fixture(scope='module')
def undisturbed(many, tmp_path_factory):
  """Digests of the files that every run has to give."""
  data_dir = tmp_path_factory.mktemp('undisturbed')
  prepared.finish(prepared.start(*_arguments(many, data_dir, workers=1)))
  result = prepared.digests(prepared.folder(data_dir))
  shards = [n for n in result if 'array_record' in n]
  assert len(shards) == 6  # 5.4 and 1.4 MB, of 1 MiB about
  for split, lost in (('train', 2), ('validation', 1)):
    stored = prepared.examples(data_dir, split)
    folder = many / split
    files = sorted(os.path.join(*p.parts[-2:]) for p in folder.glob('*/*'))
    names = [name for name, _, _ in stored]
    assert len(names) == len(files) - lost
    assert names == [f for f in files if f in names]
    for name, data, label in stored:
      number = int(pathlib.Path(name).stem)
      assert label == number % 2
      # The files of another format are converted.
      assert (data == (folder / name).read_bytes()) == (number % 7 > 0)
  return result


@pytest.mark.slow
def test_any_number_of_workers_gives_the_same_bytes(many, undisturbed, tmp_path):
  prepared.finish(prepared.start(*_arguments(many, tmp_path, workers=3)))
  assert prepared.digests(prepared.folder(tmp_path)) == undisturbed


def _work_files(data_dir):
  """Names of the files that tasks have finished so far."""
  return {
    os.path.relpath(path, data_dir)
    for path in pathlib.Path(data_dir).glob('anp_folder/.x/**/*')
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


def _has_new_file(data_dir, pattern, before):
  new = _work_files(data_dir) - before
  return any(re.search(pattern, name) for name in new)


def _interrupt(arguments, data_dir, pattern, signal_number):
  """Sends a signal once a task has left a new file of a matching name.

  Returns:
    The status and the standard error of the command, whose workers are gone.
  """
  before = _work_files(data_dir)
  process = prepared.start(*arguments)
  launching.wait_until(lambda: _has_new_file(data_dir, pattern, before), 30, lambda: pattern)
  children = _children(process)
  # Ctrl-C goes to all processes of a terminal.
  send = os.killpg if signal_number == signal.SIGINT else os.kill
  send(process.pid, signal_number)
  _, err = process.communicate(timeout=30)
  launching.wait_until(lambda: not any(map(_runs, children)), 30, lambda: 'workers outlive it')
  return process.returncode, err


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists('/proc/self/task'), reason='children are read from /proc')
def test_a_killed_command_resumes_after_its_finished_shards(many, undisturbed, tmp_path):
  """A command that is killed at any moment leaves no process, and costs no finished shard."""
  arguments = _arguments(many, tmp_path)
  for pattern, signal_number in (
    (r'/lock$', signal.SIGTERM),
    (r'array_record', signal.SIGKILL),
    (r'array_record', signal.SIGINT),
  ):
    status, err = _interrupt(arguments, tmp_path, pattern, signal_number)
    assert not prepared.folder(tmp_path).exists()
    if signal_number == signal.SIGINT:
      assert status == 130
      assert 'interrupted; run the same command to resume' in err
    else:
      assert status == -signal_number
    assert 'Traceback' not in err and 'Warning' not in err
  times = {
    n: os.stat(tmp_path / n).st_mtime_ns for n in _work_files(tmp_path) if 'array_record' in n
  }
  assert 2 <= len(times) <= 6
  # As if it had been killed in the last moments, too.
  folder = pathlib.Path(tmp_path, next(iter(times))).parent
  (folder / 'dataset_info.json').write_text('{"na')
  (folder / '.anp_folder-train.array_record-00000-of-00005.0123').touch()
  prepared.finish(prepared.start(*arguments))
  folder = prepared.folder(tmp_path)
  assert prepared.digests(folder) == undisturbed
  # No shard was written twice.
  for name, when in times.items():
    assert (folder / os.path.basename(name)).stat().st_mtime_ns == when
  assert os.listdir(tmp_path / 'anp_folder') == ['x']


# Workers that die.


# Found by each worker as it starts: a decoder that some files kill.
_CRASHING_DECODER = b"""
import os
import signal
from PIL import Image
open_image = Image.open
def crash(file, *arguments, **options):
  if b'SIGSEGV' in file.getvalue():
    os.kill(os.getpid(), signal.SIGSEGV)
  return open_image(file, *arguments, **options)
Image.open = crash
"""


def test_a_file_at_which_a_worker_dies_is_named(tmp_path):
  photo = prepared.photo(1, 'PNG')
  files = {'a/1.png': photo, 'a/2.png': photo + b'SIGSEGV', 'a/3.png': prepared.photo(3, 'PNG')}
  builders.write_tree(tmp_path / 'tree', files)
  builders.write_tree(tmp_path / 'site', {'sitecustomize.py': _CRASHING_DECODER})
  flags = prepared.flags(tmp_path / 'tree', tmp_path, '--eval_split=', '--workers=2')
  process = prepared.start(*flags, PYTHONPATH=str(tmp_path / 'site'))
  _, err = process.communicate(timeout=60)
  assert process.returncode == 2
  assert err.splitlines()[-1] == (
    f'error: a worker process died while it read {tmp_path}/tree/a/2.png: leave out a '
    'file that crashes the decoder (--workers=1 names it), or try fewer --workers'
  )


def test_workers_ignore_the_interrupts_of_a_terminal():
  tasks = [(pool_tasks.Files(['file']),)] * 3
  masks = worker_pool.run('reading masks', pool_tasks.masked_signals, tasks, workers=2)
  assert len(masks) == 3 and all(signal.SIGINT in mask for mask in masks)
  assert multiprocessing.active_children() == []


@pytest.mark.parametrize(
  'name, text',
  [
    ('OSError', 'the text'),
    ('two', 'two: TwoArgumentsError: the text 2'),
    ('exit', 'a worker process died while it read exit: '),
  ],
)
def test_a_task_that_fails_ends_the_work(name, text):
  line = builders.refusal(
    worker_pool.run, 'failing', pool_tasks.fail, [(pool_tasks.Files(['good', name]),)], workers=1
  )
  assert line.startswith(text)
  assert multiprocessing.active_children() == []
