"""Tests of train: the loop's story, end to end on tiny networks."""

import contextlib
import io
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
import types

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from anp_jax import cluster, config as config_lib, recorder as recorder_lib, run as run_lib, train
from anp_jax.checkpoint import run_dir
from anp_jax.reporting import delayed_metrics, run_page, telemetry
from tests import builders

pytestmark = pytest.mark.usefixtures('quick_compiles', 'on_one_device')

_ROOT = str(pathlib.Path(__file__).resolve().parents[1])
_TINY = 'configs/resnet_anp.py:tiny'


def _state(workdir, step, kind='checkpoints'):
  """The saved leaves of a step by path, read by Orbax alone."""
  path = os.path.join(os.path.abspath(workdir), kind, str(step), 'state')
  with ocp.StandardCheckpointer() as raw:
    tree = raw.restore(path)['state']
  return {
    jax.tree_util.keystr(p): np.asarray(x) for p, x in jax.tree_util.tree_leaves_with_path(tree)
  }


def _same_bits(a, b):
  assert a.keys() == b.keys()
  for name, value in a.items():
    assert value.dtype == b[name].dtype
    assert value.tobytes() == b[name].tobytes(), name


def _steps(workdir, kind):
  return [r['step'] for r in telemetry.read(str(workdir)) if r['kind'] == kind]


