"""scripts/slurm as it stands, on a real cluster: killed, requeued, the same."""

import json
import os
import random
import re
import subprocess
import sys
import time

import pytest

from anp_jax.config import command_line
from anp_jax.reporting import telemetry
from anp_jax.runtimes.parameter_server import log as log_lib
from tests import builders, launching, model_rings, serving, slurm_cluster

# The references in this process are compiled as the jobs' tasks are.
pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1200)]

_TRAIN = 'scripts/slurm/train.sbatch'
_STEPS = 300
_KEYS = {
  'cluster.elastic': 'off',  # a lost task ends the run, which continues from its checkpoint
  'duration': f'{_STEPS} steps',
  'log.every': '1 steps',
  'eval.every': '100 steps',
  'checkpoint.every': '50 steps',
}
_LONG = {
  **_KEYS,
  'duration': '1000000 steps',
  'log.every': '100 steps',
  'eval.every': '1000000 steps',
}
# Steps of some 25 ms: a signal or a fault that waits for one comes before the last.
_SLOWED = {**slurm_cluster.PHASED, 'ANP_PAUSE': '0.02'}
# `make soak` asks for more.
_RUNS = int(os.environ.get('ANP_SOAK_RUNS', '1'))


@pytest.fixture(scope='module')
def cluster():
  with slurm_cluster.open_cluster() as slurm:
    yield slurm


@pytest.fixture(autouse=True)
def no_job_is_left(cluster):
  yield
  cluster.cancel_all()


@pytest.fixture(scope='module')
def undisturbed(cluster, tmp_path_factory):
  """The workdir of a run that nothing happened to."""
  folder = tmp_path_factory.mktemp('undisturbed')
  cluster.wait(_submit(cluster, folder))
  return folder / 'run'


def _submit(cluster, folder, options=(), keys=_KEYS, **environment):
  return cluster.submit(
    _TRAIN,
    ['--nodes=2', *options],
    launching.arguments(folder / 'run', **keys),
    folder / 'job.log',
    **environment,
  )


def _same_run(workdir, expected):
  """Every leaf of the last state, and every number written on the way."""
  want = launching.weights(expected)
  assert f'{_STEPS}/params/conv1/kernel' in want
  serving.same_bits(launching.weights(workdir), want)
  lines = [
    [(r['kind'], r['step'], r['loss']) for r in telemetry.read(str(folder))]
    for folder in (workdir, expected)
  ]
  assert lines[0] == lines[1]


def _text(folder):
  return (folder / 'job.log').read_text()


def test_trains_over_two_nodes(undisturbed):
  workdir = undisturbed
  logs = sorted((workdir / 'logs').iterdir())
  assert len(logs) == 2
  assert 'devices  2 x cpu' in logs[0].read_text()


@pytest.mark.soak
@pytest.mark.parametrize('number', range(_RUNS))
def test_killed_at_a_random_moment(cluster, tmp_path, undisturbed, number):
  """A third of them before the first step, by the clock."""
  chance = random.Random(number)
  early = chance.random() < 1 / 3
  step, seconds = chance.randrange(1, 200), chance.uniform(0, 6)
  job = _submit(cluster, tmp_path, **_SLOWED)
  slurm_cluster.until(tmp_path / 'job.log', 'start 1')
  if early:
    time.sleep(seconds)
  else:
    log = tmp_path / f'run/logs/{job}-0.log'
    slurm_cluster.until(log, rf'\b{step}/{_STEPS} ')
  cluster.signal(job, 'TERM')
  print(f'SIGTERM after {f"{seconds:.1f} s" if early else f"step {step}"}')
  cluster.wait(job)
  assert int(cluster.field(job, 'Restarts')) == 1, _text(tmp_path)
  _same_run(tmp_path / 'run', undisturbed)


