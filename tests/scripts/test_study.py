"""Tests of the study: grid, resuming, arithmetic, tables, figures."""

import csv
import json
import os
import re
import stat
import subprocess
import sys

import numpy as np
import pytest

from anp_jax import config as config_lib
from anp_jax.config import strategy as strategy_lib
from scripts.study import __main__ as study_main
from scripts.study import grid
from scripts.study import local
from scripts.study import plots
from scripts.study import results
from scripts.study import runner
from scripts.study import slurm
from scripts.study import table
from scripts.study import traffic
from tests import launching
from tests import slurm_cluster

_TINY = 'configs/resnet_anp.py:tiny'


def _cell(strategy='sync', nodes=1, devices=1, seed=0):
  return grid.Cell(strategy, nodes, devices, seed)


def _command(folder, *more):
  return [
    'strategies', f'--config={_TINY}', f'--workdir={folder}',
    '--strategies=sync', *more,
  ]  # fmt: skip


# The grid.


def test_grid_is_every_combination_seed_by_seed():
  cells = grid.expand(('sync', 'local'), (1, 4), (2,), (7, 8))
  assert [(c.seed, c.nodes, c.devices, c.strategy) for c in cells] == [
    (7, 1, 2, 'sync'), (7, 1, 2, 'local'), (7, 4, 2, 'sync'),
    (7, 4, 2, 'local'), (8, 1, 2, 'sync'), (8, 1, 2, 'local'),
    (8, 4, 2, 'sync'), (8, 4, 2, 'local'),
  ]  # fmt: skip
  assert cells[2].name == 'sync-4x2-seed7' and cells[2].workers == 8
  assert cells[2].overrides == {'strategy.name': 'sync', 'seed': '7'}
  assert len({c.name for c in cells}) == len(cells)


def test_learning_rates_are_an_axis_of_their_own():
  cells = grid.expand(('sync',), (1,), (1,), (0,), (0.01, 0.02))
  assert [c.overrides['optimizer.learning_rate'] for c in cells] == [
    '0.01', '0.02',
  ]  # fmt: skip
  assert cells[1].name == 'sync-1x1-rate0.02-seed0'
  assert grid.learning_rates('0.02, 1e-2,0.020') == (0.01, 0.02)
  assert grid.learning_rates(None) == (None,)


def test_lists_of_numbers():
  assert grid.numbers('--nodes', '4, 1,2,1', 1) == (1, 2, 4)
  assert grid.numbers('--seeds', '0', 0) == (0,)


@pytest.mark.parametrize(
  'arguments, words',
  (
    (['--nodes=1,x'], "--nodes='1,x': expected whole numbers from 1"),
    (['--nodes=0'], "--nodes='0': expected whole numbers from 1"),
    (['--devices_per_node=1,,2'], "--devices_per_node='1,,2': expected whole"),
    (['--seeds=-1'], "--seeds='-1': expected whole numbers from 0"),
    (['--learning_rates=0.1,x'], "--learning_rates='0.1,x': expected numbers"),
    (['--learning_rates=inf'], "--learning_rates='inf': expected numbers"),
    (
      ['--learning_rates=0.1', '--config.optimizer.learning_rate=1'],
      'the study sets it; use --learning_rates',
    ),
    (['--target_accuracy=95'], '--target_accuracy=95.0: expected a number'),
    (['--strategy=sync'], "unknown argument '--strategy=sync'; did you mean"),
    (['--config.seed=3'], '--config.seed=3: the study sets it; use --seeds'),
    (['--config.strategy.name=sync'], 'the study sets it; use --strategies'),
    (['--config.duraton=3'], "unknown key config.duraton; did you mean 'dur"),
    (['--strategies=sync,relay'], 'by python -m scripts.study relay'),
    (['--config=configs/none.py'], "no file 'configs/none.py'"),
    (['--workdir='], '--workdir is missing'),
  ),
)
def test_bad_flags_are_one_line(tmp_path, capsys, arguments, words):
  assert study_main.main(_command(tmp_path, *arguments)) == 2
  message = capsys.readouterr().err
  assert words in message and message.count('\n') == 1
  assert not list(tmp_path.iterdir())