@pytest.fixture(scope='module')
def finished(tmp_path_factory, quick_compiles):
  """A run of 12 steps: its config, folder, scores and output."""
  folder = tmp_path_factory.mktemp('finished')
  config = builders.on_small_network(builders.tiny_recipe())
  config.log.tensorboard = True
  handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
  output, first = io.StringIO(), jax.devices()[:1]
  with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(output):
    patch.setattr(jax, 'devices', lambda: first)
    # Nothing is transferred implicitly.
    with jax.transfer_guard('disallow'):
      scores = train.run(config, str(folder))
  assert handlers == [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
  return types.SimpleNamespace(
    config=config, folder=folder, scores=scores, output=output.getvalue()
  )


@pytest.fixture
def copied(finished, tmp_path):
  """The config of the finished run, and a copy of its folder, both to change."""
  folder = tmp_path / 'copied'
  shutil.copytree(finished.folder, folder)
  return builders.editable(finished.config), folder


def test_run_leaves_what_a_person_expects(finished):
  folder = finished.folder
  assert finished.scores['examples'] == 64
  assert _steps(folder, 'train') == [2, 4, 6, 8, 10, 12]
  assert _steps(folder, 'validation') == [6, 12]
  files = {'checkpoints', 'best', 'config.json', 'metrics.jsonl', 'report', 'tensorboard'}
  assert {p.name for p in folder.iterdir()} >= files
  files = {'curves.png', 'index.html', 'run.json'}
  assert {p.name for p in (folder / 'report').iterdir()} == files
  saved_steps = {p.name for p in (folder / 'checkpoints').iterdir()}
  assert {'8', '12'} == {k for k in saved_steps if k.isdigit()}
  for text in ('12/12', 'ETA', 'input wait', 'current weights and running batch statistics'):
    assert text in finished.output
  saved = json.loads((folder / 'config.json').read_text())
  assert saved['optimizer.name'] == 'nesterov'
  page = (folder / 'report' / 'index.html').read_text()
  assert 'data:image/png' in page and 'nesterov' in page


def test_finished_run_says_so_and_changes_nothing(finished, copied, capsys):
  config, folder = copied
  lines = (folder / 'metrics.jsonl').read_text()
  again = train.run(config, str(folder))
  assert 'is finished: step 12 of 12' in capsys.readouterr().out
  assert (folder / 'metrics.jsonl').read_text() == lines
  assert again['anp_top1'] == finished.scores['anp_top1']


@pytest.mark.slow
def test_longer_run_goes_on_from_the_end(copied, capsys):
  """Its metrics are cut back to the restored step."""
  config, folder = copied
  with open(folder / 'metrics.jsonl', 'a') as f:
    f.write('{"kind": "train", "step": 14, "loss": 1.0}\n{"kind": "tr')
  config.duration = '13 steps'
  train.run(config, str(folder))
  assert 'continuing from step 12 of 13' in capsys.readouterr().out
  assert _steps(folder, 'train')[-2:] == [12, 13]


class _StopAt:
  """Stands in for a person who presses Ctrl-C after some steps."""

  def __init__(self, step):
    self._left = step

  def __call__(self, *unused):
    self._left -= 1
    if not self._left:
      os.kill(os.getpid(), signal.SIGINT)


def _interrupt_after(monkeypatch, steps):
  press = _StopAt(steps)
  real = delayed_metrics.TrainingLog.push

  def push(self, step, values):
    press()
    return real(self, step, values)

  monkeypatch.setattr(delayed_metrics.TrainingLog, 'push', push)


@pytest.mark.slow
@pytest.mark.parametrize(
  'name', ['tests.user_network:SmallNet', pytest.param('resnet18', marks=pytest.mark.soak)]
)
def test_interrupted_run_goes_on_bit_for_bit(tmp_path, tiny_config, monkeypatch, capsys, name):
  tiny_config.model.name = name
  tiny_config.ema = 0.9
  straight, broken = tmp_path / 'straight', tmp_path / 'broken'
  train.run(tiny_config, str(straight))
  with monkeypatch.context() as patch:
    _interrupt_after(patch, 3)
    train.run(tiny_config, str(broken))
  text = capsys.readouterr()
  assert 'saving, then stopping' in text.err
  assert 'run the same command to resume' in text.out
  stopped = max(int(p.name) for p in (broken / 'checkpoints').glob('[0-9]*'))
  assert 3 <= stopped < 12
  train.run(tiny_config, str(broken))
  _same_bits(_state(straight, 12), _state(broken, 12))
  expected = {(r['kind'], r['step']): r for r in telemetry.read(str(straight))}
  for line in telemetry.read(str(broken)):
    assert line['loss'] == expected[line['kind'], line['step']]['loss']


def test_wait_for_the_first_batch_is_in_no_rate(tmp_path, tiny_config, monkeypatch):
  real = run_lib.stream_lib.Stream.train

  def slow(self, *arguments):
    feed = real(self, *arguments)
    feed.waited += 1000.0  # seconds
    return feed

  monkeypatch.setattr(run_lib.stream_lib.Stream, 'train', slow)
  train.run(tiny_config, str(tmp_path))
  lines = [r for r in telemetry.read(str(tmp_path)) if r['kind'] == 'train']
  assert all(r['input_wait'] < 1 for r in lines)


def test_processes_are_all_compiled_before_the_first_step(tmp_path, tiny_config, monkeypatch):
  """Else a slow one would be late for the first sum, and end the run."""
  events = []
  gather, push = cluster.Processes.gather, delayed_metrics.TrainingLog.push

  def gather_and_note(self, value):
    events.append(value)
    return gather(self, value)

  def push_and_note(self, step, values):
    events.append(step)
    return push(self, step, values)

  monkeypatch.setattr(cluster.Processes, 'gather', gather_and_note)
  monkeypatch.setattr(delayed_metrics.TrainingLog, 'push', push_and_note)
  tiny_config.duration = '2 steps'
  train.run(tiny_config, str(tmp_path))
  assert events.count('compiled') == 1
  assert events.index('compiled') < events.index(1)


def test_not_finite_stops_with_the_step_and_keeps_the_past(tmp_path, tiny_config):
  tiny_config.optimizer.name = 'sgd'
  tiny_config.optimizer.learning_rate = 1e30  # from step 2 on: the warm-up begins at 0
  tiny_config.checkpoint.every = '1 steps'
  not_finite = pytest.raises(delayed_metrics.NotFiniteError, match=r'step \d+ is not finite')
  with not_finite as e:
    train.run(tiny_config, str(tmp_path))
  bad = int(str(e.value).split()[1])
  saved = [int(p.name) for p in (tmp_path / 'checkpoints').glob('[0-9]*')]
  assert saved and max(saved) == bad - 1
  for value in _state(tmp_path, bad - 1).values():
    assert np.isfinite(value.astype(np.float64)).all()


def test_evaluate_scores_a_checkpoint(finished, copied, capsys):
  config, folder = copied
  save = folder / 'checkpoints' / '99.orbax-checkpoint-tmp'
  save.mkdir()  # of the run, which goes on somewhere else
  assert train.run(config, str(folder), 'evaluate') == finished.scores
  out, err = capsys.readouterr()
  assert 'checkpoint of step 12, 64 images' in out and not err
  assert save.exists()
  best = train.run(config, str(folder), 'evaluate', 'best')
  lines = [r for r in telemetry.read(str(folder)) if r['kind'] != 'train']
  assert best['anp_top1'] == max(r['anp_top1'] for r in lines)
  with pytest.raises(config_lib.ConfigError, match='no checkpoint'):
    train.run(config, str(folder / 'empty'), 'evaluate')


def test_another_runs_workdir_is_refused_and_kept(copied):
  config, folder = copied
  before = sorted(p for p in folder.rglob('*') if 'tensorboard' not in str(p))
  config.seed = 5
  with pytest.raises(config_lib.ConfigError, match='config.seed is 5'):
    train.run(config, str(folder))
  assert before == sorted(p for p in folder.rglob('*') if 'tensorboard' not in str(p))


def test_foreign_checkpoints_are_refused(tmp_path, tiny_config):
  (tmp_path / 'checkpoints' / '100').mkdir(parents=True)
  with pytest.raises(config_lib.ConfigError, match='no config.json'):
    train.run(tiny_config, str(tmp_path))
  assert (tmp_path / 'checkpoints' / '100').is_dir()


@pytest.mark.slow
def test_batch_per_device_is_decided_once(tmp_path, tiny_config):
  tiny_config.batch_size = 0
  tiny_config.batch_size_per_device = 24
  train.run(tiny_config, str(tmp_path))
  saved = json.loads((tmp_path / 'config.json').read_text())
  assert saved['batch_size'] == 24
  again = tiny_config.copy_and_resolve_references()
  again.batch_size = 0
  resumed = run_dir.with_batch_size(again, str(tmp_path), 3)
  assert (resumed.batch_size, again.batch_size) == (24, 0)


@pytest.mark.slow
def test_arrays_learn_and_report_counts_agree(tmp_path, tiny_config):
  """A set that a linear rule solves: bright or dark, from an .npz file."""
  rng = np.random.default_rng(0)
  labels = rng.integers(0, 2, 96)
  images = rng.integers(0, 100, (96, 32, 32, 3)) + 100 * labels[:, None, None, None]
  arrays = {}
  for split, part in (('train', slice(0, 64)), ('validation', slice(64, 96))):
    arrays[f'{split}_images'] = images[part].astype(np.uint8)
    arrays[f'{split}_labels'] = labels[part]
  np.savez(tmp_path / 'set.npz', **arrays)
  tiny_config.data.source = 'arrays'
  tiny_config.data.path = str(tmp_path / 'set.npz')
  tiny_config.duration = '24 steps'
  scores = train.run(tiny_config, str(tmp_path / 'run'))
  assert scores['anp_top1'] > 0.9
  assert scores['examples'] == 32


# Compiles in a second.
_SMALL = '--config.model.name=tests.user_network:SmallNet'


def _command(workdir, *more):
  return [sys.executable, 'main.py', f'--config={_TINY}', f'--workdir={workdir}', *more]


@pytest.mark.slow
def test_ctrl_c_and_the_same_command_again(tmp_path):
  """What a person does: a process, SIGINT, the same words again."""
  command = _command(
    tmp_path, _SMALL, '--config.duration=1000000 steps', '--config.log.every=1 steps'
  )
  process = subprocess.Popen(
    command, cwd=_ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
  )
  for line in process.stdout:
    if line.startswith('5/'):
      process.send_signal(signal.SIGINT)
      break
  rest = process.stdout.read()
  assert process.wait(60) == 130
  assert 'run the same command to resume' in rest
  at = int(rest.split('stopped at step ')[1].split()[0])
  command[-2] = f'--config.duration={at + 3} steps'
  done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  assert f'continuing from step {at} of {at + 3}' in done.stdout


@pytest.mark.slow
def test_not_finite_exits_with_one_line(tmp_path):
  done = subprocess.run(
    _command(tmp_path, _SMALL, '--config.optimizer.learning_rate=1e30'),
    cwd=_ROOT,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 1
  assert 'is not finite' in done.stderr.splitlines()[-1]
  assert 'Traceback' not in done.stderr


@pytest.mark.slow
def test_tensorflow_is_never_imported(tmp_path):
  """By a whole run, report and all, on a source that has no need of it."""
  (tmp_path / 'tensorflow.py').write_text('raise SystemExit("imported")')
  images, labels = np.zeros((32, 32, 32, 3), np.uint8), np.arange(32) % 12
  arrays = {f'{s}_images': images for s in ('train', 'validation')}
  arrays |= {f'{s}_labels': labels for s in ('train', 'validation')}
  np.savez(tmp_path / 'set.npz', **arrays)
  source = '--config.data.source=arrays', f'--config.data.path={tmp_path}/set.npz'
  done = subprocess.run(
    _command(tmp_path / 'run', _SMALL, *source),
    cwd=_ROOT,
    capture_output=True,
    text=True,
    env={**os.environ, 'PYTHONPATH': str(tmp_path)},
  )
  assert done.returncode == 0, done.stderr
  assert (tmp_path / 'run' / 'report' / 'curves.png').exists()


# Twenty in `make soak`.
_KILLS = int(os.environ.get('ANP_KILLS', 2))


@pytest.mark.slow
def test_killed_again_and_again_ends_with_the_same_bits(tmp_path):
  """kill -9 inside a save, and at random moments while it starts, changes no bit."""
  steps = max(40, 15 * _KILLS)
  more = [
    f'--config.duration={steps} steps',
    '--config.checkpoint.every=1 steps',
    '--config.log.every=1 steps',
    '--config.eval.every=15 steps',
    '--config.ema=0.9',
    '--config.log.tensorboard=False',
    _SMALL,
  ]
  straight, broken = tmp_path / 'straight', tmp_path / 'broken'
  subprocess.run(_command(straight, *more), cwd=_ROOT, check=True, capture_output=True)
  rng = np.random.default_rng(0)
  kills = inside_a_save = 0

  def saves():
    return {p.name for p in broken.glob('checkpoints/*tmp*')}

  while kills < _KILLS or not inside_a_save:
    stale = saves()
    process = subprocess.Popen(
      _command(broken, *more), cwd=_ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT
    )
    if kills % 2:
      time.sleep(rng.uniform(0, 4))
    while not kills % 2 and process.poll() is None and not saves() - stale:
      time.sleep(1e-3)
    assert process.poll() is None, 'the run ended before it was killed enough'
    process.kill()
    process.wait()
    kills += 1
    inside_a_save += bool(saves() - stale)
  subprocess.run(_command(broken, *more), cwd=_ROOT, check=True, capture_output=True)
  _same_bits(_state(straight, steps), _state(broken, steps))
  left = [p.name for p in (broken / 'checkpoints').iterdir()]
  assert sorted(p for p in left if p.isdigit()) == [str(steps - 1), str(steps)], left
  for kind in ('train', 'validation'):
    assert _steps(broken, kind) == _steps(straight, kind)
  losses = [[r['loss'] for r in telemetry.read(str(w))] for w in (straight, broken)]
  assert losses[0] == losses[1]


@pytest.mark.slow
def test_shipped_demo_learns(tmp_path):
  """The recipe of `make demo`, cut short: above chance soon."""
  # As a command, which tells XLA what a test's own process does not.
  subprocess.run(
    [
      sys.executable,
      'main.py',
      '--config=configs/resnet_anp.py:demo',
      f'--workdir={tmp_path}',
      '--config.duration=0.25 epochs',
      '--config.schedule.warmup=0.05 epochs',
      '--config.log.tensorboard=False',
    ],
    cwd=_ROOT,
    check=True,
    stdout=subprocess.DEVNULL,
  )
  lines = telemetry.read(str(tmp_path))
  (*_, last) = (line for line in lines if line['kind'] == 'train')
  # After 38 steps: 3.93 and 0.30; chance is log(60) = 4.09 and one of 14 adjectives.
  assert last['loss'] < 4.0 and last['adjective_top1'] > 0.15
  assert np.isfinite([line['loss'] for line in lines if line['kind'] == 'validation']).all()


@pytest.mark.slow
@pytest.mark.parametrize('at', [pytest.param(6, marks=pytest.mark.soak), 12])
def test_an_evaluation_that_was_cut_off_is_made_up_for(tmp_path, tiny_config, monkeypatch, at):
  """Nothing that was trained is lost, and no score: also those of the end."""
  real = recorder_lib.eval_loop.run

  def cut_off(eval_step, state, batches):
    if int(state.step) == at:
      raise RuntimeError('the power is off')
    return real(eval_step, state, batches)

  with monkeypatch.context() as patched:
    patched.setattr(recorder_lib.eval_loop, 'run', cut_off)
    with pytest.raises(RuntimeError, match='the power is off'):
      train.run(tiny_config, str(tmp_path / 'cut'))
  train.run(tiny_config, str(tmp_path / 'cut'))
  train.run(tiny_config, str(tmp_path / 'whole'))
  evaluations = [
    [(r['kind'], r['step'], r['loss']) for r in telemetry.read(str(folder))]
    for folder in (tmp_path / 'cut', tmp_path / 'whole')
  ]
  assert evaluations[0] == evaluations[1]
  assert run_page.exists(str(tmp_path / 'cut'))


@pytest.mark.slow
def test_operations_of_a_step_do_not_depend_on_micro_batches(tmp_path, tiny_config, monkeypatch):
  """What the MFU rests on, also where JAX itself does not count: on GPUs."""
  monkeypatch.setattr(run_lib.device_peaks, 'peak_flops', lambda *_: 1e12)
  counts = []
  real = recorder_lib.telemetry_lib.Telemetry.set_flops

  def set_flops(self, count):
    counts.append(count)
    real(self, count)

  monkeypatch.setattr(recorder_lib.telemetry_lib.Telemetry, 'set_flops', set_flops)
  tiny_config.duration = '3 steps'
  for accumulate in (1, 2):
    tiny_config.accumulate = accumulate
    tiny_config.model.norm_group = 8
    train.run(tiny_config, str(tmp_path / str(accumulate)))
  # Two convolutions, 16x16x6 of 3x3x3 and 8x8x8 of 3x3x6, padded on one side
  # (47^2 and 23^2 taps meet the map), a product of 8 by 12; gradients of
  # weights as much again, of inputs too, but for the first.
  conv1, conv2, head = 47**2 * 3 * 6, 23**2 * 6 * 8, 8 * 12
  assert counts == [2 * 16 * (2 * conv1 + 3 * conv2 + 3 * head)] * 2
  lines = [r for r in telemetry.read(str(tmp_path / '2')) if 'mfu' in r]
  assert lines
