"""The benchmark of scaling: batches, ratios, and a run of it."""

import json
import sys

import pytest

from scripts.bench import scaling
from tests import launching


@pytest.mark.parametrize(
  'images, count, batch, shards',
  [
    (64, 1, 64, 4),
    (64, 8, 64, 8),
    (64, 12, 60, 12),  # five images each; 64 / 12 is 5.3
    (64, 3, 66, 6),
    (2, 16, 16, 16),
  ],
)
def test_a_batch_is_the_nearest_that_divides(images, count, batch, shards):
  assert scaling.batch_of(images, count) == (batch, shards)


def test_ratios_are_those_of_the_same_round():
  over = scaling.compare(
    {
      'one': [100.0, 50.0, 200.0],
      'apart': [200.0, 200.0, 200.0],
      'lockstep': [150.0, 100.0, 300.0],
      'sync': [150.0, 100.0, 100.0],
      'sync:measured': [180.0, 200.0, 160.0],
      'sync:measured_predicted': [200.0] * 3,
    }
  )
  # 1.5, 2 and 0.5: half of the way from the median to either end.
  assert over['sync_over_one'].median == 1.5
  assert over['sync_over_one'].quartiles == (1.0, 1.75)
  # The fastest rounds: 150 and 200 images a second.
  assert over['sync_over_one'].fastest == pytest.approx(0.75)
  assert over['sync_over_apart'].median == 0.5
  assert over['sync_over_lockstep'].lowest == pytest.approx(1 / 3)
  assert over['apart_over_one'].median == 2.0
  assert 'apart_over_lockstep' not in over
  assert over['sync:measured_over_apart'].median == 0.9
  # Its step takes 1 / 180 s, predicted are 1 / 200.
  assert over['sync:measured_predicted'].median == pytest.approx(0.9)


@pytest.mark.parametrize(
  'flag, message',
  [
    ('--processes=2,0', "--processes: '2,0': expected numbers of 1 or more"),
    ('--rounds=0', '--rounds=0: expected 1 or more'),
    ('--quotas=50', '--quotas: expected one for each process'),
    ('--strategies=sinc', "did you mean 'sync'?"),
    ('--strategies=parameter_server', '--strategies=parameter_server: expected one with a common'),
  ],
)
def test_what_cannot_be_measured_is_refused(monkeypatch, capsys, flag, message):
  monkeypatch.chdir(launching.ROOT)
  monkeypatch.setattr(sys, 'argv', ['scaling.py', flag])
  with pytest.raises(SystemExit) as ended:
    scaling.main()
  assert ended.value.code == 2
  assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.multiprocess
def test_processes_are_compared_with_one():
  flags = ['--model=tests.user_network:PlainNet', '--size=8', '--batch=4', '--rounds=1']
  done = launching.python('-m', 'scripts.bench.scaling', *flags, status=0, **launching.QUICK)
  ratios = json.loads(done.stdout.splitlines()[-1])
  for name in ('sync_over_one', 'sync_over_lockstep', 'apart_over_one'):
    assert ratios[name] > 0
