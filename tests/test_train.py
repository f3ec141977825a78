"""Tests of train: the loop's story, end to end on tiny networks."""

import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import types

import jax
import numpy as np
import pytest

from anp_jax import __main__ as main, cluster, recorder as recorder_lib, run as run_lib, train
from anp_jax.checkpoint import run_dir
from anp_jax.cluster import generation
from anp_jax.reporting import delayed_metrics, run_page, telemetry
from tests import builders, launching, listed_sets, serving

pytestmark = pytest.mark.usefixtures('on_one_device')

# Compiles in a second.
_SMALL = '--config=configs/resnet_anp.py:tiny', '--config.model.name=tests.user_network:SmallNet'


def _steps(workdir, kind):
  return [r['step'] for r in telemetry.of_kind(str(workdir), kind)]


def _losses(workdir):
  return [(r['kind'], r['step'], r['loss']) for r in telemetry.read(str(workdir))]


def _note_calls(patch, events):
  """Notes what processes gather, and the steps whose metrics are read."""
  gather, push = cluster.Processes.gather, delayed_metrics.TrainingLog.push
  open_feed = run_lib.stream_lib.Stream.train

  def gather_and_note(self, value):
    events.append(value)
    return gather(self, value)

  def push_and_note(self, step, values):
    events.append(step)
    return push(self, step, values)

  def slow_feed(self, *arguments):
    feed = open_feed(self, *arguments)
    feed.wait_seconds += 1000.0  # seconds
    return feed

  patch.setattr(cluster.Processes, 'gather', gather_and_note)
  patch.setattr(delayed_metrics.TrainingLog, 'push', push_and_note)
  patch.setattr(run_lib.stream_lib.Stream, 'train', slow_feed)


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
  """A run of 12 steps: its config, folder, scores, output and events.

  Its first batch comes late.
  """
  folder = tmp_path_factory.mktemp('finished')
  config = builders.on_small_network(builders.tiny_recipe())
  config.log.tensorboard = True
  config.ema = 0.9
  handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
  output, events = io.StringIO(), []
  with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(output):
    builders.use_devices(patch, 1)
    _note_calls(patch, events)
    # Nothing is transferred implicitly.
    with jax.transfer_guard('disallow'):
      scores = train.run(config, str(folder))
  assert handlers == [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
  return types.SimpleNamespace(
    config=config, folder=folder, scores=scores, output=output.getvalue(), events=events
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
  for text in (
    '12/12',
    'ETA',
    'input wait',
    'weights and batch statistics averaged with decay 0.9',
  ):
    assert text in finished.output
  saved = json.loads((folder / 'config.json').read_text())
  assert saved['optimizer.name'] == 'nesterov'
  page = (folder / 'report' / 'index.html').read_text()
  assert 'data:image/png' in page and 'nesterov' in page


def test_processes_are_all_compiled_before_the_first_step(finished):
  """Else a slow one would be late for the first sum, and end the run."""
  assert finished.events.count('compiled') == 1
  assert finished.events.index('compiled') < finished.events.index(1)


def test_a_run_in_a_notebook_starts_when_it_is_called(finished):
  (seconds,) = re.findall('imports ([0-9.]+)', finished.output)
  assert float(seconds) < 1  # not the age of this process


def test_wait_for_the_first_batch_is_in_no_rate(finished):
  assert all(r['input_wait'] < 1 for r in telemetry.of_kind(str(finished.folder), 'train'))


def test_finished_run_says_so_and_changes_nothing(finished, copied, capsys):
  config, folder = copied
  lines = (folder / 'metrics.jsonl').read_text()
  again = train.run(config, str(folder))
  assert 'is finished: step 12 of 12' in capsys.readouterr().out
  assert (folder / 'metrics.jsonl').read_text() == lines
  assert again['anp_top1'] == finished.scores['anp_top1']


def test_a_loss_after_the_last_step_is_recorded_too(copied):
  """In the last evaluation: no step follows."""
  config, folder = copied
  processes = cluster.Processes(config)
  before = generation.Interruption(time.time() - 50, 12, {0: 'rank 0 on a', 1: 'rank 1 on b'})
  processes.generation = generation.Generation(
    1, lost={1: 'rank 1 on b has gone'}, interruption=before
  )
  train.run(config, str(folder), processes=processes)
  (line,) = telemetry.of_kind(str(folder), 'restart')
  assert 50 <= line.pop('seconds') < 100
  fields = {'lost': ['rank 1 on b has gone'], 'processes': 1, 'repeated': 0}
  assert line == {'kind': 'restart', 'step': 12, **fields}


@pytest.mark.slow
@pytest.mark.parametrize('source', ['synthetic', 'tar'])
def test_interrupted_run_goes_on_bit_for_bit(tmp_path, finished, monkeypatch, capsys, source):
  config, straight = builders.editable(finished.config), finished.folder
  if source == 'tar':
    straight, config.data.dir = tmp_path / 'straight', str(tmp_path / 'data')
    photos = [builders.encode_image(builders.random_pixels(32, 32, i)) for i in range(41)]
    photos[3] = photos[3][:90]
    listed_sets.write(tmp_path, 'tar', 4 * 'ab', 'validation', [photos[4][:90], *photos[5:]])
    config.data.source = listed_sets.write(tmp_path, 'tar', 20 * 'ab', photos=photos)
    assert train.run(config, str(straight))['examples'] == 7
    last = telemetry.of_kind(str(straight), 'train')[-1]
    # 12 steps of 16 images: four epochs of 40 and most of a fifth.
    assert last['damaged'] in (4, 5) and np.isfinite(last['loss'])
  broken = tmp_path / 'broken'
  with monkeypatch.context() as patch:
    builders.signal_at(patch, 3)
    train.run(config, str(broken))
  text = capsys.readouterr()
  assert 'saving, then stopping' in text.err
  assert 'run the same command to resume' in text.out
  assert 3 <= max(int(p.name) for p in (broken / 'checkpoints').glob('[0-9]*')) < 12
  train.run(config, str(broken))
  serving.same_bits(launching.weights(straight), launching.weights(broken))
  assert _losses(broken) == _losses(straight)
  if source == 'tar':  # another set under the same name is refused
    listed_sets.write(tmp_path, 'tar', 21 * 'ab', photos=photos)
    config.duration = '16 steps'
    builders.assert_refused('41', train.run, config, str(broken))


def test_not_finite_stops_with_the_step_and_keeps_the_past(tmp_path, capsys, monkeypatch):
  monkeypatch.setattr(main.xla_flags, 'enable_for', lambda _: None)
  keys = {'optimizer.name': 'sgd', 'optimizer.learning_rate': '1e30', 'log.tensorboard': 'False'}
  # The rate is that from step 2 on: the warm-up begins at 0.
  keys |= {'checkpoint.every': '1 steps', 'checkpoint.keep_best': '0', 'eval.every': '12 steps'}
  assert main.main(['main.py', *_SMALL, f'--workdir={tmp_path}', *launching.typed(keys)]) == 1
  line = capsys.readouterr().err.splitlines()[-1]
  bad = int(re.search(r'^error: step (\d+) is not finite', line)[1])
  for path, value in launching.weights(tmp_path).items():
    assert path.startswith(f'{bad - 1}/') and np.isfinite(value).all()


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
  builders.assert_refused('no checkpoint', train.run, config, str(folder / 'empty'), 'evaluate')


def test_another_runs_workdir_is_refused_and_kept(copied):
  config, folder = copied
  before = sorted(p for p in folder.rglob('*') if 'tensorboard' not in str(p))
  config.seed = 5
  builders.assert_refused('config.seed is 5', train.run, config, str(folder))
  assert before == sorted(p for p in folder.rglob('*') if 'tensorboard' not in str(p))


def test_foreign_checkpoints_are_refused(tmp_path, tiny_config):
  (tmp_path / 'checkpoints' / '100').mkdir(parents=True)
  builders.assert_refused('no config.json', train.run, tiny_config, str(tmp_path))
  assert (tmp_path / 'checkpoints' / '100').is_dir()


def test_batch_per_device_is_decided_once(tmp_path, tiny_config):
  tiny_config.batch_size = 0
  tiny_config.batch_size_per_device = 16  # whose step other tests compile
  tiny_config.duration = '2 steps'
  train.run(tiny_config, str(tmp_path))
  assert json.loads((tmp_path / 'config.json').read_text())['batch_size'] == 16
  resumed = run_dir.with_sizes(tiny_config, str(tmp_path), 3)
  assert (resumed.batch_size, tiny_config.batch_size) == (16, 0)


# Twenty in `make soak`.
_KILLS = int(os.environ.get('ANP_KILLS', 1))


@pytest.fixture
def command(tmp_path):
  """Returns a command of a run on arrays, which has no need of TensorFlow: there is none."""
  (tmp_path / 'tensorflow.py').write_text('raise SystemExit("imported")')
  arrays = {}
  for split in ('train', 'validation'):
    arrays[f'{split}_images'] = builders.random_pixels(32 * 32, 32).reshape(32, 32, 32, 3)
    arrays[f'{split}_labels'] = np.arange(32) % 12
  np.savez(tmp_path / 'set.npz', **arrays)
  keys = {
    'data.source': 'arrays',
    'data.path': tmp_path / 'set.npz',
    'duration': f'{max(40, 15 * _KILLS)} steps',
    'checkpoint.every': '1 steps',
    'log.every': '1 steps',
    'log.tensorboard': False,
    'eval.every': '15 steps',
    'ema': 0.9,
  }
  typed = launching.typed(keys)

  def start(workdir, **options):
    return subprocess.Popen(
      [sys.executable, 'main.py', *_SMALL, f'--workdir={workdir}', *typed],
      cwd=launching.ROOT,
      env={**os.environ, **launching.QUICK, 'PYTHONPATH': str(tmp_path)},
      stderr=subprocess.STDOUT,
      text=True,
      **options,
    )

  return start


def _finish(process):
  """What a command prints that ends well."""
  text = process.communicate()[0]
  assert process.returncode == 0, text
  return text


def _kill(process, workdir, number, seconds):
  """Kills a run inside a save or, every second time, after some seconds.

  Returns:
    Whether a save was cut off.
  """

  def saves():
    return {p.name for p in workdir.glob('checkpoints/*tmp*')}

  stale = saves()
  if number % 2:
    time.sleep(seconds)
  while not number % 2 and process.poll() is None and not saves() - stale:
    time.sleep(1e-3)
  assert process.poll() is None, 'the run ended before it was killed enough'
  process.kill()
  process.wait()
  return bool(saves() - stale)


@pytest.mark.slow
def test_killed_again_and_again_ends_with_the_same_bits(tmp_path, command):
  """What a person does: the same command after kill -9 at any moment, and after Ctrl-C."""
  straight, broken = tmp_path / 'straight', tmp_path / 'broken'
  _finish(command(straight, stdout=subprocess.PIPE))
  rng = np.random.default_rng(0)
  kills = inside_a_save = 0
  while kills < _KILLS or not inside_a_save:
    process = command(broken, stdout=subprocess.DEVNULL)
    inside_a_save += _kill(process, broken, kills, rng.uniform(0, 4))
    kills += 1
  process = command(broken, stdout=subprocess.PIPE)
  next(line for line in process.stdout if re.match(r'\d+/', line))
  process.send_signal(signal.SIGINT)
  text = process.communicate()[0]
  assert process.returncode == 130 and 'run the same command to resume' in text
  (step, steps) = re.search(r'stopped at step (\d+) of (\d+)', text).groups()
  text = _finish(command(broken, stdout=subprocess.PIPE))
  assert f'continuing from step {step} of {steps}' in text
  serving.same_bits(launching.weights(straight), launching.weights(broken))
  left = {p.name for p in (broken / 'checkpoints').iterdir()}
  assert {p for p in left if p.isdigit()} == {str(int(steps) - 1), steps}, left
  assert _losses(broken) == _losses(straight)
  assert (broken / 'report' / 'curves.png').exists()


@pytest.mark.slow
def test_shipped_demo_learns(tmp_path):
  """The recipe of `make demo`, cut short and a quarter as wide: above chance soon."""
  keys = {
    'model.width': 16,
    'duration': '0.25 epochs',
    'schedule.warmup': '0.05 epochs',
    'eval.examples': False,
    'log.tensorboard': False,
  }
  typed = launching.typed(keys)
  # As a command, which tells XLA what a test's own process does not.
  demo = '--config=configs/resnet_anp.py:demo'
  launching.python('main.py', demo, f'--workdir={tmp_path}', *typed, status=0, timeout=600)
  *_, last = telemetry.read(str(tmp_path))
  assert last['kind'] == 'validation' and last['step'] == 38
  # 4.01 and 0.18; chance is log(60) = 4.09 and one of 14 adjectives.
  assert last['loss'] < 4.05 and last['adjective_top1'] > 0.12


@pytest.mark.slow
def test_an_evaluation_that_was_cut_off_is_made_up_for(tmp_path, finished, monkeypatch):
  """Nothing that was trained is lost, and no score: also those of the end."""
  real = recorder_lib.eval_loop.run

  def cut_off(eval_step, state, batches):
    if int(state.step) == 12:
      raise RuntimeError('the power is off')
    return real(eval_step, state, batches)

  with monkeypatch.context() as patched:
    patched.setattr(recorder_lib.eval_loop, 'run', cut_off)
    with pytest.raises(RuntimeError, match='the power is off'):
      train.run(finished.config, str(tmp_path))
  train.run(finished.config, str(tmp_path))
  assert _losses(tmp_path) == _losses(finished.folder)
  assert run_page.exists(str(tmp_path))


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
  tiny_config.duration = '4 steps'
  tiny_config.accumulate = 2
  train.run(tiny_config, str(tmp_path))
  # Two convolutions, 16x16x6 of 3x3x3 and 8x8x8 of 3x3x6, padded on one side
  # (47^2 and 23^2 taps meet the map), a product of 8 by 12; gradients of
  # weights as much again, of inputs too, but for the first.
  conv1, conv2, head = 47**2 * 3 * 6, 23**2 * 6 * 8, 8 * 12
  assert counts == [2 * 16 * (2 * conv1 + 3 * conv2 + 3 * head)]
  assert [r for r in telemetry.read(str(tmp_path)) if 'mfu' in r]
