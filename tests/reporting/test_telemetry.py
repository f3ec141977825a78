"""telemetry: closed-form rates, files that survive a restart, clean output."""

import io
import json
import math
import struct
import sys
import time

import pytest

from anp_jax.reporting import event_file, metric_lines, step_rates, telemetry
from anp_jax.system import progress
from tests import builders, event_files

_ERASE = '\r\x1b[2K'  # back to the start of the line, and erase it


def _telemetry(workdir, clock=None, stream=None, total_steps=1000, start_step=0, **options):
  line = progress.LiveLine(stream or io.StringIO(), clock or builders.Clock(100.0))
  length = step_rates.RunLength(total_steps, 32, 3200, start_step)
  return telemetry.Telemetry(str(workdir), length, line=line, **options)


def _with_events(workdir, start_step=0):
  """Telemetry that writes an event file too."""

  def events():
    return event_file.EventFile(str(workdir / 'tensorboard'), start_step)

  return _telemetry(workdir, start_step=start_step, writers=[events])


def _lines(workdir):
  with open(workdir / 'metrics.jsonl') as f:
    return [json.loads(line) for line in f]


def test_rates_wait_and_mfu_are_closed_forms(tmp_path):
  clock = builders.Clock(100.0)
  t = _telemetry(tmp_path, clock=clock, peak_flops=1e10)
  clock.now += 5
  t.train(20, {'loss': 2.0}, input_wait=0.5)
  t.set_flops(3e9)
  with t.paused('evaluating'):
    clock.now += 7
    with t.paused('saving'):  # within a pause: counted once
      clock.now += 3
  clock.now += 8
  t.train(40, {'loss': 1.0}, input_wait=2.0)
  t.close()
  first, pause, second = _lines(tmp_path)
  assert pause == {'kind': 'time', 'step': 20, 'what': 'evaluating', 'seconds': 10}
  assert telemetry.durations(str(tmp_path)) == {'evaluating': 10}
  assert telemetry.read(str(tmp_path)) == [first, second]
  assert first['images_per_second'] == 20 * 32 / 5
  assert first['input_wait'] == 0.1
  assert 'mfu' not in first  # the operations of a step were not known yet
  assert second['mfu'] == pytest.approx(20 * 3e9 / 8 / 1e10, rel=1e-15)
  assert second['seconds'] == 8
  assert second['images_per_second'] == 20 * 32 / 8
  assert second['input_wait'] == 0.25
  assert second['epoch'] == 0.4


def test_eta_counts_steps_and_the_average_pause(tmp_path):
  """A resumed run counts from its own first step."""
  clock, stream = builders.Clock(100.0), io.StringIO()
  t = _telemetry(tmp_path, clock=clock, stream=stream, total_steps=1940, start_step=900)
  with t.paused('compiling'):  # happens once: in no rate and in no ETA
    clock.now += 60
  clock.now += 4
  t.train(920, {}, 0.0)  # 0.2 s a step, 1020 to go
  with t.paused('evaluating'):
    clock.now += 20
  clock.now += 8
  t.train(940, {}, 0.0)  # 12 s and a pause of 20 s for 40 steps, 1000 to go
  first, second = stream.getvalue().splitlines()
  assert first.endswith('ETA 3 min 24 s')
  assert second.endswith('ETA 13 min 20 s')


def test_eta_forgets_a_slow_start():
  clock = builders.Clock()
  rates = step_rates.StepRates(step_rates.RunLength(1000, 32, 3200), 0.0, clock)
  for step in range(1, 41):
    clock.now += 500 if step < 5 else 2
    rates.end(step, 0.0)
  assert rates.seconds_left(40) == 960 * 2


def test_jsonl_round_trips_at_full_precision(tmp_path):
  metrics = {
    'loss': 0.1 + 0.2,
    'grad_norm': math.pi * 1e-300,
    'learning_rate': 1 / 3,
    'anp_top1': math.nan,
  }
  t = _telemetry(tmp_path)
  before = time.time()
  t.train(3, metrics, 0.0)
  t.evaluation(3, metrics)
  train, validation = _lines(tmp_path)  # flushed: not closed yet
  assert (train['kind'], validation['kind']) == ('train', 'validation')
  assert before <= train['time'] <= validation['time'] <= time.time()
  for name, value in metrics.items():
    for line in (train, validation):
      assert struct.pack('d', line[name]) == struct.pack('d', value)


