"""Tests of the study: grid, resuming, arithmetic, tables, figures."""

import json
import os
import pathlib
import re
import sys

import pytest

from anp_jax import config as config_lib
from anp_jax.tools.study import (
  __main__ as study_main,
  grid,
  local,
  named_strategies,
  slurm,
  study_results,
  study_runner,
)
from tests import builders, launching, slurm_cluster, study_runs

_TINY = study_runs.TINY
_CELL = grid.Cell('sync', 1, 1, 0)


def _command(folder, *more):
  return ['strategies', f'--config={_TINY}', f'--workdir={folder}', '--strategies=sync', *more]


# Running, with a launcher that trains nothing.

_FAILS = """\
if os.path.basename(workdir) in open(os.path.join(here, 'failing')).read():
  print('[0] thinking')
  print('[1] error: out of luck')
  print('[0] error: rank 1 has gone')
  sys.exit(75)
if nodes == '3':
  timed = {}
"""


@pytest.fixture
def pretend(tmp_path, monkeypatch):
  """A launcher that notes its calls; cells in `failing` fail, three nodes time no step."""
  (tmp_path / 'failing').write_text('')
  (tmp_path / 'calls').write_text('')
  study_runs.pretend(tmp_path, monkeypatch, _FAILS)
  return tmp_path


def _calls(pretend):
  calls = (pretend / 'calls').read_text().split()
  (pretend / 'calls').write_text('')
  return calls


@pytest.mark.slow
def test_what_is_finished_is_not_run_again(pretend, capsys):
  folder = pretend / 'study'
  command = _command(folder, '--nodes=1,2', '--seeds=0,1')
  names = [f'sync-{n}x1-seed{seed}' for seed in (0, 1) for n in (1, 2)]
  assert study_main.main(command) == 0
  calls = (pretend / 'calls').read_text().split()
  assert calls == names
  first = capsys.readouterr().out
  assert study_main.main(command) == 0
  assert (pretend / 'calls').read_text().split() == calls
  again = capsys.readouterr().out
  assert '4 runs, 0 of them to do' in again
  # The same table, from the same runs.
  assert first[first.index('strategy') :] == again[again.index('strategy') :]
  _calls(pretend)
  # A larger grid runs what is new, here a run without numbers; another config runs nothing.
  assert study_main.main(_command(folder, '--nodes=1,2,3')) == 1
  assert _calls(pretend) == ['sync-3x1-seed0']
  assert 'failed: sync-3x1-seed0: no step was timed' in (folder / 'study.md').read_text()
  capsys.readouterr()
  assert study_main.main([*command, '--config.duration=99 steps']) == 2
  builders.error_line(capsys, "config.duration='99 steps'", 'choose another --workdir')
  assert study_main.main([*command, '--config.log.every=3 steps']) == 0  # it changes no number
  assert _calls(pretend) == []


def test_a_stop_after_the_runs_is_one_line(pretend, monkeypatch, capsys):
  def interrupted(*_):
    raise KeyboardInterrupt

  monkeypatch.setattr(study_results, 'read', interrupted)
  assert study_main.main(_command(pretend / 'study', '--nodes=1')) == 130
  assert capsys.readouterr().err.splitlines()[-1].startswith('interrupted;')


@pytest.mark.slow
def test_a_failed_run_is_shown_and_tried_again(pretend, capsys):
  folder = pretend / 'study'
  (pretend / 'failing').write_text('sync-1x1-seed0')
  # When all fail there is still a page.
  assert study_main.main(_command(folder, '--nodes=1')) == 1
  assert _calls(pretend) == ['sync-1x1-seed0']
  assert 'out of luck' in (folder / 'study.md').read_text()
  command = _command(folder, '--nodes=1,2', '--target_accuracy=0.5')
  assert study_main.main(command) == 1
  assert _calls(pretend) == ['sync-1x1-seed0', 'sync-2x1-seed0']
  # The first error, which is the cause of the second.
  line = 'failed: sync-1x1-seed0: out of luck'
  assert line in capsys.readouterr().out
  assert line in (folder / 'study.md').read_text()
  bad, good = builders.rows(folder / 'cells.csv')
  assert (bad['state'], bad['error']) == ('failed', 'out of luck')
  assert bad['images_per_second'] == '' and good['state'] == 'finished'
  (pretend / 'failing').write_text('')
  assert study_main.main(command) == 0
  assert _calls(pretend) == ['sync-1x1-seed0']
  assert 'failed:' not in (folder / 'study.md').read_text()


def _refuse(monkeypatch, which):
  """Has the config of some cells be refused."""
  real = study_runner.Study.config

  def config(self, cell):
    if which(cell):
      raise config_lib.ConfigError('config.sharding: not with this')
    return real(self, cell)

  monkeypatch.setattr(study_runner.Study, 'config', config)


