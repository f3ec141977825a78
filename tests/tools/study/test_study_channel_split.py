"""The study of split convolutions: arithmetic, figures, and all of it."""

import collections
import dataclasses
import json

import pytest

from anp_jax import cluster
from anp_jax.runtimes.calibration import costs as costs_lib, timing as timing_lib
from anp_jax.system import stopwatch
from anp_jax.tools.study import (
  __main__ as study_main,
  channel_split_page,
  channel_split_process,
  plots,
)
from tests import splitting


def _costs():
  """One second of rest; 16 features, 4 and 2 a second on the two devices."""
  return splitting.costs({'conv': splitting.layer(4, 2, features=16, output=800)})


def _run(costs, offload, *steps):
  names = ('name', 'plan', 'predicted', 'measured', 'speed_up')
  values = {
    'batch_size': 32,
    'offload': offload,
    'costs': json.loads(json.dumps(costs.to_json())),
    'steps': [dict(zip(names, step, strict=True)) for step in steps],
  }
  return channel_split_page.Run.from_json('net', 2, values)


def _write(folder, *runs):
  text = channel_split_page.write(str(folder), list(runs), ['--config=x'])
  return json.loads(text.splitlines()[-1])


def test_divisions_are_in_proportion():
  divisions = channel_split_process.divisions(_costs())
  assert divisions[channel_split_process.EQUAL] == {'conv': (8, 8)}
  assert divisions['first 3, others 1'] == {'conv': (12, 4)}
  assert divisions['last 2, others 1'] == {'conv': (5, 11)}
  # The plan: 2/3 and 1/3 of 16, in whole features; (10, 6) takes 3 s.
  assert divisions[channel_split_process.PLAN] == {'conv': (11, 5)}
  assert channel_split_process.BY_BATCH not in divisions


def test_divisions_by_channel_and_by_batch_are_compared(tmp_path):
  """Equal devices, and a map that takes as long to gather as to compute."""
  link = costs_lib.CollectiveCost((0.0, 1e-3), (0.0, 2e-3))
  layers = {'conv': splitting.layer(4, 4, features=16, output=4000)}
  rows = {'rows': 8, 'row_multiple': 2, 'fixed': (0, 0)}
  costs = splitting.costs(layers, link=link, **rows)
  divisions = channel_split_process.divisions(costs)
  assert divisions[channel_split_process.PLAN] == {'rows': (4, 4)}
  assert channel_split_process.BY_BATCH not in divisions  # it is the plan
  assert divisions[channel_split_process.BY_CHANNEL] == {}
  # A kernel that takes long to sum: by channel.
  layers = {'conv': splitting.layer(4, 4, features=16, kernel=4000)}
  costs = splitting.costs(layers, link=link, **rows)
  divisions = channel_split_process.divisions(costs)
  assert divisions[channel_split_process.PLAN] == {'conv': (8, 8)}
  assert divisions[channel_split_process.BY_BATCH] == {'rows': (4, 4)}
  assert channel_split_process.BY_CHANNEL not in divisions
  ratios = _write(
    tmp_path,
    _run(
      costs,
      False,
      ('plan', 'conv=8,8', 2.0, 2.0, 2.5),
      ('equal shares', 'conv=8,8', 2.0, 2.0, 2.5),
      (channel_split_process.BY_BATCH, 'rows=4,4', 2.5, 3.0, 5 / 3),
    ),
  )
  assert ratios['net_2x32']['over_batch'] == 1.5


@pytest.mark.slow
def test_each_division_has_a_state_of_its_own():
  """A kernel that is split otherwise is of another shape."""
  config = splitting.two_convolutions()
  spec = splitting.spec(config, splitting.mesh(1, 2))
  texts = {n: f'conv2={n},{16 - n}' for n in (8, 12)}
  steps = channel_split_process._compile(spec, texts, cluster.Processes(spec.config))
  for run in (steps[8], steps[12], steps[8]):
    run()


def test_steps_and_programs_are_timed_at_second_calls(monkeypatch):
  """Seconds are the number of the call; of two rounds the second one counts."""
  calls = collections.Counter()

  def timed(run):
    run()
    return calls[run]

  monkeypatch.setattr(stopwatch, 'timed', timed)
  step, program, collective = (
    lambda: calls.update([step]),
    lambda: calls.update([program]),
    lambda: calls.update([collective]),
  )
  timing = object.__new__(timing_lib.Timing)  # nothing is compiled
  timing._processes = processes = cluster.Processes(splitting.two_convolutions())
  timing._programs, timing._rounds = [[program]], []
  timing._collectives = [('gather', 8, collective)]
  timing._collective_rounds = []
  seconds = channel_split_process._time({'plan': step}, timing, 1, processes)
  assert seconds == {'plan': [4]}
  assert timing._rounds == [[[2]], [[4]]]
  assert timing._collective_rounds == [[2], [4]]


