"""The study's flag --emulate: its keys, its processes, its page."""

import shutil

import pytest

from anp_jax.tools.study import (
  __main__ as study_main,
  emulate,
  grid,
  local,
  named_strategies,
  study_page,
  study_results,
  study_runner,
)
from tests import builders, study_runs


def test_the_keys_reach_the_config():
  typed = {'data.image_size': '28'}
  overrides = emulate.overrides('step_seconds=0.25,slow=3:2+5:1.5', typed)
  study = study_runner.Study(study_runs.LENET, overrides, 'folder', True)
  config = study.config(grid.Cell('parameter_server', 16, 1, 0))
  assert config.emulate.enabled and config.emulate.step_seconds == 0.25
  assert config.emulate.slow == ((3, 2.0), (5, 1.5))
  assert config.data.source == 'synthetic' and config.data.image_size == 28
  # What a user sets goes before what the study chooses.
  chosen = emulate.overrides('', {'data.source': 'digits'})
  assert chosen['data.source'] == 'digits'
  assert emulate.overrides(None, typed) == typed


@pytest.mark.parametrize('emulated', [False, True])
def test_each_device_that_computes_has_a_core(monkeypatch, emulated):
  """Cores are taken as they are there, whatever their numbers."""
  monkeypatch.setattr(shutil, 'which', lambda name: name)
  study = study_runner.Study(study_runs.LENET, {}, 'folder', emulated, sleeps=False)
  for nodes, devices, cores in ((1, 1, '4'), (2, 1, '4,5'), (1, 2, '4,5'), (2, 4, '4,5,7')):
    command = local._command(study, grid.Cell('sync', nodes, devices, 0), [4, 5, 7])
    assert command[:5] == ['taskset', '-c', cores, local.LAUNCHER, str(nodes)]
    assert command[5:7] == [f'--devices={devices}', '--bind']
  assert emulate.environment(study) == {}


def test_emulated_processes_share_the_cores_with_a_thread_each():
  study = study_runner.Study(study_runs.LENET, {}, 'folder', True, sleeps=True)
  command = local._command(study, grid.Cell('sync', 64, 1, 0), [0, 1])
  assert command[:3] == [local.LAUNCHER, '64', '--devices=1']
  assert '--bind' not in command and 'taskset' not in command
  assert emulate.environment(study)['OMP_NUM_THREADS'] == '1'


@pytest.mark.slow
def test_the_page_says_emulated_and_no_accuracy(tmp_path):
  cells = grid.expand(named_strategies.parse('sync'), (1, 16), (1,), (0,))
  runs = {
    cell: study_runs.run(0.5, rate=100.0 * cell.nodes, scores={'anp_top5': 0.9}) for cell in cells
  }
  failures = {grid.Cell('sync', 4, 1, 0): 'ValueError: <b> at `x*'}
  outcome = study_page.Outcome([*cells, *failures], runs, failures, 2, 'a pass is a sleep of 0.1 s')
  (tmp_path / 'accuracy.png').write_text('of a study that was here before')
  text = study_page.write(str(tmp_path), 'Strategies, emulated', '', outcome, ())
  head = text.splitlines()[0]
  assert 'images/s, emulated' in head and 'accuracy' not in head
  assert '16.00*' not in text and '16.00' in text
  assert 'Emulated: a pass is a sleep of 0.1 s. Processes, ' in text
  assert 'on 2 cores in all' in text
  assert not (tmp_path / 'accuracy.png').exists()
  for name in ('cells.csv', 'curves.csv'):
    columns = builders.rows(tmp_path / name)[0]
    assert 'seconds' in columns and not {'accuracy', 'best_accuracy', 'anp_top5'} & columns.keys()
  page = (tmp_path / 'study.md').read_text()
  assert page.startswith('# Strategies, emulated\n')
  assert '- failed: sync-4x1-seed0: ValueError: \\<b\\> at \\`x\\*\n' in page


def test_the_last_interval_of_an_emulated_run_does_not_count(tmp_path):
  """Its numbers come a step earlier than those of the others."""
  rates = ((4, 2.0, 20.0), (8, 1.0, 40.0), (12, 0.75, 160 / 3))
  train = [{'step': n, 'seconds': s, 'images_per_second': rate} for n, s, rate in rates]
  validation = [{'step': 12, 'anp_top1': 0.1}]
  folder = study_runs.write(tmp_path, train, validation, emulate__enabled=True)
  assert study_results.read(folder).images_per_second == 40.0


@pytest.mark.slow
@pytest.mark.multiprocess
def test_no_run_of_other_times_is_shown_or_continued(tmp_path, capsys):
  command = ['strategies', f'--config={study_runs.LENET}', f'--workdir={tmp_path}', '--nodes=1']
  command += ['--strategies=sync', '--config.batch_size=8', '--config.duration=12 steps']
  assert study_main.main([*command, '--emulate=step_seconds=0.02']) == 0, capsys.readouterr()
  (row,) = builders.rows(tmp_path / 'cells.csv')
  assert 0 < float(row['images_per_second']) < 8 / 0.02  # a pass of 8 images, and what is real
  left = {path: path.read_bytes() for path in tmp_path.rglob('*') if path.is_file()}
  capsys.readouterr()
  assert study_main.main([*command, '--emulate=step_seconds=0.2']) == 2
  builders.error_line(capsys, 'config.emulate.step_seconds=0.2: the run in ', 'has 0.02; choose')
  assert {path: path.read_bytes() for path in tmp_path.rglob('*') if path.is_file()} == left
  assert study_main.main([*command, '--emulate=step_seconds=0.02']) == 0
  assert '1 runs, 0 of them to do' in capsys.readouterr().out