@pytest.mark.parametrize(
  'kills',
  [
    ['0 compiling 1 TERM', '0 saving 2 KILL', '1 leaving 1 KILL'],
    builders.soak(['1 step 60 KILL', '1 evaluating 1 TERM']),
  ],
  ids=['joins', 'loop'],
)
def test_killed_in_each_phase(cluster, tmp_path, undisturbed, kills):
  log = tmp_path / 'kills'
  job = _submit(
    cluster, tmp_path, **slurm_cluster.PHASED, ANP_KILL=';'.join(kills), ANP_KILL_LOG=str(log)
  )
  cluster.wait(job, timeout=600)
  # What each process was doing when its signal came.
  hit = log.read_text().splitlines()
  assert hit == kills, _text(tmp_path)
  # Killed tasks come back in their job, which begins again where it is told to stop.
  assert int(cluster.field(job, 'Restarts')) == sum(k.endswith('TERM') for k in kills)
  _same_run(tmp_path / 'run', undisturbed)


def test_a_short_cut_of_the_network_is_survived_and_a_dead_node_replaced(
  cluster, tmp_path, undisturbed
):
  job = _submit(cluster, tmp_path, **_SLOWED)
  log = tmp_path / f'run/logs/{job}-0.log'
  slurm_cluster.until(log, r'\b20/')
  cluster.fault('net-cut', 'node2')
  time.sleep(5)
  cluster.fault('net-heal', 'node2')
  slurm_cluster.until(log, r'\b60/')
  assert cluster.field(job, 'Restarts') == '0'
  cluster.fault('node-kill', 'node2')
  try:
    slurm_cluster.until(log, r'rank 1 on node2 has', timeout=40)
  finally:
    cluster.fault('node-start', 'node2')
  cluster.wait(job, timeout=240)
  assert int(cluster.field(job, 'Restarts')) >= 1
  _same_run(tmp_path / 'run', undisturbed)


@pytest.mark.soak
def test_a_long_cut_of_the_network(cluster, tmp_path, undisturbed):
  job = _submit(cluster, tmp_path, **_SLOWED)
  logs = [tmp_path / f'run/logs/{job}-{i}.log' for i in (0, 1)]
  slurm_cluster.until(logs[0], r'\b40/')
  cluster.fault('net-cut', 'node2')
  try:
    slurm_cluster.until(logs[0], r'error: rank 1 on node2 has been silent for \d+ s', timeout=40)
    time.sleep(35)
  finally:
    cluster.fault('net-heal', 'node2')
  cluster.wait(job, timeout=600)
  _same_run(tmp_path / 'run', undisturbed)


def test_the_time_limit(cluster, tmp_path):
  """Slurm's own: saved before it, and started again."""
  # The script's own signal would stop it, up to a minute early; this does not.
  job = _submit(cluster, tmp_path, ['--time=1', '--signal=B:CONT@1'], _LONG)
  text = slurm_cluster.until(tmp_path / 'job.log', 'start 2', timeout=120)
  reason = re.search(r'stopped \((\{.*?\})\) at step (\d+)', text)
  assert json.loads(reason[1])['reason'] == 'the time limit'
  again = tmp_path / f'run/logs/{job}-0.log'
  slurm_cluster.until(again, f'continuing from step {reason[2]} of')


def test_signalled_and_preempted(cluster, tmp_path):
  """The script asks the tasks; and another job may push this one aside."""
  partitions = os.popen('sinfo -h -o %R').read().split()
  has_two = {'low', 'high'} <= set(partitions)  # one preempts the other
  job = _submit(cluster, tmp_path, ['-p', 'low', '--exclusive'] * has_two, _LONG)
  log = tmp_path / f'run/logs/{job}-0.log'
  slurm_cluster.until(log, r'\b100/')
  # What --signal=B:USR1@120 sends.
  os.spawnlp(os.P_WAIT, 'scancel', 'scancel', '--batch', '--signal=USR1', job)
  text = slurm_cluster.until(tmp_path / 'job.log', 'start 2', timeout=60)
  assert 'USR1: asking all tasks' in text and '"a signal"' in text
  slurm_cluster.until(log, r'(?s)continuing from step \d+ of.*images/s', timeout=60)
  if not has_two:
    pytest.skip('no partitions low and high, one preempting the other')
  stops = log.read_text().count('stopped at step')
  script = tmp_path / 'urgent.sh'
  script.write_text('#!/bin/sh\nsleep 5\n')
  urgent = ['-p', 'high', '--exclusive', '--nodes=2']
  cluster.submit(str(script), urgent, [], '/dev/null')
  text = slurm_cluster.until(log, r'(?s)(continuing from step \d+ of.*){2}', timeout=60)
  assert text.count('stopped at step') == stops + 1