def test_a_cell_whose_config_is_refused_is_left_out(pretend, capsys, monkeypatch):
  """The others run, and it is no failure."""
  _refuse(monkeypatch, lambda cell: cell.nodes == 2)
  command = _command(pretend / 'study', '--nodes=1,2', '--seeds=0,1')
  assert study_main.main(command) == 0
  assert _calls(pretend) == ['sync-1x1-seed0', 'sync-1x1-seed1']
  # A note for both seeds.
  page = (pretend / 'study' / 'study.md').read_text()
  assert page.count('left out: ') == 1
  line = 'left out: sync-2x1-seed0: config.sharding: not with this'
  assert line in page and line in capsys.readouterr().out
  states = [row['state'] for row in builders.rows(pretend / 'study' / 'cells.csv')]
  assert states == ['finished', 'left out'] * 2


def test_the_page_of_a_study_in_which_nothing_could_be_trained(pretend, monkeypatch):
  _refuse(monkeypatch, lambda cell: cell.duration)  # a run that tunes
  command = _command(pretend / 'study', '--nodes=1', '--tune=optimizer.momentum=0,0.5')
  assert study_main.main(command) == 1
  page = (pretend / 'study' / 'study.md').read_text()
  assert 'sync-1x1' in page and 'config.sharding: not with this' in page


def _begun(tmp_path):
  study = study_runner.Study(_TINY, {}, str(tmp_path))
  workdir = tmp_path / 'runs' / _CELL.name
  workdir.mkdir(parents=True)
  return study, workdir


@pytest.mark.parametrize('of_a_rank', ['', 'rank 1 on node2: '])
def test_a_run_that_refuses_its_config_is_left_out(tmp_path, of_a_rank):
  """Some is known only when its processes have started; status 2 says so."""
  study, workdir = _begun(tmp_path)
  log, line = workdir / 'study.log', f'{of_a_rank}config.strategy.servers=4: too many'
  log.write_text(f'error: {line}\n')

  def is_refused(status):
    return isinstance(study_runner.ended(study, _CELL, status, None), study_runner.Refusal)

  assert study_runner.ended(study, _CELL, 2, None) == line
  assert is_refused(2) and not is_refused(1)
  # It has trained before: the study's config is another one now.
  (workdir / 'metrics.jsonl').write_text('')
  assert not is_refused(2)
  (workdir / 'metrics.jsonl').unlink()
  log.write_text('error: no Python here\n')  # of a job's set-up
  assert not is_refused(2)


def test_a_stopped_run_is_not_finished(tmp_path):
  study, workdir = _begun(tmp_path)
  (workdir / 'stopped.json').write_text(json.dumps({'step': 3, 'total': 9, 'reason': 'a signal'}))
  assert study_runner.ended(study, _CELL, 0, 2) == (
    'stopped at step 3 of 9 by a signal; run the same command to resume'
  )
  assert not study_runner.is_finished(study, _CELL)
  (workdir / 'stopped.json').unlink()
  assert study_runner.ended(study, _CELL, 0, 2) == ''
  assert study_runner.is_finished(study, _CELL)
  assert study_runner.record(study, _CELL)['cores'] == 2


_STUBBORN = """\
import pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, lambda *_: sys.exit((folder / 'saved').touch()))
(folder / 'started').touch()
time.sleep(60)
"""


def test_a_stop_is_passed_on_and_waited_for(tmp_path, monkeypatch):
  """To processes that were started in the background, too."""
  (tmp_path / 'stubborn.py').write_text(_STUBBORN)
  monkeypatch.setattr(
    local, '_command', lambda *_: [sys.executable, str(tmp_path / 'stubborn.py'), str(tmp_path)]
  )
  monkeypatch.setattr(local, '_POLL', 0.01)

  def interrupt(cell):
    if (tmp_path / 'started').exists():
      raise KeyboardInterrupt

  study = study_runner.Study(_TINY, {}, str(tmp_path))
  with pytest.raises(KeyboardInterrupt):
    local.run(study, [_CELL], interrupt, print)
  assert (tmp_path / 'saved').exists()
  assert not study_runner.is_finished(study, _CELL)


@pytest.mark.parametrize('count', [1, 2])
def test_the_launcher_divides_the_cores_it_has(tmp_path, count):
  """The last core alone: a share of one for each of one or two processes."""
  last = max(os.sched_getaffinity(0))
  text = f'[ "$1" = -c ] && exec {sys.executable} "$@"\ntaskset -cp $$ | sed "s/.*: //"'
  python = builders.write_program(tmp_path / 'python', text)
  words = 'taskset', '-c', last, local.LAUNCHER, count, '--bind'
  done = launching.command(*words, timeout=60, PYTHON=str(python))
  assert [line.split()[-1] for line in done.stdout.splitlines()] == [str(last)] * count


# Slurm, whose programs are short scripts here.

_SLURM = {
  'sbatch': """
echo "$@" >> $SLURM_NOTES/submitted
echo $JAX_NUM_CPU_DEVICES >> $SLURM_NOTES/devices
number=$(wc -l < $SLURM_NOTES/submitted)
echo "$number;cluster"
echo $number >> $SLURM_NOTES/queue
""",
  # Each look at the queue finds one job fewer.
  'squeue': 'cat $SLURM_NOTES/queue; sed -i 1d $SLURM_NOTES/queue',
  'scontrol': '[ $4 = 2 ] && { %s; } || echo JobId=$4 ExitCode=0:0 X=1',
}


