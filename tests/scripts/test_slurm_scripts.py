"""What the scripts of scripts/slurm decide, without a cluster."""

import os
import re
import subprocess

import pytest

from tests import builders, launching

_TRAIN = 'scripts/slurm/train.sbatch'
# Slurm's programs, which note how they were called.
_PROGRAMS = {
  'squeue': 'echo RUNNING',
  'scontrol': ':',
  'scancel': ':',
  'sleep': ':',
  'srun': """
while [[ ${1:-} == -* ]]; do shift; done
"$@"
""",
  # What trains: nothing at all.
  'python': ':',
}
_JOB = {
  'SLURM_JOB_ID': '19',
  'SLURM_JOB_NODELIST': 'node[1-2]',
  'SLURM_SUBMIT_DIR': str(launching.ROOT),
}
_TASK_2 = {**_JOB, 'SLURM_ARRAY_JOB_ID': '19', 'SLURM_ARRAY_TASK_ID': '2'}


class Job:
  """A script's runs with stand-ins for Slurm's programs."""

  def __init__(self, folder):
    self.workdir = folder / 'run'
    self._folder = folder / 'programs'
    self._folder.mkdir()
    for name, text in _PROGRAMS.items():
      self.program(name, text)

  def program(self, name, text):
    text = f'echo "$@" >>"$NOTES/{name}.calls"\n{text}'
    builders.write_program(self._folder / name, text)

  def start(self, environment, *arguments, script=_TRAIN):
    """Runs it to its end; the status and all that it said."""
    environment_left = {k: v for k, v in os.environ.items() if not k.startswith('SLURM')}
    done = subprocess.run(
      ['bash', script, f'--workdir={self.workdir}', *arguments],
      cwd=launching.ROOT,
      env={
        **environment_left,
        'PATH': f'{self._folder}:{environment_left["PATH"]}',
        'NOTES': str(self._folder),
        'WORKDIR': str(self.workdir),
        'PYTHON': str(self._folder / 'python'),
        **environment,
      },
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
      timeout=60,
    )
    return done.returncode, done.stdout

  def calls(self, name):
    path = self._folder / f'{name}.calls'
    return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def job(tmp_path):
  return Job(tmp_path)


@pytest.mark.parametrize(
  'environment, program', [({}, 'main.py'), ({'PROGRAM': '-m a.b main.py'}, '-m a.b main.py')]
)
def test_another_program_gets_the_arguments(job, environment, program):
  status, text = job.start({**_JOB, **environment}, '--config=x y')
  assert status == 0, text
  assert job.calls('python') == [f'{program} --workdir={job.workdir} --config=x y']


# What a process does that was asked to stop.
_STOPS = 'echo "{\\"step\\": 5}" >"$WORKDIR/stopped.json"'


@pytest.mark.parametrize('environment, name', [(_JOB, '19'), (_TASK_2, '19_2')])
def test_a_task_of_an_array_speaks_for_itself_only(job, environment, name):
  """19 is the whole array to Slurm, also where it is the number of a task."""
  # As Slurm does before the time limit: the script is srun's parent.
  job.program('srun', f'kill -USR1 $PPID; command -p sleep 0.5; {_STOPS}')
  status, text = job.start(environment)
  assert status == 0 and 'USR1: asking all tasks' in text
  assert job.calls('scancel') == [f'--signal=USR1 {name}']
  assert job.calls('scontrol') == [f'requeue {name}']
  assert all(f' {name} ' in f'{call} ' for call in job.calls('squeue'))


# A task that is still starting ends by the signal, as it has no handler.
_ENDS_BY_SIGNAL = """
[ "$SCRIPT" = none ] || kill -USR1 $PPID
command -p sleep 0.5
touch "$WORKDIR/logs/19-0.log"
{line}
exit {status}
"""


@pytest.mark.parametrize(
  'line, status',
  [
    ('', 138),
    # Of several tasks srun ends some, or they see that one has gone.
    ('node2: task 1: User defined signal 1', 143),
    ('node[1-2]: tasks 0-3: User defined signal 1 (core dumped)', 137),
    ('node2: task 1: Exited with exit code 138', 75),  # of restart_on_failure.sh
  ],
)
def test_the_time_limit_of_tasks_that_are_starting(job, line, status):
  echo = line and f'echo "srun: error: {line}" >&2'
  job.program('srun', _ENDS_BY_SIGNAL.format(line=echo, status=status))
  ended, text = job.start({**_JOB, 'SCRIPT': ''})
  assert ended == status
  assert job.calls('scontrol') == ['requeue 19']
  assert 'USR1 came before a task could save at step 0: starting job 19 again\n' in text
  assert 'was lost' not in text