def test_unknown_strategy_is_refused_with_those_there_are(tmp_path, capsys):
  assert study_main.main(_command(tmp_path, '--strategies=sync,synk')) == 2
  assert capsys.readouterr().err == (
    "error: --strategies: no strategy 'synk' (have: sync, invariant, local, "
    "server, kernel_split); did you mean 'sync'?\n"
  )


# Running, with a launcher that trains nothing.

_PRETEND = """\
import json, os, sys
flags = dict(a.lstrip('-').split('=', 1) for a in sys.argv[1:] if '=' in a)
workdir = flags['workdir']
with open(os.path.join(os.environ['PRETEND'], 'calls'), 'a') as f:
  print(os.path.basename(workdir), file=f)
failing = os.path.join(os.environ['PRETEND'], 'failing')
if os.path.basename(workdir) in open(failing).read():
  print('[0 host] thinking')
  print('[1 host] error: out of luck')
  print('[0 host] error: rank 1 has gone')
  sys.exit(75)
nodes = int(sys.argv[1])
with open(os.path.join(workdir, 'config.json'), 'w') as f:
  json.dump({'batch_size': 10}, f)
with open(os.path.join(workdir, 'metrics.jsonl'), 'w') as f:
  for step in (2, 4):
    print(json.dumps({
      'kind': 'train', 'step': step, 'epoch': step / 10, 'seconds': 1 / nodes,
      'images_per_second': 20 * nodes}), file=f)
  print(json.dumps({'kind': 'validation', 'step': 4, 'epoch': 0.4,
                    'anp_top1': 0.5}), file=f)
"""


@pytest.fixture
def pretend(tmp_path, monkeypatch):
  """A launcher that notes its calls; cells named in `failing` fail.

  The counting of traffic, which compiles, is noted too.
  """
  script = tmp_path / 'pretend.py'
  script.write_text(_PRETEND)
  (tmp_path / 'failing').write_text('')
  (tmp_path / 'calls').write_text('')
  monkeypatch.setenv('PRETEND', str(tmp_path))

  def command(study, cell, cores):
    del cores
    return [sys.executable, str(script), str(cell.nodes),
            *study.arguments(cell)]  # fmt: skip

  def megabytes(study, cell):
    del study
    with open(tmp_path / 'calls', 'a') as f:
      print(f'count-{cell.workers}', file=f)
    return 3.25

  monkeypatch.setattr(local, '_command', command)
  monkeypatch.setattr(traffic, 'megabytes', megabytes)
  return tmp_path


def _calls(pretend):
  calls = (pretend / 'calls').read_text().split()
  (pretend / 'calls').write_text('')
  return [c for c in calls if not c.startswith('count')]


@pytest.mark.slow
def test_what_is_finished_is_not_run_again(pretend, capsys):
  folder = pretend / 'study'
  command = _command(folder, '--nodes=1,2')
  assert study_main.main(command) == 0
  assert _calls(pretend) == ['sync-1x1-seed0', 'sync-2x1-seed0']
  first = capsys.readouterr().out
  assert study_main.main(command) == 0
  assert _calls(pretend) == []
  again = capsys.readouterr().out
  assert '2 runs, 0 of them to do' in again
  # The same table, from the same runs.
  assert first[first.index('strategy') :] == again[again.index('strategy') :]
  # A larger grid runs what is new; another config runs all.
  assert study_main.main(_command(folder, '--nodes=1,2,3')) == 0
  assert _calls(pretend) == ['sync-3x1-seed0']
  assert study_main.main([*command, '--config.duration=99 steps']) == 0
  assert _calls(pretend) == ['sync-1x1-seed0', 'sync-2x1-seed0']


@pytest.mark.slow
def test_traffic_is_counted_once_for_all_seeds(pretend, capsys):
  command = _command(pretend / 'study', '--nodes=1,2', '--seeds=0,1')
  assert study_main.main(command) == 0
  calls = (pretend / 'calls').read_text().split()
  assert [c for c in calls if c.startswith('count')] == ['count-1', 'count-2']
  assert '3.25 ± 0.00' in capsys.readouterr().out
  assert study_main.main(command) == 0
  assert (pretend / 'calls').read_text().split() == calls
  assert '3.25 ± 0.00' in capsys.readouterr().out


