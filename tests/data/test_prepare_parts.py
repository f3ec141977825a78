"""Tests of prepare: many files, workers, processes, and what kills them."""

import functools
import io
import os
import pathlib
import re
import signal
import time

import numpy as np
from PIL import Image
import pytest

from anp_jax.data.prepare import __main__ as prepare
from tests import prepared

_ROOT = pathlib.Path(__file__).resolve().parents[2]


def _pixels(seed):
  return np.random.default_rng(seed).integers(0, 256, (32, 50, 3), np.uint8)


@pytest.fixture(scope='module')
def many(tmp_path_factory):
  """1,400 files, of which every seventh is converted; 7 parts."""
  root = tmp_path_factory.mktemp('many')
  files = {}
  for i in range(1400):
    kind = 'TIFF' if i % 7 == 0 else 'BMP'
    split = 'train' if i % 5 else 'validation'
    # Noise: 5 KB that do not shrink.
    data = io.BytesIO()
    Image.fromarray(_pixels(i)).save(data, kind)
    files[f'{split}/{"ab"[i % 2]}/{i:04}.bmp'] = data.getvalue()
  for i in (3, 500, 1399):
    name = next(n for n in files if n.endswith(f'{i:04}.bmp'))
    files[name] = files[name][:-1]
  for name, data in files.items():
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
  return root


def _arguments(many, data_dir, workers=2):
  return [
    f'--from={many}', '--name=many', f'--data_dir={data_dir}',
    '--shard_megabytes=1', f'--workers={workers}', '--policy=suffix=keep',
  ]  # fmt: skip


@pytest.fixture(scope='module')
def undisturbed(many, tmp_path_factory):
  """Digests of the files that every run has to give."""
  data_dir = tmp_path_factory.mktemp('undisturbed')
  prepared.done(prepared.command(*_arguments(many, data_dir, workers=1)))
  result = prepared.digests(prepared.folder(data_dir, 'many'))
  shards = [n for n in result if 'array_record' in n]
  assert len(shards) == 6  # 5.4 and 1.4 MB, of 1 MiB about
  for split, lost in (('train', 2), ('validation', 1)):
    stored = prepared.stored(data_dir, 'many', split)
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
        np.testing.assert_array_equal(image, _pixels(number))
  return result


@pytest.mark.slow
def test_any_number_of_workers(many, undisturbed, tmp_path):
  prepared.done(prepared.command(*_arguments(many, tmp_path, workers=3)))
  assert prepared.digests(prepared.folder(tmp_path, 'many')) == undisturbed


def _work_files(data_dir):
  """Names of the parts that are made so far."""
  return {
    os.path.relpath(path, data_dir)
    for path in pathlib.Path(data_dir).glob('anp_folder/.many.*/**/*')
    if path.is_file() and not path.name.endswith('.draft')
  }


def _children(process):
  path = f'/proc/{process.pid}/task/{process.pid}/children'
  return [int(pid) for pid in pathlib.Path(path).read_text().split()]


def _runs(pid):
  try:
    with open(f'/proc/{pid}/stat') as f:
      return f.read().rpartition(')')[2].split()[0] != 'Z'
  except FileNotFoundError:
    return False


def _are_gone(pids):
  return not any(map(_runs, pids))


def _is_made(data_dir, pattern, before):
  new = _work_files(data_dir) - before
  return any(re.search(pattern, name) for name in new)


def _wait_for(condition, what):
  end = time.monotonic() + 30
  while not condition():
    assert time.monotonic() < end, what
    time.sleep(0.002)


@pytest.mark.slow
@pytest.mark.skipif(
  not os.path.exists('/proc/self/task'), reason='children are read from /proc'
)
def test_killed_and_gone_on(many, undisturbed, tmp_path):
  """At several moments; each run goes on where the one before it was."""
  arguments = _arguments(many, tmp_path)
  for pattern, killer in (
    (r'/examined/train-.*\.jsonl$', signal.SIGKILL),
    (r'/examined/validation-.*\.jsonl$', signal.SIGTERM),
    (r'/converted/', signal.SIGKILL),
    (r'/set/', signal.SIGKILL),
    (r'/written/', signal.SIGINT),
  ):
    before = _work_files(tmp_path)
    process = prepared.command(*arguments)
    _wait_for(functools.partial(_is_made, tmp_path, pattern, before), pattern)
    workers = _children(process)
    # Ctrl-C goes to all processes of a terminal.
    send = os.killpg if killer == signal.SIGINT else os.kill
    send(process.pid, killer)
    _, err = process.communicate(timeout=30)
    assert not prepared.folder(tmp_path, 'many').exists()
    if killer == signal.SIGINT:
      assert process.returncode == 130
      assert 'interrupted; run the same command to resume' in err
      assert 'Traceback' not in err
    else:
      assert process.returncode == -killer
    _wait_for(functools.partial(_are_gone, workers), 'workers outlive it')
  have = {
    n: os.stat(tmp_path / n).st_mtime_ns
    for n in _work_files(tmp_path)
    if '/set/' in n
  }
  assert 0 < len(have) <= 6
  # As if it had been killed in the last moments, too.
  made = pathlib.Path(tmp_path, next(iter(have))).parent
  (made / 'dataset_info.json').write_text('{"na')
  (made / 'anp_folder-train.array_record-00000-of-00005.x.1.draft').touch()
  prepared.done(prepared.command(*arguments))
  folder = prepared.folder(tmp_path, 'many')
  assert prepared.digests(folder) == undisturbed
  # What was made was not made again.
  for name, when in have.items():
    made = folder / os.path.basename(name)
    assert made.stat().st_mtime_ns == when
  assert os.listdir(tmp_path / 'anp_folder') == ['many']


