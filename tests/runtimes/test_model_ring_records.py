"""What a ring writes of its models: metrics.jsonl and TensorBoard's files."""

import types

import numpy as np
import pytest

from anp_jax.reporting import telemetry
from anp_jax.runtimes.model_ring import records as records_lib
from tests import event_files, model_rings


@pytest.fixture
def write(tmp_path):
  """Returns a function that starts one process's records of two models."""
  config = model_rings.config(**{'log.tensorboard': True})
  ring = types.SimpleNamespace(
    config=config,
    candidates=[types.SimpleNamespace(config=config)] * 2,
    source=range(70),
    folder=lambda model: str(tmp_path / str(model)),
  )
  for model in range(2):
    (tmp_path / str(model)).mkdir()
  all_records = []

  def begin():
    all_records.append(records_lib.Records(ring))
    return all_records[-1]

  yield begin
  for records in all_records:
    records.close()


def _score(laps, step, value):
  return {'model': 0, 'laps': laps, 'step': step, 'anp_top1': value, 'time': 9.0}


def _steps(folder, tag):
  points = event_files.points(folder)
  assert all(len(values) == 1 for values in points.values())
  return {step: points[t, step][0] for t, step in points if t == tag}


def test_a_repeated_step_is_shown_once(write, tmp_path):
  folder = tmp_path / '0' / 'tensorboard'
  first = write()
  for step in (5, 10, 15, 20):
    first.train(0, step, {'loss': step / 4})
  first.train(1, 5, {'loss': 0.5})
  first.close_model(0)
  assert _steps(folder, 'train/loss') == {5: 1.25, 10: 2.5, 15: 3.75, 20: 5.0}
  # Another process continues; then, from step 11 on, a run that was cut off.
  other = write()
  other.train(0, 25, {'loss': 7.0})
  other.close_model(0)
  assert list(_steps(folder, 'train/loss')) == [5, 10, 15, 20, 25]
  telemetry.truncate_after(str(tmp_path / '0'), 10)
  again = write()
  for step in (15, 20):
    again.train(0, step, {'loss': step / 8})
  again.close()
  assert _steps(folder, 'train/loss') == {5: 1.25, 10: 2.5, 15: 1.875, 20: 2.5}
  first.close()
  assert _steps(tmp_path / '1/tensorboard', 'train/loss') == {5: 0.5}


def test_scores_are_kept_once_and_up_to_the_models_step(write, tmp_path):
  folder = tmp_path / '0'
  scores = [_score(1, 17, 0.25), _score(2, 35, 0.5)]
  for records in (write(), write()):
    records.append_scores(0, 20, scores)
    records.append_scores(0, 20, scores)
    records.close()
  line = {'kind': 'validation', 'step': 17, 'time': 9.0, 'anp_top1': 0.25}
  assert telemetry.read(str(folder)) == [{**line, 'epoch': 17 * 4 / 70}]
  telemetry.truncate_after(str(folder), 10)
  last = write()
  last.append_scores(0, 40, scores)
  last.close()
  steps = [r['step'] for r in telemetry.read(str(folder))]
  assert steps == [17, 35]
  assert _steps(folder / 'tensorboard', 'validation/anp_top1') == {17: 0.25, 35: 0.5}
  events = [e for e in event_files.read(folder / 'tensorboard') if e.summary.value]
  assert {e.wall_time for e in events} == {9.0}


def test_a_full_disk_ends_nothing(write, tmp_path, capsys):
  records = write()
  (tmp_path / '0' / 'tensorboard').write_text('no folder')
  records.train(0, 1, {'loss': np.pi})
  (tmp_path / '0' / 'metrics.jsonl').unlink()
  (tmp_path / '0' / 'metrics.jsonl').symlink_to('/dev/full')
  for step in (5, 10):
    records.train(0, step, {'loss': np.pi})
  text = capsys.readouterr().out
  assert text.count('is not recorded: No space left on device') == 2
  assert text.count('no event file: ') == 1
