"""The benchmark of ensembles: its ratios and its profile."""

import json
import subprocess
import sys

import pytest

from tests import launching

_COMMAND = [
  sys.executable,
  '-m',
  'scripts.bench.ensemble',
  '--members=2',
  '--steps=6',
  '--rounds=1',
]


def _lines(*flags):
  done = subprocess.run([*_COMMAND, *flags], cwd=launching.ROOT, text=True, stdout=-1, check=True)
  return done.stdout.splitlines()


@pytest.mark.slow
def test_members_are_compared_with_one_after_another_and_with_a_filling_batch():
  *_, last = _lines()
  ratios = json.loads(last)
  assert set(ratios) == {
    'ensemble_trainings_an_hour',
    'ensemble_images_s',
    'ensemble_images_s_over_a_filling_batch',
    'ensemble_async,_look_ahead=none',
    'ensemble_async,_look_ahead=dana',
  }
  assert all(ratio > 0 for ratio in ratios.values())


@pytest.mark.slow
def test_a_profile_has_the_operations_of_the_members(tmp_path):
  lines = [line.split() for line in _lines(f'--profile={tmp_path}')]
  shares = [float(share[:-1]) for share, *_ in lines if share.endswith('%')]
  assert shares == sorted(shares, reverse=True) and 0 < sum(shares) <= 100.5
  assert list(tmp_path.rglob('*.xplane.pb'))