@pytest.mark.parametrize('passed_on, line, status', [('none', '', 138), ('', 'Killed', 137)])
def test_what_else_ends_a_task_is_a_loss(job, passed_on, line, status):
  """A signal that nobody passed on, and a loss after one."""
  line = line and f'echo "srun: error: node2: task 1: {line}" >&2'
  job.program('srun', _ENDS_BY_SIGNAL.format(line=line, status=status))
  ended, text = job.start({**_JOB, 'SCRIPT': passed_on})
  assert ended == status and 'could save' not in text
  assert ('USR1' in text) == (not passed_on)
  assert f'too many tasks were lost (status {status})' in text


def test_the_time_limit_before_there_are_tasks(job):
  """While the script prepares what the tasks need."""
  job.program('mkdir', 'kill -USR1 $PPID; command -p mkdir "$@"')
  status, text = job.start(_JOB)
  assert status == 0, text
  assert 'USR1 came before there were tasks at step 0: starting job 19' in text
  assert job.calls('scontrol') == ['requeue 19'] and not job.calls('python')


# srun's own words and status where a task on node2 ends first, for the reason
# given, and srun ends the other.
_FIRST = """
touch "$WORKDIR/logs/19-0.log"
echo 'error: no such key' >"$WORKDIR/logs/19-1.log"
echo 'srun: error: node2: task 1: {reason}' >&2
echo 'srun: launch/slurm: _step_signal: Terminating StepId=19.0' >&2
echo 'srun: error: node1: task 0: {other}' >&2
exit {status}
"""


@pytest.mark.parametrize(
  'reason, other, srun, status, requeued',
  [
    # Bad input on one rank: the other waited for it.
    ('Exited with exit code 2', 'Terminated', 143, 2, False),
    ('Exited with exit code 1', 'Killed', 137, 1, False),
    ('Exited with exit code 2', 'Exited with exit code 75', 75, 2, False),
    ('Exited with exit code 75', 'Terminated', 143, 143, True),
  ],
)
def test_a_task_that_failed_decides_or_the_first_that_was_lost(
  job, reason, other, srun, status, requeued
):
  job.program('srun', _FIRST.format(reason=reason, other=other, status=srun))
  matches, text = job.start(_JOB)
  assert matches == status
  assert bool(job.calls('scontrol')) == requeued
  assert f'srun: error: node2: task 1: {reason}' in text
  assert 'error: no such key' in text  # of its log
  files = {'19-0.log', '19-1.log'} | ({'19-restarts'} if requeued else set())
  assert set(os.listdir(job.workdir / 'logs')) == files


def test_a_failure_after_a_loss_is_one(job):
  """The run went on without the task that was lost."""
  other = 'Exited with exit code 1'
  job.program('srun', _FIRST.format(reason='Killed', other=other, status=137))
  status, text = job.start(_JOB)
  assert status == 1 and 'starting again would not help' in text and not job.calls('scontrol')


def test_a_step_that_cannot_be_created(job):
  """The program has not run: status 1 is srun's, and the job starts again."""
  job.program(
    'srun',
    'echo "srun: error: Unable to create step for job 19: More processors'
    ' requested than permitted" >&2; exit 1',
  )
  for starts in (1, 2, 3):
    status, text = job.start(_JOB)
    assert status == 1 and 'would not help' not in text
    assert 'srun: error: Unable to create step' in text
    assert job.calls('scontrol') == ['requeue 19'] * starts
  status, text = job.start(_JOB)
  assert status == 1 and 'three starts came no further than step 0' in text
  assert len(job.calls('scontrol')) == 3
  # Another error of srun's is no reason to start again.
  job.program('srun', 'echo "srun: error: no such partition" >&2; exit 1')
  status, text = job.start(_JOB)
  assert status == 1 and len(job.calls('scontrol')) == 3
  assert 'srun: error: no such partition\n' in text


