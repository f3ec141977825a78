"""Runs with offload devices: what they print, keep and refuse."""

import json
import re
import signal

import numpy as np
import pytest

from anp_jax import cluster, train
from anp_jax.config import strategy as strategy_lib
from anp_jax.runtimes.calibration import rounds, timing
from anp_jax.runtimes.offload import device as device_lib
from anp_jax.system import xla_flags
from tests import builders, launching, splitting


def _config(**overrides):
  return splitting.two_convolutions(
    **{
      **splitting.SYNTHETIC,
      'duration': '6 steps',
      'schedule.warmup': '1 steps',
      'strategy.offload_to': "('cpu:1',)",
      **overrides,
    }
  )


@pytest.mark.slow
def test_a_run_measures_plans_and_resumes(tmp_path, capsys, monkeypatch):
  monkeypatch.setattr(rounds, '_ROUNDS', (1, 1))
  train.run(_config(), str(tmp_path))
  printed = capsys.readouterr().out
  assert ' (cpu:1), offload devices from 1 on' in printed
  assert f'offload  {device_lib.processor()} (cpu:1)\n' in printed
  assert 'plan     conv2  16 features' in printed
  saved = json.loads((tmp_path / 'channel_split.json').read_text())
  assert saved['key']['helpers'] == [f'{device_lib.processor()} (cpu:1)']
  seconds = saved['costs']['layers']['conv2']['seconds']
  assert len(seconds) == 2 and all(t > 0 for row in seconds for t in row)
  # On the same devices the plan stays.
  train.run(_config(duration='8 steps'), str(tmp_path))
  assert 'continuing from step 6' in capsys.readouterr().out
  assert json.loads((tmp_path / 'channel_split.json').read_text()) == saved
  # A finished run times nothing, on any devices.
  with monkeypatch.context() as m:
    m.delattr(timing, 'Timing')
    elsewhere = _config(**{'duration': '8 steps', 'strategy.offload_to': "('cpu:1', 'cpu:2')"})
    train.run(elsewhere, str(tmp_path))
  assert 'is finished: step 8 of 8' in capsys.readouterr().out
  scores = train.run(_config(), str(tmp_path), mode='evaluate')
  assert scores['examples'] == 64


@pytest.mark.parametrize(
  'overrides, words',
  [
    ({'strategy.offload_to': "('cpu:0',)"}, "'cpu:0' is the device that trains"),
    ({'strategy.offload_to': "('cpu:99',)"}, "no 'cpu:99' here; expected cpu:0, "),
    ({'strategy.offload_to': "('tpu:0',)"}, "no 'tpu:0' here; expected another"),
    ({'strategy.offload_to': "('processes',)"}, 'there is no other process'),
    ({'strategy.shares': '(1, 2, 3)'}, 'expected 2, of the device that trains'),
    ({'mesh.data': '2'}, 'config.mesh (data=2, model=-1) does not fit 1 cpu'),
    ({'strategy.plan': 'conv1=4,4; conv3=8,8'}, "no convolution 'conv3'"),
  ],
)
def test_devices_that_do_not_exist_are_refused(tmp_path, overrides, words):
  assert words in builders.refusal(train.run, _config(**overrides), str(tmp_path))


@pytest.mark.slow
def test_an_error_of_an_offload_device_ends_the_run_by_name(tmp_path, monkeypatch):
  def full(self, *_):
    with self._context(np.float32):
      raise MemoryError('no room for the kernel')

  monkeypatch.setattr(device_lib.LocalDevice, '_forward', full)
  config = _config(**{'strategy.shares': '(1, 1)'})
  with pytest.raises(cluster.RunFailedError) as e:
    train.run(config, str(tmp_path))
  name = f'{device_lib.processor()} (cpu:1)'
  assert str(e.value) == f'offload device {name}: no room for the kernel'


def test_platforms_may_differ_only_between_offload_processes():
  offloads = _config(**{'strategy.offload_to': "('processes',)"})
  split = strategy_lib.find(offloads)
  assert split.mixes_platforms(offloads, 'train')
  assert not split.mixes_platforms(offloads, 'evaluate')
  assert not split.mixes_platforms(_config(**{'strategy.offload_to': '()'}), 'train')


def test_a_program_that_waits_has_spare_threads(monkeypatch):
  monkeypatch.setattr(xla_flags, '_devices_are_open', lambda: False)
  waiting = {'spare': xla_flags.SPARE_THREADS}
  for environ, keys, is_spare in (
    ({}, waiting, True),
    ({'NPROC': '3'}, waiting, False),
    ({}, {}, False),
  ):
    environment = {'JAX_PLATFORMS': 'cpu', **environ}
    xla_flags.enable(environment, **keys)
    assert (int(environment.get('NPROC', 0)) > 8) == is_spare


# Processes.

_KEYS = {
  **launching.FLOAT64,
  **launching.CONSTANT,
  'optimizer.learning_rate': '0.001',
  'log.every': '5 steps',
}
_OFFLOAD = {
  'strategy.name': 'channel_split',
  'strategy.shares': '(2, 1)',
  'strategy.offload_to': "('processes',)",
  'mesh.model': '1',
}


def _await(ranks, words, times=1):
  launching.wait_until(lambda: ranks.text().count(words) >= times, 180, ranks.text)


@pytest.mark.multiprocess
def test_an_offload_process_that_stops_or_is_silent_is_done_without(tmp_path):
  """The weights are those of a run that never had it."""

  def arguments(name, steps, **more):
    return launching.arguments(tmp_path / name, duration=f'{steps} steps', **_KEYS, **more)

  more = {**_OFFLOAD, 'strategy.shares': '(2, 1, 1)', 'cluster.heartbeat_timeout': '10'}
  split = arguments('split', 100_000, **more)
  with launching.Ranks(tmp_path, 3, split, environment=launching.X64) as ranks:
    _await(ranks, 'epoch')
    ranks.processes[2].send_signal(signal.SIGSTOP)
    ranks.processes[1].send_signal(signal.SIGTERM)
    assert ranks.wait_for(1, 120) == 0
    ranks.restart(1)  # which comes too late
    for words in ('has left', 'has been silent for'):
      _await(ranks, words)
    assert ranks.wait_for(1, 120) == 0
    assert 'the run goes on without this process' in ranks.text(1)
    lines = ranks.text(0).count('epoch')
    _await(ranks, 'epoch', times=lines + 1)
    ranks.processes[0].send_signal(signal.SIGTERM)
    # Its silent process keeps nothing of it waiting.
    assert ranks.wait_for(0, 60) == 0, ranks.text(0)
    text = ranks.text(0)
  assert 'Traceback' not in text + ranks.text(1)
  steps = int(re.search(r'stopped at step (\d+) of .*run the same command to resume', text)[1])
  launching.run(tmp_path / 'alone', 1, arguments('unsplit', steps), environment=launching.X64)
  key = f'{steps}/params/conv1/kernel'
  splitting.assert_same_weights(tmp_path / 'split', tmp_path / 'unsplit', key)