def test_two_processes_share_the_work(many, undisturbed, tmp_path):
  arguments = _arguments(many, tmp_path, workers=1)
  first = prepared.command(*arguments, '--process_id=0', '--num_processes=2')
  # As Slurm starts it.
  second = prepared.command(
    *arguments, SLURM_PROCID='1', SLURM_NTASKS='2', SLURM_JOB_ID='1',
    SLURM_STEP_ID='0',
  )  # fmt: skip
  (out, err), (other_out, other_err) = (
    prepared.done(first),
    prepared.done(second),
  )
  assert prepared.digests(prepared.folder(tmp_path, 'many')) == undisturbed
  counts = [
    int(re.search(r'examining: [\d,]+/([\d,]+) files', e)[1].replace(',', ''))
    for e in (err, other_err)
  ]
  assert sum(counts) == 1400 and min(counts) > 256
  assert 'smallest class' in out and 'smallest class' not in other_out
  assert 'is finished' in other_out
  assert os.listdir(tmp_path / 'anp_folder') == ['many']


def test_a_process_waits_for_others_with_a_message(many, tmp_path):
  arguments = _arguments(many, tmp_path, workers=1)
  process = prepared.command(*arguments, '--process_id=1', '--num_processes=2')
  lines = iter(process.stderr.readline, '')
  line = next(x for x in lines if 'waiting' in x)
  process.send_signal(signal.SIGINT)
  process.communicate(timeout=30)
  assert process.returncode == 130
  assert line.startswith('process 1 of 2: examining: waiting for ')
  assert line.endswith('of process 0\n')
  # Its parts serve a single process too.
  parts = {n for n in _work_files(tmp_path) if n.endswith('.jsonl')}
  assert 0 < len(parts) < 6


@pytest.mark.slow
def test_a_process_that_fails_ends_the_others(many, undisturbed, tmp_path):
  arguments = _arguments(many, tmp_path, workers=1)
  shares = [[f'--process_id={i}', '--num_processes=2'] for i in range(2)]

  def waiting():
    process = prepared.command(*arguments, *shares[1])
    next(x for x in iter(process.stderr.readline, '') if 'waiting' in x)
    return process

  second = waiting()
  before = _work_files(tmp_path)
  first = prepared.command(*arguments, *shares[0])
  _wait_for(
    functools.partial(_is_made, tmp_path, r'\.jsonl$', before), 'a part'
  )
  os.killpg(first.pid, signal.SIGINT)
  first.communicate(timeout=30)
  out, err = second.communicate(timeout=30)
  assert (second.returncode, out) == (2, '')
  assert err == 'error: process 0 failed: KeyboardInterrupt\n'
  # Another attempt is not stopped by what this one left.
  second = waiting()
  assert any('failed-0' in name for name in _work_files(tmp_path))
  first = prepared.command(*arguments, *shares[0])
  prepared.done(first), prepared.done(second)
  assert prepared.digests(prepared.folder(tmp_path, 'many')) == undisturbed


def test_a_second_process_of_the_same_number_is_refused(many, tmp_path):
  arguments = _arguments(many, tmp_path, workers=1)
  first = prepared.command(*arguments, '--process_id=1', '--num_processes=2')
  _wait_for(lambda: _work_files(tmp_path), 'the first works')
  second = prepared.command(*arguments, '--process_id=1', '--num_processes=2')
  _, err = second.communicate(timeout=30)
  assert second.returncode == 2
  assert 'another process' in err and err.count('\n') == 1
  first.send_signal(signal.SIGINT)
  first.communicate(timeout=30)


def test_a_batch_script_is_one_process(monkeypatch):
  """There Slurm's variables are of the job, and nobody else is started."""
  for name in list(os.environ):
    if name.startswith('SLURM_'):
      monkeypatch.delenv(name)
  for name, value in (
    ('SLURM_JOB_ID', '7'), ('SLURM_PROCID', '0'), ('SLURM_NTASKS', '4'),
  ):  # fmt: skip
    monkeypatch.setenv(name, value)
  assert prepare._slurm() == (0, 1)
  monkeypatch.setenv('SLURM_STEP_ID', '0')
  monkeypatch.setenv('SLURM_PROCID', '3')
  assert prepare._slurm() == (3, 4)
  monkeypatch.setenv('SLURM_NTASKS', '1')
  assert prepare._slurm() == (0, 1)