_KILLED = 'echo JobId=2 ExitCode=0:9 X=1'
_FORGOTTEN = 'echo Invalid job id specified >&2; exit 1'


@pytest.fixture
def slurm_programs(tmp_path, monkeypatch):
  notes = tmp_path / 'notes'
  builders.write_tree(notes, {'queue': ''})
  for name, text in _SLURM.items():
    builders.write_program(notes / name, text.replace('%s', _KILLED))
  monkeypatch.setenv('PATH', f'{notes}:{os.environ["PATH"]}')
  monkeypatch.setenv('SLURM_NOTES', str(notes))
  return notes


@pytest.mark.parametrize('second', [_KILLED, _FORGOTTEN])
def test_slurm_jobs(tmp_path, slurm_programs, second):
  builders.write_program(slurm_programs / 'scontrol', _SLURM['scontrol'].replace('%s', second))
  study = study_runner.Study(_TINY, {'batch_size': '32'}, str(tmp_path / 'study'))
  cells = grid.expand(named_strategies.parse('sync'), (1, 2), (4,), (0,))
  ends = {}
  options = ['--gpus-per-node={devices}', '--exclusive', '--comment={}']
  slurm.run(study, cells, lambda c: None, ends.__setitem__, options, poll=0)
  assert ends == {cells[0]: '', cells[1]: 'ended with status 1'}
  assert study_runner.is_finished(study, cells[0])
  assert study_runner.record(study, cells[0])['cores'] is None
  assert not study_runner.is_finished(study, cells[1])
  row_one, row_two = (slurm_programs / 'submitted').read_text().splitlines()
  for text, nodes in ((row_one, 1), (row_two, 2)):
    assert f'--nodes={nodes} ' in text and ' --exclusive ' in text
    assert ' --gpus-per-node=4 ' in text
    assert ' scripts/slurm/train.sbatch --config=' in text
    assert '--config.batch_size=32' in text
  assert (slurm_programs / 'devices').read_text().split() == ['4', '4']


def test_jobs_that_still_run_are_not_submitted_again(tmp_path, slurm_programs):
  study = study_runner.Study(_TINY, {}, str(tmp_path / 'study'))
  job = pathlib.Path(study.workdir(_CELL), slurm.JOB)
  job.parent.mkdir(parents=True)
  job.write_text('71')
  (slurm_programs / 'queue').write_text('71\n')
  ends = {}
  slurm.run(study, [_CELL], lambda c: None, ends.__setitem__, [], poll=0)
  assert ends == {_CELL: ''}
  assert not (slurm_programs / 'submitted').exists()
  assert not job.exists()


def test_without_slurm_or_its_scripts_one_line_says_so(tmp_path, capsys, monkeypatch):
  assert (launching.ROOT / slurm.script()).is_file()
  monkeypatch.setenv('PATH', str(tmp_path))
  assert study_main.main(_command(tmp_path / 'study', '--slurm')) == 2
  assert capsys.readouterr().err == 'error: --slurm: there is no squeue on this machine\n'
  assert study_main.main(_command(tmp_path / 'study', "--slurm=--comment='a")) == 2
  assert (
    '--slurm="--comment=\'a": expected options of sbatch: No closing' in capsys.readouterr().err
  )
  monkeypatch.chdir(tmp_path)
  builders.assert_refused('start the study in the checkout of anp_jax', slurm.script)


# The whole command.


@pytest.mark.multiprocess
def test_the_command_on_two_processes(tmp_path, capsys, monkeypatch):
  for name, value in launching.QUICK.items():
    monkeypatch.setenv(name, value)
  more = '--nodes=2', '--target_accuracy=0.01', *launching.typed(launching.TINY)
  command = _command(tmp_path, *more)
  assert study_main.main(command) == 0, capsys.readouterr()
  (row,) = builders.rows(tmp_path / 'cells.csv')
  assert row['nodes'] == '2' and 0 <= float(row['accuracy']) <= 1
  log = (tmp_path / 'runs/sync-2x1-seed0/study.log').read_text()
  assert re.search(r'^\[1\] ', log, re.M) and '2 x cpu' in log
  for name in ('study.md', 'curves.csv', 'speed.png', 'accuracy.png'):
    assert (tmp_path / name).stat().st_size > 0
  capsys.readouterr()
  assert study_main.main(command) == 0 and '0 of them to do' in capsys.readouterr().out


@pytest.mark.slurm
@pytest.mark.timeout(600)
@pytest.mark.soak
def test_the_command_on_a_cluster(tmp_path):
  """Jobs of one and two nodes, and one that cannot be."""
  # In groups of 4 images.
  more = '--nodes=1,2', '--slurm=--time=10', *launching.typed(launching.TINY | {'batch_size': 20})
  with slurm_cluster.open_cluster():
    assert study_main.main(_command(tmp_path, *more)) == 0
  row_one, row_two = builders.rows(tmp_path / 'cells.csv')
  assert row_two['state'] == 'left out'
  assert row_one['state'] == 'finished' and float(row_one['images_per_second']) > 0
  assert 'norm_group=4: a device computes 10 images' in row_two['error']
