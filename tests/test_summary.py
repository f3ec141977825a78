"""What a run says of itself before its first step."""

import os
import types

import numpy as np
import pytest

from anp_jax import cores as cores_lib
from anp_jax import summary
from anp_jax.data import vocabulary


@pytest.fixture
def introduced():
  """The lines of a config's run on four GPUs."""
  gpu = types.SimpleNamespace(device_kind='NVIDIA H100')
  devices = np.array([gpu] * 4)
  source = type(
    'Source', (), {
      'vocabulary': vocabulary.Vocabulary(('a', 'b')), '__len__': lambda _: 9,
    },
  )()  # fmt: skip

  def lines(config):
    said = []
    summary.introduce(
      types.SimpleNamespace(note=said.append),
      config,
      types.SimpleNamespace(size=4, devices=devices),
      types.SimpleNamespace(params={'w': np.zeros(3)}),
      source,
      source,
    )
    return said

  return lines


@pytest.mark.parametrize('cores, text', [({5}, '1 core'), ({0, 5}, '2 cores')])
def test_cores_beside_the_devices(
  config, monkeypatch, introduced, cores, text
):  # fmt: skip
  """Those of this process, which Slurm, say, has bound to them."""
  monkeypatch.setattr(os, 'sched_getaffinity', lambda _: cores)
  config.batch_size = 64
  assert f'devices  4 x NVIDIA H100, 64 images a step, {text}' in introduced(
    config
  )


@pytest.mark.parametrize(
  'source, side, notes',
  [
    ('anp_shapes', 224, 1), ('anp_shapes', 73, 1), ('anp_shapes', 72, 0),
    ('anp_shapes', 48, 0), ('folder', 224, 0), ('tfds:mnist', 224, 0),
  ],
)  # fmt: skip
def test_drawings_that_are_enlarged(config, introduced, source, side, notes):
  """A recipe for photographs, such as `paper`, says that it has none."""
  config.data.source = source
  config.data.image_size = side
  lines = [line for line in introduced(config) if line.startswith('note ')]
  assert len(lines) == notes
  for line in lines:
    assert f'drawings of 72 px are enlarged to {side}: ' in line
    assert '--config.data.source=folder --config.data.path=DIR' in line


def test_a_system_that_does_not_tell_of_cores(monkeypatch):
  """As macOS."""
  monkeypatch.delattr(os, 'sched_getaffinity')
  monkeypatch.setattr(os, 'cpu_count', lambda: 6)
  assert cores_lib.count() == 6