def test_bytes_that_a_ring_sends():
  """Four devices: each sends 3/4 of what is gathered, twice it for a sum."""
  rows = [
    {'kind': 'all-reduce', 'bytes': 4e6, 'conditional': False},
    {'kind': 'all-gather', 'bytes': 8e6, 'conditional': False},
  ]
  each = (2 * 4e6 + 8e6) * 3 / 4
  assert traffic.sent(rows, 4) == pytest.approx(4 * each / 1e6, rel=1e-12)
  # Two groups of two: half of it within each, and half of a sum between them
  # in one step of eight.
  rows.append({'kind': 'all-reduce', 'bytes': 6e6, 'conditional': True})
  each = (2 * 4e6 + 8e6) / 2 + 2 * 6e6 / 2 / 8
  assert traffic.sent(rows, 4, 2, 1 / 8) == pytest.approx(4 * each / 1e6)


@pytest.mark.slow
@pytest.mark.parametrize('strategy, period', [('sync', 1), ('local', 8)])
def test_bytes_of_a_compiled_step(strategy, period):
  """LeNet's 431,080 parameters and 1,000 for colours, in float32."""
  study = runner.Study('configs/lenet.py', {}, 'unused')
  # Metrics are a few numbers more.
  want = 4 * 432_080 * 2 / period / 1e6
  got = traffic.megabytes(study, _cell(strategy, nodes=2))
  assert want <= got < want + 1e-3
  assert traffic.megabytes(study, _cell(strategy)) == 0


@pytest.mark.slow
def test_a_failed_run_is_shown_and_tried_again(pretend, capsys):
  folder = pretend / 'study'
  (pretend / 'failing').write_text('sync-1x1-seed0')
  command = _command(folder, '--nodes=1,2', '--target_accuracy=0.5')
  assert study_main.main(command) == 1
  assert _calls(pretend) == ['sync-1x1-seed0', 'sync-2x1-seed0']
  # The first error, which is the cause of the second.
  line = 'failed: sync-1x1-seed0: out of luck'
  assert line in capsys.readouterr().out
  assert line in (folder / 'study.md').read_text()
  with open(folder / 'cells.csv') as f:
    bad, good = csv.DictReader(f)
  assert (bad['state'], bad['error']) == ('failed', 'out of luck')
  assert bad['images_per_second'] == '' and good['state'] == 'finished'
  (pretend / 'failing').write_text('')
  assert study_main.main(command) == 0
  assert _calls(pretend) == ['sync-1x1-seed0']
  assert 'failed:' not in (folder / 'study.md').read_text()


def test_a_cell_whose_config_is_refused_is_shown(pretend, capsys, monkeypatch):
  """One cell is refused; the others run."""
  real = runner.Study.config

  def config(self, cell):
    if cell.nodes == 2:
      raise config_lib.ConfigError('config.sharding: not with this')
    return real(self, cell)

  monkeypatch.setattr(runner.Study, 'config', config)
  assert study_main.main(_command(pretend / 'study', '--nodes=1,2')) == 1
  assert _calls(pretend) == ['sync-1x1-seed0']
  out = capsys.readouterr().out
  assert 'failed: sync-2x1-seed0: config.sharding: not with this' in out


def test_a_run_too_short_to_be_timed_is_shown(pretend, capsys):
  """Its first step, which compiles, is no rate."""
  folder = pretend / 'study'
  command = _command(folder, '--nodes=1,2')
  assert study_main.main(command) == 0
  metrics = folder / 'runs' / 'sync-1x1-seed0' / 'metrics.jsonl'
  metrics.write_text('{"kind": "train", "step": 1, "epoch": 0.1}\n')
  assert study_main.main(command) == 1
  line = 'failed: sync-1x1-seed0: no step was timed'
  assert line in capsys.readouterr().out
  assert line in (folder / 'study.md').read_text()


