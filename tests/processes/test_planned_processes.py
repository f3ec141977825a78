"""The planner against four emulated processes, as `--plan` compares them."""

import json

import pytest

from anp_jax.reporting import telemetry
from anp_jax.tools.study import __main__ as study_main

pytestmark = pytest.mark.multiprocess

_PROCESSES = 4


@pytest.mark.parametrize(
  'strategy, steps, every',
  [('sync', 12, 2), pytest.param('parameter_server', 44, 11, marks=pytest.mark.soak)],
)
def test_an_emulated_run_is_as_fast_as_its_plan(tmp_path, capsys, strategy, steps, every):
  """Sleeps, one of them longer, and bytes over paced links.

  15 %: computing is a sleep, so that what is left is the machine's own cost, a
  few hundredths of a second a step. The best of some intervals counts, which
  other work on the machine does not slow down; 11 updates of a `parameter_server` are
  three cycles of the quick workers and two of the slow one.
  """
  arguments = [
    'strategies',
    '--config=configs/lenet.py',
    f'--workdir={tmp_path}',
    f'--nodes={_PROCESSES}',
    f'--strategies={strategy}',
    '--plan',
    '--emulate=step_seconds=0.6,slow=3:1.5,megabytes=2,bandwidth=80mbit',
    '--config.batch_size=16',
    '--config.data.synthetic_classes=10',
    '--config.optimizer.momentum=0',
    f'--config.duration={steps} steps',
    f'--config.log.every={every} steps',
  ]
  assert study_main.main(arguments) == 0
  text = capsys.readouterr().out
  (row,) = json.loads(text.splitlines()[-1])['rows']
  run = tmp_path / 'runs' / f'{strategy}-{_PROCESSES}x1-seed0'
  # The first interval has what is slow once, the last is a step shorter.
  intervals = [r for r in telemetry.read(run) if r['kind'] == 'train'][1:-1]
  best = max(r['images_per_second'] for r in intervals)
  assert row['planned'] == pytest.approx(best, rel=0.15)
  assert 'planned' in text and 'error' in text
