"""What a run says of itself before its first step."""

import os
import types

import numpy as np
import pytest

from anp_jax import cores as cores_lib
from anp_jax import summary
from anp_jax.data import vocabulary


@pytest.mark.parametrize('cores, text', [({5}, '1 core'), ({0, 5}, '2 cores')])
def test_cores_beside_the_devices(config, monkeypatch, cores, text):
  """Those of this process, which Slurm, say, has bound to them."""
  monkeypatch.setattr(os, 'sched_getaffinity', lambda _: cores)
  config.batch_size = 64
  gpu = types.SimpleNamespace(device_kind='NVIDIA H100')
  devices = np.array([gpu] * 4)
  source = type(
    'Source', (), {
      'vocabulary': vocabulary.Vocabulary(('a', 'b')), '__len__': lambda _: 9,
    },
  )()  # fmt: skip
  said = []
  summary.introduce(
    types.SimpleNamespace(note=said.append),
    config,
    types.SimpleNamespace(size=4, devices=devices),
    types.SimpleNamespace(params={'w': np.zeros(3)}),
    source,
    source,
  )
  assert f'devices  4 x NVIDIA H100, 64 images a step, {text}' in said


def test_a_system_that_does_not_tell_of_cores(monkeypatch):
  """As macOS."""
  monkeypatch.delattr(os, 'sched_getaffinity')
  monkeypatch.setattr(os, 'cpu_count', lambda: 6)
  assert cores_lib.count() == 6