def test_a_resume_cuts_back_to_the_restored_step(tmp_path):
  (tmp_path / 'metrics.jsonl').write_text('{"kind": "validation", "step": 0}\n')
  t = _telemetry(tmp_path)  # a new run starts with an empty file
  assert not (tmp_path / 'metrics.jsonl').read_text()
  for step in (10, 20, 30):
    t.train(step, {'loss': 0.1 * step}, 0.0)
    t.evaluation(step, {'loss': 0.1 * step})
  t.close()
  path = tmp_path / 'metrics.jsonl'
  whole_lines = b''.join(path.read_bytes().splitlines(keepends=True)[:4])
  with open(path, 'ab') as f:
    f.write(b'\x00\xff\n{"kind": "train", "step": 15, "loss": 0.')  # killed while writing
  t = _telemetry(tmp_path, start_step=20)
  assert path.read_bytes() == whole_lines
  t.train(30, {'loss': 9.0}, 0.0)
  t.close()
  assert [r['step'] for r in _lines(tmp_path)] == [10, 10, 20, 20, 30]
  assert [r['loss'] for r in telemetry.read(str(tmp_path))][-1] == 9.0


def test_tensorboard_files_are_valid_and_purge_on_resume(tmp_path):
  t = _with_events(tmp_path)
  t.train(10, {'loss': 0.5}, 0.0)
  t.evaluation(10, {'anp_top1': 0.25})
  t.close()
  _with_events(tmp_path, 10).close()
  t = _with_events(tmp_path, 10)  # at once, again
  t.train(20, {'loss': 0.125}, 0.0)
  t.close()
  events = event_files.read(tmp_path / 'tensorboard')
  scalars = {(v.tag, e.step): v.simple_value for e in events for v in e.summary.value}
  assert scalars['train/loss', 10] == 0.5
  assert scalars['validation/anp_top1', 10] == 0.25
  assert scalars['train/loss', 20] == 0.125
  starts = [e.step for e in events if e.HasField('session_log')]
  assert starts == [0, 11, 11]


def test_a_log_file_gets_plain_lines(tmp_path):
  clock, stream = builders.Clock(100.0), io.StringIO()
  t = _telemetry(tmp_path, clock=clock, stream=stream, peak_flops=1e10)
  t.set_flops(1e9)
  scores = {'loss': 3.4123, 'anp_top1': 0.1234, 'adjective_top1': 0.2, 'noun_top1': 0.301}
  with t.paused('compiling'):
    clock.now += 30
  clock.now += 2
  t.train(20, scores, 0.1)
  t.log('saved step 20')
  t.evaluation(20, scores | {'anp_top5': 0.45})
  t.close()
  assert stream.getvalue() == (
    '20/1000  epoch 0.20  loss 3.412  ANP top-1 12.3%  adjective 20.0%  '
    'noun 30.1%  320 images/s  input wait 5.0%  MFU 100.0%  ETA 1 min 38 s\n'
    'saved step 20\n'
    'validation at step 20 (epoch 0.20): loss 3.412, ANP top-1 12.3%, '
    'adjective 20.0%, noun 30.1%, ANP top-5 45.0%\n'
  )


def test_a_plain_class_set_has_no_parts(tmp_path):
  stream = io.StringIO()
  t = _telemetry(tmp_path, stream=stream)
  t.train(20, {'loss': 1.0, 'anp_top1': 0.5}, 0.0)
  t.evaluation(20, {'loss': 1.0, 'anp_top1': 0.5})
  first, second = stream.getvalue().splitlines()
  assert first.startswith('20/1000  epoch 0.20  loss 1  class top-1 50.0%  ')
  assert second == 'validation at step 20 (epoch 0.20): loss 1, class top-1 50.0%'
  assert not {'adjective', 'MFU'} & {*stream.getvalue().split()}
  # The files keep one name for one number.
  assert [r['anp_top1'] for r in _lines(tmp_path)] == [0.5, 0.5]


@pytest.mark.parametrize('columns', [1, 120])
def test_a_terminal_has_one_live_line_that_fits(tmp_path, monkeypatch, columns):
  monkeypatch.setenv('COLUMNS', str(columns))
  monkeypatch.setenv('TERM', 'xterm')
  stream = builders.Terminal()
  t = _telemetry(tmp_path, stream=stream, peak_flops=1e10)
  t.set_flops(1e9)
  scores = {'loss': 3.4, 'anp_top1': 0.1, 'adjective_top1': 0.2}
  for step in (20, 40):
    t.train(step, scores, 0.1)
  with t.paused('evaluating'):
    live = stream.getvalue().rpartition(_ERASE)[2]
    assert live.startswith('evaluating'[: columns - 1])
  assert '\n' not in stream.getvalue()  # rewritten in place
  drawn = stream.getvalue().split(_ERASE)[1:]
  assert all('\x1b' not in d and len(d) < columns for d in drawn)
  live = drawn[-1]
  if columns >= 80:
    assert '40/1000  ' in live and 'loss 3.4' in live and 'ETA' in live
  t.log('a line')
  assert stream.getvalue().endswith(f'{_ERASE}a line\n{live}')
  t.close()
  t.close()
  assert stream.getvalue().endswith(f'{live}\n')