def test_more_devices_than_cores_are_marked(tmp_path):
  """The measured ones shared cores: half as fast, and nothing is made of it."""
  crowded = dataclasses.replace(
    _run(
      splitting.costs({'conv': splitting.layer(2, 2, 2, 2, features=16)}),
      False,
      ('plan', 'conv=4,4,4,4', 3.0, 6.0, 0.75),
      ('equal shares', 'conv=4,4,4,4', 3.0, 6.0, 0.75),
    ),
    devices=4,
    crowded=True,
  )
  fast = _run(
    splitting.costs({'conv': splitting.layer(4, 4, features=16)}),
    False,
    ('plan', 'conv=8,8', 3.0, 3.0, 5 / 3),
    ('equal shares', 'conv=8,8', 3.0, 3.0, 5 / 3),
  )
  ratios = _write(tmp_path, fast, crowded)
  assert ratios['net_4x32']['crowded']
  assert 'crowded' not in ratios['net_2x32']
  # The error of the crowded ones, 50 %, counts for nothing.
  assert (ratios['predictions'], ratios['largest_error']) == (1, 0)
  page = (tmp_path / 'study.md').read_text()
  (row,) = [line for line in page.splitlines() if 'conv=4,4,4,4' in line]
  assert '| 0.75\\* |' in row
  assert 'shared them, so these times and speed-ups mean nothing' in page
  assert _write(tmp_path, crowded)['predictions'] == 0


def test_the_page_has_every_number(tmp_path):
  ratios = _write(
    tmp_path,
    _run(
      _costs(),
      False,
      ('plan', 'conv=11,5', 3.75, 4.0, 1.25),
      ('equal shares', 'conv=8,8', 6.0, 5.0, 1.0),
    ),
  )
  # The ideal: a second, and 16 features at 6 a second.
  ideal = 5 / (1 + 16 / 6)
  assert ratios['net_2x32'] == {
    'convolution_share': 0.8,
    'over_alone': 1.25,
    'of_ideal': pytest.approx(1.25 / ideal, abs=1e-4),
    'over_equal_shares': 1.25,
  }
  assert (ratios['predictions'], ratios['within_15_percent']) == (2, 1)
  assert ratios['largest_error'] == pytest.approx(0.2)
  page = (tmp_path / 'study.md').read_text()
  assert 'plan: conv=11,5' in page and '-6.2 %' in page and '+20.0 %' in page
  assert (tmp_path / 'steps.png').stat().st_size > 5000


def test_the_ideal_of_offload_devices(tmp_path):
  """Their times include the transfers."""
  fields = {**_costs().to_json(), 'unsplit': (5.0,), 'alike': False}
  costs = costs_lib.OffloadCosts.from_json(fields)
  ratios = _write(
    tmp_path,
    _run(
      costs,
      True,
      ('plan', 'conv=11,5', 3.75, 4.0, 1.25),
      ('equal shares', 'nothing', 5.0, 5.0, 1.0),
    ),
  )
  ideal = 5 / (1 + 16 / 6)
  assert ratios['net_2x32']['of_ideal'] == pytest.approx(1.25 / ideal, abs=1e-4)
  assert ratios['predictions'] == 1


def test_the_figure_of_steps_shows_what_was_measured():
  point = {
    'name': 'plan',
    'config': 'net',
    'devices': 2,
    'batch_size': 8,
    'predicted': 3.0,
    'measured': 4.0,
    'speed_up': 1.5,
    'ideal': 1.8,
  }
  left, right = plots.split_steps([point]).axes
  assert left.lines[0].get_xydata().tolist() == [[4.0, 3.0]]
  assert right.patches[0].get_height() == 1.5


@pytest.mark.parametrize(
  'more, expected',
  [
    ([], '--config is missing'),
    (['--devices=1'], "--devices='1': expected whole numbers from 2"),
    (['--rounds=0'], '--rounds=0: expected 1 or more'),
    (['--config=configs/lenet.py'], "name='sync': expected channel_split"),
    (['--batchsizes=8'], "did you mean '--batch_sizes'?"),
  ],
)
def test_bad_input(capsys, more, expected):
  flags = ['--config=configs/channel_split_cifar10.py', '--workdir=x']
  flags = [*flags, *more] if more else []
  assert study_main.main(['channel_split', *flags]) == 2
  error = capsys.readouterr().err
  assert expected in error and error.count('\n') == 1


@pytest.mark.multiprocess
@pytest.mark.soak
@pytest.mark.parametrize('devices', ['()', "('processes',)"])
def test_whole_study(tmp_path, capsys, devices):
  status = study_main.main(
    [
      'channel_split',
      '--config=configs/channel_split_cifar10.py',
      f'--workdir={tmp_path}',
      '--batch_sizes=8',
      '--rounds=1',
      '--config.model.kernels=(8, 16)',
      '--config.data.source=synthetic',
      f'--config.strategy.offload_to={devices}',
    ]
  )
  out = capsys.readouterr()
  assert status == 0, out.err
  ratios = json.loads(out.out.splitlines()[-1])
  # Six divisions, and the plan where it is none of them.
  assert ratios['predictions'] in (6, 7)
  assert ratios['channel_split_cifar10_2x8']['over_alone'] > 0
