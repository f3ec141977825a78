"""The benchmark of simulated workers: what is compared, and bad input."""

import json
import os
import pathlib
import sys

import pytest

from scripts.bench import simulation

_ROOT = pathlib.Path(__file__).resolve().parents[2]


def _run(monkeypatch, *flags):
  monkeypatch.chdir(_ROOT)
  monkeypatch.setattr(sys, 'argv', ['simulation.py', *flags])
  simulation.main()


def test_a_cost_is_a_ratio_of_the_same_round(monkeypatch, capsys):
  monkeypatch.setattr(os, 'sched_getaffinity', lambda pid: {0})
  seconds = {'sync': iter([1.0, 2.0, 4.0]), 'simulated': iter([1.0, 3.0, 8.0])}
  monkeypatch.setattr(simulation, '_seconds', lambda flags, batch, name: next(seconds[name]))
  _run(monkeypatch, '--batches=16', '--rounds=3')
  table, ratios = capsys.readouterr().out.strip().rsplit('\n', 1)
  # 1, 1.5 and 2: half of the rounds lie between 1.25 and 1.75.
  assert json.loads(ratios) == {
    '16_simulated_over_sync': 1.5,
    '16_simulated_over_sync_low': 1.25,
    '16_simulated_over_sync_high': 1.75,
  }
  assert table.splitlines()[-1].split()[-3:] == ['<=', '1.1', 'missed']


@pytest.mark.parametrize(
  'flag, message',
  [
    ('--steps=19', '--steps=19: expected 20 or more'),
    ('--rounds=0', '--rounds=0: expected 1 or more'),
    ('--batches=0', "'0': expected numbers of 1 or more"),
  ],
)
def test_what_cannot_be_measured_is_refused(monkeypatch, capsys, flag, message):
  with pytest.raises(SystemExit) as ended:
    _run(monkeypatch, flag)
  assert ended.value.code == 2
  assert message in capsys.readouterr().err.splitlines()[-1]


def test_an_error_of_a_run_is_the_end(monkeypatch):
  with pytest.raises(SystemExit, match="did you mean 'configs/lenet.py'"):
    _run(monkeypatch, '--config=configs/lenett.py', '--batches=16')
