"""Tests of train: runs on tar shards, damaged and interrupted."""

import itertools
import os
import signal

import numpy as np
import pytest

from anp_jax import config as config_lib, train
from anp_jax.reporting import delayed_metrics, telemetry
from tests import builders, listed_sets

pytestmark = pytest.mark.usefixtures('quick_compiles', 'on_one_device')


def _write(folder, split, count, damaged=()):
  members = {}
  for i in range(count):
    data = builders.encode_image(builders.random_pixels(32, 32, i))
    members[f'{i:03}.png'] = data[:90] if i in damaged else data
    members[f'{i:03}.cls'] = b'ab'[i % 2 :][:1]
  listed_sets.write_tar(folder / f'{split}-000.tar', members)


def _losses(folder):
  return {(r['kind'], r['step']): r['loss'] for r in telemetry.read(str(folder))}


def _interrupt_after(monkeypatch, steps):
  push, count = delayed_metrics.TrainingLog.push, itertools.count(1)

  def interrupt(self, step, values):
    if next(count) == steps:
      os.kill(os.getpid(), signal.SIGINT)
    return push(self, step, values)

  monkeypatch.setattr(delayed_metrics.TrainingLog, 'push', interrupt)


@pytest.mark.slow
def test_a_run_on_tar_shards_resumes_with_the_same_numbers(
  tmp_path, tiny_config, monkeypatch, capsys
):
  _write(tmp_path, 'train', 40, damaged=(3,))
  _write(tmp_path, 'val', 8)
  tiny_config.data.source = 'tar:{split}-*.tar'
  tiny_config.data.path = str(tmp_path)
  tiny_config.data.dir = str(tmp_path / 'data')
  tiny_config.duration = '12 steps'
  scores = train.run(tiny_config, str(tmp_path / 'straight'))
  assert scores['examples'] == 8
  (last,) = [
    r
    for r in telemetry.read(str(tmp_path / 'straight'))
    if r['kind'] == 'train' and r['step'] == 12
  ]
  # 12 steps of 16 images: four epochs of 40 and most of a fifth.
  assert last['damaged'] in (4, 5) and np.isfinite(last['loss'])
  with monkeypatch.context() as patch:
    _interrupt_after(patch, 3)
    train.run(tiny_config, str(tmp_path / 'twice'))
  assert 'run the same command to resume' in capsys.readouterr().out
  train.run(tiny_config, str(tmp_path / 'twice'))
  assert _losses(tmp_path / 'twice') == _losses(tmp_path / 'straight')
  # Another set under the same name is refused.
  _write(tmp_path, 'train', 41)
  tiny_config.duration = '16 steps'
  with pytest.raises(config_lib.ConfigError, match='41'):
    train.run(tiny_config, str(tmp_path / 'twice'))