@pytest.mark.soak
def test_a_cancelled_job_stays_so(cluster, tmp_path):
  job = _submit(cluster, tmp_path, (), _LONG)
  slurm_cluster.until(tmp_path / f'run/logs/{job}-0.log', r'\b100/')
  os.spawnlp(os.P_WAIT, 'scancel', 'scancel', job)
  time.sleep(12)
  assert cluster.field(job, 'JobState') == 'CANCELLED'


@pytest.mark.soak
def test_a_run_that_comes_no_further_is_given_up(cluster, tmp_path):
  """A rank that dies in its first step, every time."""
  job = _submit(cluster, tmp_path, ['--nodes=1'], PYTHON=str(tmp_path / 'python'))
  builders.write_program(tmp_path / 'python', 'kill -9 $$')
  cluster.wait(job, 'FAILED', timeout=120)
  assert 'three starts came no further than step 0' in _text(tmp_path)
  assert cluster.field(job, 'Restarts') == '3'


def test_bad_input_of_one_rank_is_not_started_again(cluster, tmp_path):
  """Rank 0 waits for rank 1, and srun ends it."""
  script = builders.write_program(
    tmp_path / 'python',
    f'[ $SLURM_PROCID = 0 ] || set -- "$@" --config.seeed=1\nexec {sys.executable} "$@"',
  )
  job = _submit(cluster, tmp_path, PYTHON=str(script))
  cluster.wait(job, 'FAILED')
  assert cluster.field(job, 'Restarts') == '0'
  assert cluster.field(job, 'ExitCode') == '2:0'
  assert "did you mean 'seed'" in _text(tmp_path)


def test_a_ring_is_stopped_and_goes_on(cluster, tmp_path):
  workdir, laps = tmp_path / 'run', 10
  arguments = [
    '--config=configs/model_ring_anp.py:tiny',
    f'--workdir={workdir}',
    '--config.model.name=tests.user_network:PlainNet',
    '--config.batch_size=4',
    '--config.model.norm_group=4',
    '--config.data.image_size=8',
    '--config.data.resize=8',
    f'--config.duration={laps} epochs',
    '--config.log.tensorboard=False',
  ]
  job = cluster.submit(_TRAIN, ['--nodes=2'], arguments, tmp_path / 'job.log')
  slurm_cluster.until(workdir / 'model_ring.jsonl', '"laps": 2,')
  cluster.signal(job, 'TERM')
  text = slurm_cluster.until(tmp_path / 'job.log', r'stopped \((\{.*?\})\) at')
  stop = json.loads(re.search(r'stopped \((\{.*?\})\) at', text)[1])
  assert stop['reason'] == 'a signal' and 0 < stop['step'] < stop['total']
  assert stop['total'] == 2 * laps * 64 // 4
  cluster.wait(job)
  assert cluster.field(job, 'Restarts') == '1', _text(tmp_path)
  logs = [(workdir / f'logs/{job}-{i}.log').read_text() for i in (0, 1)]
  assert '2 models, 2 stations' in logs[0]
  assert len({text.split(']')[0].split()[1] for text in logs}) == 2  # nodes
  overrides, _ = command_line.split_overrides(arguments)
  config = command_line.load('configs/model_ring_anp.py:tiny', overrides)
  model_rings.assert_same(workdir, config, (32, 32), range(2), laps)