def test_when_all_fail_there_is_still_a_page(pretend):
  folder = pretend / 'study'
  (pretend / 'failing').write_text('sync-1x1-seed0')
  assert study_main.main(_command(folder, '--nodes=1')) == 1
  assert 'out of luck' in (folder / 'study.md').read_text()


def test_a_stopped_run_is_not_finished(tmp_path):
  study = runner.Study(_TINY, {}, str(tmp_path))
  workdir = tmp_path / 'runs' / _cell().name
  workdir.mkdir(parents=True)
  (workdir / 'stopped.json').write_text(
    json.dumps({'step': 3, 'total': 9, 'reason': 'a signal'})
  )
  assert runner.ended(study, _cell(), 0, 2) == (
    'stopped at step 3 of 9 by a signal; run the same command to resume'
  )
  assert not runner.is_finished(study, _cell())
  (workdir / 'stopped.json').unlink()
  assert runner.ended(study, _cell(), 0, 2) == ''
  assert runner.is_finished(study, _cell())
  assert runner.record(study, _cell())['cores'] == 2


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
    local, '_command',
    lambda *_: [sys.executable, str(tmp_path / 'stubborn.py'), str(tmp_path)],
  )  # fmt: skip
  monkeypatch.setattr(local, '_POLL', 0.01)

  def interrupt(cell):
    if (tmp_path / 'started').exists():
      raise KeyboardInterrupt

  study = runner.Study(_TINY, {}, str(tmp_path))
  with pytest.raises(KeyboardInterrupt):
    local.run(study, [_cell()], interrupt, print)
  assert (tmp_path / 'saved').exists()
  assert not runner.is_finished(study, _cell())


def test_each_device_has_a_core(tmp_path):
  """Cores are taken as they are there, whatever their numbers."""
  study = runner.Study(_TINY, {}, str(tmp_path))
  for cell, want in (
    (_cell(), '4'), (_cell(nodes=2), '4,5'), (_cell(devices=2), '4,5'),
    (_cell(nodes=2, devices=4), '4,5,7'),
  ):  # fmt: skip
    command = local._command(study, cell, [4, 5, 7])
    assert command[:5] == [
      'taskset', '-c', want, 'scripts/launch_local.sh', str(cell.nodes),
    ]  # fmt: skip
    assert command[5:7] == [f'--devices={cell.devices}', '--bind']


@pytest.mark.parametrize('count', [1, 2])
def test_the_launcher_divides_the_cores_it_has(tmp_path, count):
  """The last core alone: a share of one for each of one or two processes."""
  last = max(os.sched_getaffinity(0))
  python = tmp_path / 'python'
  python.write_text(
    f'#!/usr/bin/env bash\n[ "$1" != main.py ] && exec {sys.executable} "$@"\n'
    'taskset -cp $$ | sed "s/.*: //"\n'
  )
  python.chmod(python.stat().st_mode | stat.S_IXUSR)
  done = subprocess.run(
    ['taskset', '-c', str(last), 'scripts/launch_local.sh', str(count),
     '--bind'],
    cwd=launching.ROOT, env={**os.environ, 'PYTHON': str(python)},
    capture_output=True, text=True, timeout=60,
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  assert done.stdout.split() == [str(last)] * count


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
  # The second job was ended by signal 9.
  'scontrol': '[ $4 = 2 ] && s=0:9 || s=0:0; echo JobId=$4 ExitCode=$s X=1',
}