def test_the_end_of_a_log_is_of_this_start(job):
  job.program('python', 'echo "$LINE" | tee -a "$WORKDIR/logs/19-0.log"')
  lines = {}
  for start, line in enumerate(['a', '', 'c'], 1):
    if not line:  # nothing runs that could write one
      job.program('srun', 'exit 1')
    count = {'SLURM_RESTART_COUNT': str(start - 1), 'LINE': line}
    _, lines[start] = job.start({**_JOB, **count})
    job.program('srun', _PROGRAMS['srun'])
  assert 'the end of task 0 in start 1:\na\n' in lines[1]
  assert 'task 0 wrote nothing in start 2\n' in lines[2]
  assert 'the end of task 0 in start 3:\nc\n' in lines[3]
  assert (job.workdir / 'logs/19-0.log').read_text() == 'a\nc\n'


@pytest.mark.parametrize('nodes, tasks', [(2, 1), (6, 2)])
def test_a_job_of_another_size_than_it_was_submitted_with(job, nodes, tasks):
  """Slurm keeps SLURM_NTASKS, here of four nodes, and updates the nodes."""
  resized = {
    **_JOB,
    'SLURM_JOB_NUM_NODES': str(nodes),
    'SLURM_NTASKS_PER_NODE': str(tasks),
    'SLURM_NTASKS': str(4 * tasks),
  }
  assert job.start(resized)[0] == 0
  options = f' --nodes={nodes} --ntasks={nodes * tasks} --ntasks-per-node={tasks} '
  assert options in job.calls('srun')[-1]


def test_the_marker_of_a_stop_is_a_reason_once(job):
  """Once for each start that writes it, be it the same: not for --mode=evaluate after it."""
  job.program('python', f'rm -f "$WORKDIR/stopped.json"; {_STOPS}')
  for starts in (1, 2):
    assert job.start(_JOB)[0] == 0
    assert len(job.calls('scontrol')) == starts
  job.program('python', ':')
  status, text = job.start(_JOB, '--mode=evaluate')
  assert status == 0 and 'again' not in text
  assert len(job.calls('scontrol')) == 2 and len(job.calls('python')) == 3


# A save, and then a loss.
_SAVES = 'mkdir -p "$WORKDIR/$SAVED"; kill -KILL $$'


@pytest.mark.parametrize('folder', ['', 'models/{}/'])
def test_starts_that_come_no_further(job, folder):
  """A ring keeps its checkpoints by models, which advance in turn."""
  job.program('python', _SAVES)
  saved = [f'{folder.format(i % 2)}checkpoints/{90 + 10 * i}' for i in range(4)]
  for number, path in enumerate([*saved, saved[-1], saved[-1]]):
    status, text = job.start({**_JOB, 'SAVED': path})
    assert status == 137 and 'giving up' not in text
    assert len(job.calls('scontrol')) == number + 1
  status, text = job.start({**_JOB, 'SAVED': saved[-1]})
  # The newest of each: 120, or 110 + 120.
  step = 230 if folder else 120
  assert status == 137
  assert f'three starts came no further than step {step}: giving up' in text
  assert len(job.calls('scontrol')) == 6


# Each node runs it; node2 has no such folder.
_TWO_NODES = """
while [[ ${1:-} == -* ]]; do shift; done
SLURMD_NODENAME=node1 "$@"
SLURMD_NODENAME=node2 "${@//$WORKDIR/$WORKDIR-of-node2}"
"""


@pytest.mark.parametrize('visible', [True, False])
def test_a_workdir_that_a_node_does_not_see(job, visible):
  """srun could not open the logs of its tasks there, and would wait."""
  greeting = 'echo Welcome to node1'  # of a site's prolog
  job.program('srun', greeting + (_PROGRAMS['srun'] if visible else _TWO_NODES))
  two = {**_JOB, 'SLURM_JOB_NUM_NODES': '2'}
  status, text = job.start(two)
  assert status == (0 if visible else 2)
  assert bool(job.calls('python')) == visible
  line = (
    f'error: --workdir={job.workdir}: node2 does not see it; it must be a '
    'folder that all nodes share\n'
  )
  assert (line in text) != visible
  assert not job.calls('scontrol')
  if visible:  # a job of one node is not asked
    before = len(job.calls('srun'))
    assert job.start({**_JOB, 'SLURM_JOB_NUM_NODES': '1'})[0] == 0
    assert len(job.calls('srun')) == before + 1


def test_a_task_is_bound_to_the_cores_that_it_asked_for(job):
  job.start({**_JOB, 'SLURM_CPUS_PER_TASK': '16'})
  job.start(_JOB)
  chosen, unasked = job.calls('srun')
  assert ' --cpu-bind=cores --cpus-per-task=16 ' in chosen
  # Of many cores, --cpu-bind=cores would give it one.
  assert ' --cpu-bind=none ' in unasked and '--cpus-per-task' not in unasked