@pytest.mark.soak
def test_a_workdir_of_one_node(cluster, tmp_path):
  (tmp_path / 'run').mkdir()
  cluster.fault('exec', 'node2', 'mount', '-t', 'tmpfs', 'none', str(tmp_path / 'run'))
  try:
    job = _submit(cluster, tmp_path)
    cluster.wait(job, 'FAILED', timeout=60)
  finally:
    cluster.fault('exec', 'node2', 'umount', str(tmp_path / 'run'))
  assert cluster.field(job, 'ExitCode') == '2:0'
  assert f'--workdir={tmp_path}/run: node2 does not see it' in _text(tmp_path)


def test_sweep(cluster, tmp_path):
  """The task that has the array's own number is told to stop; only it does."""
  sweep = tmp_path / 'sweep.txt'
  sweep.write_text(
    "--config.seed=1 --config.duration='300 steps'\n--config.seed=2 --config.duration='301 steps'\n"
  )
  keys = {'log.every': '1 steps', 'eval.every': '5000 steps', 'checkpoint.every': '5000 steps'}
  arguments = [a for a in launching.arguments('unused', **keys) if not a.startswith('--workdir')]
  array = cluster.submit(
    'scripts/slurm/sweep.sbatch',
    ['--array=1-2'],
    [str(sweep), str(tmp_path / 'runs'), *arguments],
    tmp_path / 'job-%a.log',
    **slurm_cluster.PHASED,
    ANP_PAUSE='0.05',  # so that none is over before it is told
  )
  for number in (1, 2):
    slurm_cluster.until(tmp_path / f'job-{number}.log', 'start 1')
    job_id = cluster.field(f'{array}_{number}', 'JobId')
    log = tmp_path / f'runs/{number}/logs/{job_id}-0.log'
    slurm_cluster.until(log, r'\b10/30')
    if job_id == array:
      stopped = number
  subprocess.run(['scancel', '--batch', '--signal=USR1', f'{array}_{stopped}'], timeout=60)
  for number, steps in ((1, 300), (2, 301)):
    text = slurm_cluster.until(tmp_path / f'job-{number}.log', 'index.html', timeout=120)
    assert text.count('USR1: asking') == (number == stopped), text
    assert text.count('start 2, on') == (number == stopped), text
    lines = telemetry.read(str(tmp_path / f'runs/{number}'))
    assert lines[-1]['step'] == steps


def test_parameter_servers_on_two_nodes_and_their_replay(cluster, tmp_path):
  arguments = launching.arguments(
    tmp_path / 'run',
    **{
      'strategy.name': 'parameter_server',
      'duration': '100 steps',
      'strategy.servers': '2',
      'eval.every': '100 steps',
      'checkpoint.every': '50 steps',
    },
  )
  job = cluster.submit(_TRAIN, ['--nodes=2'], arguments, tmp_path / 'job.log')
  cluster.wait(job)
  logs = tmp_path / 'run' / 'logs'
  text = (logs / f'{job}-0.log').read_text()
  assert 'async: 2 workers, 2 of them servers' in text, text
  records = log_lib.read(str(tmp_path / 'run'))
  tickets = [r['parts'][0]['ticket'][0] for r in records if 'order' in r]
  assert sorted(tickets) == list(range(100))
  assert '100 updates, the same bits' in launching.replayed(tmp_path / 'run')


def test_a_step_sends_little_more_than_it_must(cluster):
  srun = 'srun --nodes=2 --ntasks-per-node=1 --time=5'.split()
  bench = '-m scripts.bench.links --model=lenet --size=64 --batch=8'.split()
  done = launching.command(*srun, sys.executable, *bench, ANP_RUN_SECRET='5a' * 32)
  ratios = json.loads(done.stdout.splitlines()[-1])
  # Statistics, metrics and headers; less than the bound cannot be.
  assert 1 <= ratios['program_over_bound'] < 1.01
  assert 1 <= ratios['interface_over_bound'] < 1.1