@pytest.fixture
def slurm_programs(tmp_path, monkeypatch):
  notes = tmp_path / 'notes'
  notes.mkdir()
  (notes / 'queue').write_text('')
  for name, text in _SLURM.items():
    path = notes / name
    path.write_text(f'#!/usr/bin/env bash\n{text}\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
  monkeypatch.setenv('PATH', f'{notes}:{os.environ["PATH"]}')
  monkeypatch.setenv('SLURM_NOTES', str(notes))
  return notes


def test_every_strategy_has_its_script():
  for strategy in strategy_lib.BUILT_IN:
    assert (launching.ROOT / slurm.script(strategy)).is_file(), strategy
  assert slurm.script('sync') == 'scripts/slurm/train.sbatch'


def test_slurm_jobs(tmp_path, slurm_programs):
  study = runner.Study(_TINY, {'batch_size': '32'}, str(tmp_path / 'study'))
  cells = grid.expand(('sync',), (1, 2), (4,), (0,))
  ends = {}
  options = ['--gpus-per-node={devices}', '--exclusive']
  slurm.run(study, cells, lambda c: None, ends.__setitem__, options, poll=0)
  assert ends == {cells[0]: '', cells[1]: 'ended with status 1'}
  assert runner.is_finished(study, cells[0])
  assert runner.record(study, cells[0])['cores'] is None
  assert not runner.is_finished(study, cells[1])
  row_one, row_two = (slurm_programs / 'submitted').read_text().splitlines()
  for text, nodes in ((row_one, 1), (row_two, 2)):
    assert f'--nodes={nodes} ' in text and ' --exclusive ' in text
    assert ' --gpus-per-node=4 ' in text
    assert ' scripts/slurm/train.sbatch --config=' in text
    assert '--config.batch_size=32' in text
  assert (slurm_programs / 'devices').read_text().split() == ['4', '4']


def test_jobs_that_still_run_are_not_submitted_again(tmp_path, slurm_programs):
  study = runner.Study(_TINY, {}, str(tmp_path / 'study'))
  cell = _cell()
  os.makedirs(study.workdir(cell))
  with open(os.path.join(study.workdir(cell), slurm.JOB), 'w') as f:
    f.write('71')
  (slurm_programs / 'queue').write_text('71\n')
  ends = {}
  slurm.run(study, [cell], lambda c: None, ends.__setitem__, [], poll=0)
  assert ends == {cell: ''}
  assert not (slurm_programs / 'submitted').exists()
  assert not os.path.exists(os.path.join(study.workdir(cell), slurm.JOB))


def test_without_slurm_one_line_says_so(tmp_path, capsys, monkeypatch):
  monkeypatch.setenv('PATH', str(tmp_path))
  assert study_main.main(_command(tmp_path / 'study', '--slurm')) == 2
  assert capsys.readouterr().err == (
    'error: --slurm: there is no squeue on this machine\n'
  )


# Arithmetic.


def _write_run(folder, train, validation, batch_size=10):
  folder.mkdir(parents=True, exist_ok=True)
  (folder / 'config.json').write_text(json.dumps({'batch_size': batch_size}))
  with open(folder / 'metrics.jsonl', 'w') as f:
    for kind, records in (('train', train), ('validation', validation)):
      for record in records:
        print(json.dumps({'kind': kind, 'epoch': 0.0, **record}), file=f)
  return str(folder)


def test_a_runs_numbers_in_closed_form(tmp_path):
  """10 images a step. 40/s until step 8, 20/s until 12, 50/s until 22."""
  workdir = _write_run(
    tmp_path,
    [
      {'step': 1},  # timed by nothing
      {'step': 8, 'seconds': 7 / 4, 'images_per_second': 40.0},
      {'step': 12, 'seconds': 2.0, 'images_per_second': 20.0,
       'staleness_0': 3, 'staleness_2': 1, 'megabytes_per_update': 6.0},
      # Continued after a stop: one step of this interval went untimed.
      {'step': 22, 'seconds': 9 / 5, 'images_per_second': 50.0,
       'staleness_2': 4, 'megabytes_per_update': 9.5, 'staleness': 1.5},
    ],
    [
      {'step': 4, 'anp_top1': 0.3},
      {'step': 10, 'anp_top1': 0.9},  # scored again when the run went on
      {'step': 22, 'anp_top1': 0.5},
      {'step': 10, 'anp_top1': 0.6},
    ],
  )  # fmt: skip
  run = results.read(workdir)
  # Without the first interval: 40 images in 2 s and 90 in 1.8 s.
  assert run.images_per_second == pytest.approx(130 / 3.8, rel=1e-12)
  assert run.steps.tolist() == [4, 10, 22]
  assert run.samples.tolist() == [40, 100, 220]
  # 4 steps of 1/4 s; 8 of them and 2 of 1/2 s; and 2 more, and 10 of 1/5 s.
  np.testing.assert_allclose(run.seconds, [1, 3, 6], rtol=1e-12)
  assert run.accuracy.tolist() == [0.3, 0.6, 0.5]
  assert run.seconds_to(0.55) == pytest.approx(3, rel=1e-12)
  assert run.seconds_to(0.61) is None
  assert run.staleness == {0: 3, 2: 5}
  # 4 steps of 6 MB and 10 of 9.5 MB.
  assert run.megabytes == pytest.approx(119 / 14, rel=1e-12)


def test_one_interval_is_better_than_none(tmp_path):
  run = results.read(
    _write_run(
      tmp_path,
      [{'step': 3, 'seconds': 1.0, 'images_per_second': 20.0}],
      [{'step': 3, 'anp_top1': 1.0}],
    )
  )
  assert run.images_per_second == 20
  assert (run.megabytes, run.staleness) == (None, {})


def _run(rate, accuracy=(0.5,), **more):
  n = len(accuracy)
  steps = np.arange(1, n + 1)
  return results.Run(
    rate, steps, 10 * steps, steps / rate, np.array(accuracy), **more
  )


def test_speed_ups_are_of_the_same_strategy_and_seed():
  rates = {
    ('sync', 1, 1, 0): 10, ('sync', 1, 1, 1): 20, ('sync', 1, 2, 0): 15,
    ('sync', 1, 2, 1): 40, ('sync', 4, 2, 0): 45, ('sync', 4, 2, 1): 100,
    ('local', 4, 2, 0): 90, ('local', 1, 2, 0): 30,
  }  # fmt: skip
  runs = {grid.Cell(*key): _run(rate) for key, rate in rates.items()}
  lost = _cell('local', 1, 1)
  cells = grid.expand(('sync', 'local'), (1, 4), (1, 2), (0, 1))
  results_by_name = {
    (p.strategy, p.nodes, p.devices): p
    for p in results.points(cells, runs, {lost: 'lost'})
  }
  # Strategies in their order, then nodes, then devices.
  assert list(results_by_name)[:2] == [('sync', 1, 1), ('sync', 1, 2)]
  assert list(results_by_name)[4:] == [
    ('local', n, d) for n in (1, 4) for d in (1, 2)
  ]
  # (15 / 10 + 40 / 20) / 2, and the deviation of 1.5 and 2: 0.5 / sqrt(2).
  within = results_by_name['sync', 1, 2].over_device
  assert within.mean == pytest.approx(1.75, rel=1e-12)
  assert within.deviation == pytest.approx(0.5 / np.sqrt(2), rel=1e-12)
  assert results_by_name['sync', 1, 2].over_node.mean == 1
  across = results_by_name['sync', 4, 2]
  assert across.over_node.mean == pytest.approx((3 + 2.5) / 2, rel=1e-12)
  assert across.over_device.mean == pytest.approx((4.5 + 5) / 2, rel=1e-12)
  assert across.workers == 8
  # Its own baseline, without one device and one seed.
  local = results_by_name['local', 4, 2]
  assert local.over_node == results.Spread(3.0, 0.0, 1)
  assert local.over_device is None
  assert results_by_name['local', 1, 1].failures == {'local-1x1-seed0': 'lost'}
  assert results_by_name['sync', 4, 1].rate is None


def test_a_strategy_is_shown_with_its_best_learning_rate():
  cells = grid.expand(('sync', 'local'), (1,), (1,), (0, 1), (0.1, 0.2, 0.4))
  # 0.2 is best for sync; of local's, one seed with 0.4 did not come to its end.
  scores = {
    ('sync', 0.1): (0.5, 0.6), ('sync', 0.2): (0.8, 0.6),
    ('sync', 0.4): (0.7, 0.6), ('local', 0.1): (0.3, 0.5),
    ('local', 0.2): (0.2, 0.2), ('local', 0.4): (0.9, None),
  }  # fmt: skip
  runs, failures = {}, {}
  for c in cells:
    score = scores[c.strategy, c.learning_rate][c.seed]
    if score is None:
      failures[c] = 'not finite'
    else:
      runs[c] = _run(100.0, (0.1, score))
  sync, local_point = results.points(cells, runs, failures)
  assert (sync.learning_rate, local_point.learning_rate) == (0.2, 0.1)
  assert sync.accuracy.mean == pytest.approx(0.7, rel=1e-12)
  assert local_point.tried[0.4] == results.Spread(0.9, 0.0, 1)
  assert local_point.failures == {'local-1x1-rate0.4-seed1': 'not finite'}
  rows = table.rows([sync, local_point], None)
  assert rows[0][-3:] == ('learning rate', 'accuracy', 'seeds')
  # Deviations of 0.8 and 0.6, and of 0.3 and 0.5: 0.2 / sqrt(2).
  assert rows[1][-3:] == ('0.2', '70.0 ± 14.1 %', '2')
  assert rows[2][-3:] == ('0.1', '40.0 ± 14.1 %', '2, 1 failed')
  tried = table.by_learning_rate([sync, local_point])
  assert tried[0][3:] == ('0.1', '0.2', '0.4')
  assert tried[2][3:] == ('40.0 ± 14.1 % best', '20.0 ± 0.0 %', '90.0 %')
  notes = table.notes([sync, local_point], None)
  assert 'failed: local-1x1-rate0.4-seed1: not finite' in notes
  assert table.by_learning_rate(_points()) == []


def test_spread():
  # Deviations -1, 0, 1 from the mean, over n - 1 = 2.
  assert results.spread([4.0, None, 2.0, 3.0]) == results.Spread(3.0, 1.0, 3)
  assert results.spread([None]) is None


# Tables and figures.


def _points(**more):
  cells = grid.expand(('sync',), (1, 2), (1, 2), (0, 1))
  runs = {
    c: _run(
      100.0 * c.workers + c.seed,
      (0.2, 0.4 + 0.4 * c.seed),
      crowded=c.workers > 2,
      **more,
    )
    for c in cells
  }
  return results.points(cells, runs, {})


def test_table_says_what_means_nothing():
  points = _points(megabytes=2.5)
  rows = table.rows(points, 0.7)
  assert rows[0] == (
    'strategy', 'nodes', 'devices a node', 'images/s', 'over one device',
    'over one node', 'accuracy', 'time to 70 %', 'MB sent a step', 'seeds',
  )  # fmt: skip
  by_place = {row[1:3]: row for row in rows[1:]}
  # Rates 200 and 201, baselines 100 and 101; the accuracies 0.4 and 0.8.
  assert by_place['1', '2'][3:7] == (
    '200 ± 1', '2.00 ± 0.01', '1.00 ± 0.00', '60.0 ± 28.3 %',
  )  # fmt: skip
  # Only one seed reached 0.7, at its second evaluation: 2 / 201 s.
  assert by_place['1', '2'][7:] == ('0.0 s (1 not)', '2.50 ± 0.00', '2')
  assert '*' not in ''.join(by_place['1', '2'])
  assert by_place['2', '2'][4].endswith('*')
  notes = '\n'.join(table.notes(points, 2))
  assert 'one machine with 2 cores' in notes and 'mean nothing' in notes
  assert 'mean nothing' not in '\n'.join(table.notes(points[:3], 2))
  # Columns that nothing fills are left out.
  head = table.rows(_points(), None)[0]
  assert 'MB sent a step' not in head and not any('time' in h for h in head)


def _curves(axis):
  """Points of what is drawn, by name; error bars are containers."""
  curves = {
    c.get_label(): np.array(c.lines[0].get_xydata()) for c in axis.containers
  }
  for line in axis.lines:
    if not line.get_label().startswith('_'):
      curves[line.get_label()] = np.array(line.get_xydata())
  return curves


def test_figures_hold_the_series(tmp_path):
  points = _points(staleness={0: 3, 2: 1})
  speed = plots.speed(points)
  rates, within, across = (_curves(axis) for axis in speed.axes)
  # Means of two seeds; whole nodes of two devices, and one device.
  np.testing.assert_allclose(
    rates['sync'], [[1, 100.5], [2, 200.5], [4, 400.5]], rtol=1e-12
  )
  np.testing.assert_allclose(
    within['sync'], [[1, 1], [2, (2 + 201 / 101) / 2]], rtol=1e-12
  )
  np.testing.assert_allclose(
    across['sync'], [[1, 1], [2, (2 + 401 / 201) / 2]], rtol=1e-12
  )
  for curves in (within, across):
    np.testing.assert_array_equal(curves['ideal'], [[1, 1], [2, 2]])
  accuracy = plots.accuracy(points, 0.7)
  samples, seconds, to_target = (_curves(axis) for axis in accuracy.axes)
  assert set(samples) == {'sync, 2 x 2', 'sync, 1 x 1'}
  np.testing.assert_allclose(
    samples['sync, 2 x 2'], [[10, 0.2], [20, 0.6]], rtol=1e-12
  )
  np.testing.assert_allclose(
    seconds['sync, 2 x 2'][:, 0],
    [(1 / 400 + 1 / 401) / 2, (2 / 400 + 2 / 401) / 2],
    rtol=1e-12,
  )
  assert to_target['sync'][:, 0].tolist() == [1, 2, 4]
  (axis,) = plots.staleness(points).axes
  heights = [bar.get_height() for bar in axis.containers[0]]
  assert heights == [0.75, 0.25]
  for name, figure in (('speed', speed), ('accuracy', accuracy)):
    plots.save(figure, str(tmp_path / f'{name}.png'))
    assert (tmp_path / f'{name}.png').read_bytes()[:4] == b'\x89PNG'
  assert plots.staleness(_points()) is None
  (axis,) = plots.traffic(_points(megabytes=2.5)).axes
  assert _curves(axis)['sync'].tolist() == [[1, 2.5], [2, 2.5], [4, 2.5]]
  assert plots.traffic(_points()) is None


# The whole command.


@pytest.mark.multiprocess
def test_the_command_on_one_and_two_processes(tmp_path):
  command = [
    sys.executable, '-m', 'scripts.study',
    *_command(
      tmp_path, '--nodes=1,2', '--strategies=sync', '--target_accuracy=0.01',
      *(f'--config.{k}={v}' for k, v in launching.TINY.items()),
    ),
  ]  # fmt: skip
  done = subprocess.run(
    command, cwd=launching.ROOT, capture_output=True, text=True, timeout=300
  )
  assert done.returncode == 0, done.stdout + done.stderr
  with open(tmp_path / 'cells.csv') as f:
    row_one, row_two = csv.DictReader(f)
  assert (row_one['nodes'], row_two['nodes']) == ('1', '2')
  # The same training, but for the order of sums.
  assert float(row_one['accuracy']) == pytest.approx(float(row_two['accuracy']))
  log = (tmp_path / 'runs/sync-2x1-seed0/study.log').read_text()
  assert re.search(r'^\[1 ', log, re.M) and '2 x cpu' in log
  for name in ('study.md', 'curves.csv', 'speed.png', 'accuracy.png'):
    assert (tmp_path / name).stat().st_size > 0
  again = subprocess.run(
    command, cwd=launching.ROOT, capture_output=True, text=True, timeout=60
  )
  assert again.returncode == 0 and '0 of them to do' in again.stdout


@pytest.mark.slurm
@pytest.mark.timeout(600)
@pytest.mark.soak
def test_the_command_on_a_cluster(tmp_path):
  """Jobs of one and two nodes, and one that cannot be."""
  with slurm_cluster.open_cluster():
    done = subprocess.run(
      [
        sys.executable, '-m', 'scripts.study',
        *_command(
          tmp_path, '--nodes=1,2', '--strategies=sync', '--slurm=--time=10',
          '--config.batch_size=20',  # in groups of 4 images
          *(f'--config.{k}={v}' for k, v in launching.TINY.items()),
        ),
      ],
      cwd=launching.ROOT, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
  assert done.returncode == 1, done.stdout + done.stderr
  with open(tmp_path / 'cells.csv') as f:
    row_one, row_two = csv.DictReader(f)
  assert (
    row_one['state'] == 'finished' and float(row_one['images_per_second']) > 0
  )
  assert 'norm_group=4: a device computes 10 images' in row_two['error']
