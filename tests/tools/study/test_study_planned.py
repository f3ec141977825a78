"""The study's flag --plan: what is predicted for each run."""

import json

import numpy as np
import pytest

from anp_jax.tools.study import (
  __main__ as study_main,
  emulate,
  grid,
  planned,
  study_results,
  study_runner,
  study_table,
)
from tests import builders

_CONFIG = 'configs/lenet.py'


@pytest.mark.parametrize(
  'flags, line',
  [
    (['--plan=1gb'], "--plan='1gb': expected a bandwidth such as 1gbit"),
    (
      ['--plan', '--nodes=1,2'],
      "--plan: expected the bandwidth of the nodes' links, such as --plan=1gbit",
    ),
    (
      ['--plan=1gbit', '--emulate=bandwidth=100mbit'],
      '--plan=1gbit: --emulate sets bandwidth=100mbit; expected one of them',
    ),
    (
      ['--plan=1gbit', '--slurm'],
      '--plan with --slurm: expected --emulate with it; steps are timed on '
      'this machine, not on those of the jobs',
    ),
    (
      ['--emulate=sleep=False,step_seconds=1'],
      'config.emulate.step_seconds=1.0: expected 0.1 where emulate.sleep is False',
    ),
  ],
)
def test_bad_input_gets_one_line(tmp_path, capsys, flags, line):
  arguments = ['strategies', f'--config={_CONFIG}', f'--workdir={tmp_path}']
  assert study_main.main([*arguments, '--strategies=sync', *flags]) == 2
  assert builders.error_line(capsys) == f'error: {line}'


def _study(emulation, sleeps=True, **typed):
  typed = {k.replace('__', '.'): v for k, v in typed.items()}
  typed = {'data.synthetic_classes': '10', 'batch_size': '64'} | typed
  overrides = emulate.overrides(emulation, typed)
  return study_runner.Study(_CONFIG, overrides, 'folder', True, sleeps)


def test_a_sleep_and_its_slow_node_are_planned():
  study = _study('step_seconds=2,image_seconds=0.01,slow=3:1.5,megabytes=1')
  cells = grid.expand(('sync', 'local_sgd', 'parameter_server'), (2, 4), (1,), (0,))
  rates = planned.rates(study, cells, '')
  seconds = {2: 2 + 32 * 0.01, 4: 1.5 * (2 + 16 * 0.01)}
  for cell in cells[:2] + cells[3:5]:
    assert rates[cell] == pytest.approx(64 / seconds[cell.nodes], rel=1e-3)
  # A worker computes a batch of its own; node 3 is there in the second case.
  cycle = 2 + 64 * 0.01
  assert rates[cells[2]] == pytest.approx(2 * 64 / cycle, rel=1e-3)
  assert rates[cells[5]] == pytest.approx((3 + 1 / 1.5) * 64 / cycle, rel=1e-3)


def test_the_links_bandwidth_is_that_of_the_emulation():
  study = _study('step_seconds=1,megabytes=10,bandwidth=100mbit,pieces=1')
  cells = grid.expand(('sync',), (2,), (1,), (0,))
  # Two devices send 10 MB each at 12.5 MB/s when the pass is over.
  rate = planned.rates(study, cells, '')[cells[0]]
  assert rate == pytest.approx(64 / (1 + 10 / 12.5), rel=1e-3)


