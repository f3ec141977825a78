"""Tests of study: cells that are members of one ensemble."""

import sys

import pytest

from anp_jax.reporting import telemetry
from anp_jax.tools.study import grid, local, study_runner, together

_LENET = 'configs/lenet.py'


def _study(folder='folder', **overrides):
  keys = {'duration': '4 steps', 'eval.every': '4 steps', 'log.tensorboard': 'False'}
  return study_runner.Study(_LENET, keys | overrides, str(folder), simulated=True)


def _cell(seed, strategy='sync', **fields):
  return grid.Cell(strategy, fields.pop('nodes', 2), 1, seed, simulated=True, **fields)


def test_cells_that_differ_in_numbers_share_processes():
  """Each program's cells are dealt to the processes; all others are alone."""
  sync = [_cell(seed) for seed in range(4)]
  tuned = [_cell(0, tuned=((grid.RATE, rate),)) for rate in ('0.01', '0.02')]
  more_workers, servers = _cell(0, nodes=4), [_cell(seed, 'parameter_server') for seed in range(4)]
  timed = [grid.Cell('sync', 1, 1, seed) for seed in range(2)]
  # Real servers, whose run is no loop of one program.
  real = [grid.Cell('parameter_server', 1, 1, seed, duration='2 steps') for seed in range(3)]
  cells = [*sync, *tuned, more_workers, *servers, *timed, *real]
  assert together.groups(_study(), cells, 2) == [
    (sync[0], sync[2], tuned[0]),
    (sync[1], sync[3], tuned[1]),
    (more_workers,),
    (servers[0], servers[2]),
    (servers[1], servers[3]),
    *((cell,) for cell in timed + real),
  ]


@pytest.mark.parametrize(
  'overrides, processes',
  [({'data.augment': 'crop'}, 2), ({'batch_size': '3'}, 2), ({'data.augment': 'strong_pad'}, 1)],
)
def test_what_no_ensemble_takes_is_alone(overrides, processes):
  """Images that are cut out of others; and a config that its own command refuses."""
  cells = [_cell(seed) for seed in range(2)]
  assert len(together.groups(_study(**overrides), cells, 1)) == processes


_FIRST_ONLY = """\
import json, os, sys
_, request = json.load(sys.stdin)
first, *_ = request
os.makedirs(first, exist_ok=True)
with open(os.path.join(first, 'metrics.jsonl'), 'w') as f:
  f.write(json.dumps({'kind': 'result', 'step': 4}))
sys.exit(1)
"""


def test_what_a_group_leaves_runs_alone(tmp_path, monkeypatch):
  """Its process ends with an error after the first cell."""
  monkeypatch.setattr(together, '_COMMAND', [sys.executable, '-c', _FIRST_ONLY])
  launched = []

  def command(study, cell, cores):
    launched.append(cell)
    return [sys.executable, '-c', '']

  monkeypatch.setattr(local, '_command', command)
  monkeypatch.setattr(local, '_POLL', 0.01)
  monkeypatch.setattr(local, '_shares', lambda *_: [[0]])
  cells, ends = [_cell(seed) for seed in range(3)], {}
  local.run(_study(tmp_path), cells, lambda c: None, ends.__setitem__)
  assert launched == cells[1:]
  assert ends == dict.fromkeys(cells, '')


@pytest.mark.slow
def test_a_group_trains_the_runs_of_its_cells(tmp_path):
  """Their metrics are those of the commands that would run them alone."""
  cells = [_cell(seed) for seed in range(2)]
  for name in ('group', 'alone'):
    ends = {}
    study = _study(tmp_path / name)
    groups = [cells] if name == 'group' else [[cell] for cell in cells]
    for group in groups:
      local.run(study, group, lambda c: None, ends.__setitem__)
    assert ends == dict.fromkeys(cells, '')
  for cell in cells:
    group, alone = (
      [
        (line['step'], line['loss'], line['simulated_seconds'])
        for line in telemetry.read(str(tmp_path / name / 'runs' / cell.name))
      ]
      for name in ('group', 'alone')
    )
    assert group == alone != []