def test_other_processes_write_nothing(tmp_path, capfd):
  workdir, stream = tmp_path / 'run', io.StringIO()
  t = _telemetry(workdir, primary=False, stream=stream, writers=[pytest.fail])
  with t.paused('evaluating'):
    t.train(20, {'loss': 1.0}, 0.0)
    t.evaluation(20, {'loss': 1.0})
  t.log('a line')
  t.close()
  assert not workdir.exists()
  assert stream.getvalue() == ''
  assert capfd.readouterr() == ('', '')


def test_rates_begin_after_the_first_step(tmp_path):
  clock = builders.Clock(100.0)
  t = _telemetry(tmp_path, clock=clock)
  with t.paused('compiling'):
    clock.now += 30
  t.start_timing(1)
  t.train(1, {'loss': 2.0}, 0.0)  # nothing to tell a rate from
  clock.now += 4
  t.train(20, {}, 0.0)
  first, second = telemetry.read(str(tmp_path))
  assert first['loss'] == 2 and 'images_per_second' not in first
  assert second['images_per_second'] == 19 * 32 / 4


def test_the_result_is_the_last_line_of_a_run_that_has_ended(tmp_path):
  run = _telemetry(tmp_path)
  run.train(10, {'loss': 0.5}, 0.0)
  run.close()
  assert telemetry.result(str(tmp_path)) == {}
  telemetry.write_result(str(tmp_path), {'step': 10, 'best': {'loss': 0.5}})
  text = (tmp_path / 'metrics.jsonl').read_text()
  result = telemetry.result(str(tmp_path))
  assert result == json.loads(text.splitlines()[-1])
  assert (result['kind'], result['best']) == ('result', {'loss': 0.5})
  assert [r['kind'] for r in telemetry.read(str(tmp_path))] == ['train']
  # The same run opened again, at its end: nothing is lost.
  _telemetry(tmp_path, start_step=10).close()
  assert (tmp_path / 'metrics.jsonl').read_text() == text
  # A longer one goes on: it has no result until it ends.
  longer = _telemetry(tmp_path, start_step=10)
  longer.train(20, {'loss': 0.25}, 0.0)
  longer.close()
  assert telemetry.result(str(tmp_path)) == {}


_VALUES = {'data': 'x', 'classes': '2 classes', 'training_images': 8, 'validation_images': 0}


@pytest.mark.parametrize(
  'argv, command',
  [
    (['/home/a/main.py', '--x=a b'], "python main.py '--x=a b'"),
    (['/a/anp_jax/__main__.py', '--x'], 'python -m anp_jax --x'),
    (['/usr/bin/anp-train', '--x'], 'anp-train --x'),
  ],
)
def test_a_run_records_its_command(tmp_path, monkeypatch, argv, command):
  monkeypatch.setattr(sys, 'argv', argv)
  run = _telemetry(tmp_path)
  run.start(_VALUES)
  run.close()
  (line,) = telemetry.of_kind(str(tmp_path), metric_lines.START)
  assert (line['command'], line['data'], line['step']) == (command, 'x', 0)
  assert abs(line['time'] - time.time()) < 60
  assert telemetry.read(str(tmp_path)) == []


@pytest.mark.parametrize(
  'lost, processes, repeated, text',
  [
    (['a has gone', 'b has gone'], (2, 4), 1, 'a has gone; b has gone: going on with 2 of 4 '),
    (['a has gone'], (1, 2), 0, 'a has gone: going on with 1 of 2 '),
    (['a has gone'], (4, 4), 2, 'a has gone: going on with 4 '),  # a spare is there
    ([], (4, 3), 0, 'the processes have changed: going on with 4 '),
  ],
)
def test_a_restart_in_place_is_one_line_of_each_file(tmp_path, lost, processes, repeated, text):
  stream = io.StringIO()
  t = _telemetry(tmp_path, stream=stream, start_step=9)
  t.restart(lost, processes, 9, 4.06, repeated)
  steps = ['0 steps', '1 step', '2 steps'][repeated]
  assert stream.getvalue() == f'{text}processes from step 9; 4.1 s; {steps} computed again\n'
  assert _lines(tmp_path) == [
    {
      'kind': 'restart',
      'step': 9,
      'lost': lost,
      'processes': processes[0],
      'seconds': 4.06,
      'repeated': repeated,
    }
  ]


def test_each_command_that_resumes_is_recorded_once(tmp_path):
  """Also where one died before a step; and none of a run that has ended."""
  for step in (0, 0, 10, 10, 20, 1000):
    run = _telemetry(tmp_path, start_step=step)
    run.start(_VALUES)
    if step < 1000:
      run.train(step + 10, {'loss': 0.5}, 0.0)
    run.close()
    if step == 20:
      telemetry.write_result(str(tmp_path), {'step': 1000})
  assert [r['step'] for r in telemetry.of_kind(str(tmp_path), metric_lines.START)] == [0, 10, 20]
  assert telemetry.result(str(tmp_path))['step'] == 1000