@pytest.mark.parametrize('environment', [{}, {'SLURM_JOB_END_TIME': '99'}])
def test_tasks_know_when_the_job_ends(job, environment):
  """From squeue where Slurm itself does not tell, as 22.05."""
  job.program('squeue', 'echo 2026-01-02T03:04:05')
  job.program('python', 'echo "it ends at $SLURM_JOB_END_TIME"')
  status, text = job.start({**_JOB, 'TZ': 'UTC', **environment})
  assert status == 0, text
  end = environment.get('SLURM_JOB_END_TIME', '1767323045')
  assert f'it ends at {end}\n' in text


def test_a_job_outlives_a_node(job):
  options = re.findall('^#SBATCH (.*)$', (launching.ROOT / _TRAIN).read_text(), re.M)
  job.start(_JOB)
  assert '--no-kill' in options
  assert '--no-kill --kill-on-bad-exit=0 ' in job.calls('srun')[0]


# Slurm takes a node out of the job, and the run goes on until another job is submitted.
_LOSES_A_NODE = """
echo "$MEMBERS" >"$WORKDIR/members.json"
echo 'srun: error: Node failure on node2' >&2
until [ -s "$NOTES/sbatch.calls" ] || [ "$SECONDS" -ge "$LASTS" ]; do command -p sleep 0.1; done
command -p sleep 2
"""
_OPTIONS = (
  '--partition=long --account=(null) --qos=fast --time=1-00:00:00 --constraint=(null) '
  '--reservation=(null) --gres=gres:gpu:4 --exclusive=NO'
)


@pytest.fixture
def losing(job):
  """The environment of a job that loses a node, a task of an array."""
  job.program('srun', _LOSES_A_NODE)
  job.program('squeue', f"echo '{_OPTIONS}'")
  job.program('sbatch', 'echo "23;cluster"; [ -z "${SLURM_ARRAY_TASK_ID:-}" ]')
  options = {'SLURM_CPUS_PER_TASK': '8', 'SLURM_MEM_PER_NODE': '900'}
  members = '{"0": ["node1", 5], "coordinator": "node1:5"}'
  return {**_TASK_2, **options, 'MEMBERS': members, 'LASTS': '9'}


def test_a_job_joins_the_run_for_a_node_that_is_lost(job, losing):
  status, text = job.start(losing, '--config=x y')
  assert status == 0 and 'node2 is lost: job 23 joins the run when it gets a node\n' in text
  assert job.calls('sbatch') == [
    f'--parsable --job-name=replace-19_2 --nodes=1 --output={job.workdir}/logs/%j-join.log '
    '--partition=long --qos=fast --time=1-00:00:00 --gres=gpu:4 --exclusive --cpus-per-task=8 '
    f'--mem=900 {_TRAIN} --join --workdir={job.workdir} --config=x y'
  ]
  assert job.calls('scancel') == ['--state=PENDING --name=replace-19_2']


def test_a_job_that_may_submit_none_goes_on(job, losing):
  job.program('sbatch', 'echo "sbatch: error: Access denied" >&2; exit 1')
  status, text = job.start(losing)
  assert status == 0 and len(job.calls('sbatch')) == 1
  line = 'node2 is lost, and no job that replaces it can be submitted\n'
  assert f'sbatch: error: Access denied\n{line}' in text


@pytest.mark.parametrize('environment', [{'REPLACE': 'no'}, {'MEMBERS': '{"coordinator": "a:5"}'}])
def test_a_node_is_not_replaced_where_nobody_may_join(job, losing, environment):
  assert job.start({**losing, 'LASTS': '1', **environment})[0] == 0
  assert not job.calls('sbatch')


def test_a_job_that_replaces_a_node_stops_with_the_other_job(job):
  """Job 19 waits to start again, where the script has asked twice."""
  job.program('srun', 'until [ -s "$NOTES/scancel.calls" ]; do command -p sleep 0.1; done')
  job.program('squeue', '[ "$(wc -l <"$NOTES/squeue.calls")" -gt 2 ] || echo 19; echo 23')
  replacing = {**_JOB, 'SLURM_JOB_ID': '23', 'SLURM_JOB_NAME': 'replace-19'}
  status, text = job.start(replacing, '--join')
  assert status == 0 and 'job 19 does not run: asking all tasks to save and stop\n' in text
  assert job.calls('scancel')[0] == '--signal=USR1 23' and len(job.calls('squeue')) > 2