def test_as_many_cores_are_timed_at_once_as_a_run_uses(monkeypatch):
  calls = []

  def measured(study, batches, cores, serves):
    assert serves
    calls.append((batches, cores))
    slower = 1 + 0.5 * (len(cores) - 1)  # by the others' use of the memory
    return {'fixed': 0.5 * slower, 'per_image': 0.25 * slower, 'jitter': 0.0}

  monkeypatch.setattr(planned, '_measured', measured)
  monkeypatch.setattr(planned.os, 'sched_getaffinity', lambda _: {3, 5})
  study = _study('sleep=False,bandwidth=100mbit', sleeps=False)
  cells = grid.expand(('sync', 'parameter_server'), (1, 4), (1,), (0,))
  rates = planned.rates(study, cells, '')
  assert calls == [((16, 64), [3]), ((16, 64), [3, 5])]
  assert rates[cells[0]] == pytest.approx(64 / (0.5 + 64 * 0.25), rel=1e-3)
  # Four devices share two cores, and sum LeNet's 0.43 M numbers.
  megabytes = 1.5 * 4 * 431080 / 1e6
  seconds = 2 * 1.5 * (0.5 + 16 * 0.25) + megabytes / 12.5
  assert rates[cells[2]] == pytest.approx(64 / seconds, rel=1e-3)
  # Four workers, and the two of a core take turns to compute.
  seconds = 2 * 1.5 * (0.5 + 64 * 0.25)
  assert rates[cells[3]] == pytest.approx(4 * 64 / seconds, rel=1e-3)


def test_what_gradients_cost_a_server_is_planned(monkeypatch):
  def measured(study, batches, cores, serves):
    return {'fixed': 0.5, 'per_image': 0.25, 'jitter': 0.0, 'at_worker': 1.0, 'at_server': 2.0}

  monkeypatch.setattr(planned, '_measured', measured)
  study = _study('sleep=False', sleeps=False)
  (cell,) = grid.expand(('parameter_server',), (1,), (1,), (0,))
  rate = planned.rates(study, [cell], '1gbit')[cell]
  assert rate == pytest.approx(64 / (0.5 + 64 * 0.25 + 3), rel=1e-6)


def test_between_two_batches_the_line_goes_through_both(monkeypatch):
  """The middle one of three processes counts; larger batches are slower."""
  started = []

  class Process:
    returncode = 0

    def __init__(self, command, **_):
      self._number = len(started)
      started.append(command)

    def communicate(self):
      # A device alone would be given a = 0, and c of the larger batch.
      measured = {
        'fixed': 0.0,
        'per_image': 0.04,
        'jitter': 0.1 * self._number,
        'batches': [[16, 0.2 + 0.1 * self._number], [64, 2.56]],
      }
      return json.dumps({'measured': measured}), ''

  monkeypatch.setattr(planned.subprocess, 'Popen', Process)
  study = _study('sleep=False', sleeps=False)
  line = planned._measured(study, (16, 64), [0, 1, 2], False)
  assert line['fixed'] + 16 * line['per_image'] == pytest.approx(0.3)
  assert line['fixed'] + 64 * line['per_image'] == pytest.approx(2.56)
  assert line['jitter'] == pytest.approx(0.1)
  assert all('--strategies=sync' in command for command in started)


def _run(rate, plan):
  values = np.array([1.0])
  return study_results.Run(rate, values, values, values, values, planned=plan)


def test_the_table_and_the_json_have_the_errors():
  cells = grid.expand(('sync',), (1, 2), (1,), (0, 1))
  runs = dict(zip(cells, (_run(10, 11), _run(20, 19), _run(10, 9))))
  head, *rows = study_table.rows(study_results.points(cells, runs, {}), None, True)
  place = head.index('planned')
  assert head[place + 1] == 'error'
  # Seed by seed: +10 and -10 % on one node, -5 % on two.
  assert rows[0][place : place + 2] == ('10 ± 1', '+0.0 ± +14.1 %')
  assert rows[1][place : place + 2] == ('19', '-5.0 %')
  summary = planned.summary(runs)
  assert summary['worst_error'] == 0.1
  assert summary['mean_error'] == pytest.approx(0.25 / 3, abs=1e-4)
  assert [r['error'] for r in summary['rows']] == [0.1, -0.05, -0.1]
  json.dumps(summary)
  assert (
    'planned'
    not in study_table.rows(study_results.points(cells[:1], {cells[0]: _run(10, None)}, {}), None)[
      0
    ]
  )