# A process that is killed, and joins the run, which may refuse it.
_LOST = '[[ $* == *--join ]] || kill -KILL $$; exit {}'


@pytest.mark.parametrize('joined, status', [(0, 0), (2, 137)])
def test_a_lost_process_comes_back(job, joined, status):
  job.program('python', _LOST.format(joined))
  ended, text = job.start(_JOB, '--config=x')
  first, second = job.calls('python')
  assert (second, ended) == (f'{first} --join', status), text
  assert bool(job.calls('scontrol')) == bool(status)  # requeued


# What process 0 writes at the end of a run.
_ENDS = 'echo "{\\"ended\\": \\"19.0\\"}" >"$WORKDIR/members.json"'


def test_a_run_that_ends_without_a_task_has_ended_well(job):
  """One of two is lost for good, which is srun's status too."""
  job.program(
    'srun',
    """
    echo 'srun: error: node2: task 1: Killed' >&2
    while [[ ${1:-} == -* ]]; do shift; done
    "$@"
    exit 137
    """,
  )
  job.program('python', _ENDS)
  assert job.start(_JOB)[0] == 0
  job.program('python', ':')  # it has left the run to the others, which an earlier end is not
  status, text = job.start(_JOB)
  assert status == 137 and 'too many tasks were lost' in text


def test_a_failed_task_is_one_also_where_the_run_has_ended(job):
  job.program('python', f'{_ENDS}; exit 1')
  assert job.start(_JOB)[0] == 1 and not job.calls('scontrol')


def test_a_job_that_joins_a_run_is_not_started_again(job):
  job.program('python', f'{_STOPS}; echo "end: ${{SLURM_JOB_END_TIME:-unknown}}"')
  builders.write_tree(job.workdir, {'members.json': '{}'})
  status, text = job.start({**_JOB, 'SLURM_JOB_END_TIME': '99'}, '--join')
  assert status == 0 and 'end: unknown' in text  # its time is not the run's
  assert not job.calls('scontrol') and (job.workdir / 'members.json').exists()
  # As Slurm does before the time limit.
  job.program('srun', 'kill -USR1 $PPID; command -p sleep 0.5')
  job.start(_JOB, '--join')
  assert job.calls('scancel') == ['--signal=TERM 19']
  job.start(_JOB)
  assert not (job.workdir / 'members.json').exists()


def test_others_do_not_wait_for_a_task_that_failed(job):
  job.program(
    'srun',
    """
    echo 'srun: error: node2: task 1: Exited with exit code 2' >&2
    exec tail -f /dev/null
    """,
  )
  assert job.start(_JOB)[0] == 2


def test_a_run_that_has_begun_goes_on_without_a_task_that_failed(job):
  job.program(
    'srun',
    """
    touch "$WORKDIR/in_use.json"
    echo 'srun: error: node2: task 1: Exited with exit code 2' >&2
    command -p sleep 2
    echo 'the others have gone on'
    exit 2
    """,
  )
  status, text = job.start(_JOB)
  assert status == 2 and 'the others have gone on' in text


def test_in_a_container(job, tmp_path):
  """With the lines that are there for it, as they stand in the script."""
  text = (launching.ROOT / _TRAIN).read_text()
  text, matches = re.subn('^#(container=|PYTHON=)', r'\1', text, flags=re.M)
  assert matches == 2
  script = tmp_path / 'train.sbatch'
  script.write_text(text)
  job.program('apptainer', ':')
  job.program('make', 'exit 1')
  status, text = job.start(_JOB, '--mode=train', script=script)
  assert status == 0, text
  python = '/opt/anp_jax/.venv/bin/python'
  image = (launching.ROOT / 'scripts/anp_jax.def').read_text()
  assert f'exec {python} ' in image
  assert job.calls('apptainer') == [
    f'exec --nv --bind /shared anp_jax.sif {python} main.py --workdir={job.workdir} --mode=train'
  ]
  assert not job.calls('python')


def test_logs_need_a_folder(job):
  status, text = job.start(_JOB, '--workdir=gs://bucket/run')
  assert status == 2 and not job.calls('srun')
  assert '--workdir=gs://bucket/run: expected a folder' in text
