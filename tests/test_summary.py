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
    np.array([0, 9]),
  )
  assert said[-2:] == [
    *summary.cautions(config, source, 64, 9),
    'caution  without a training image: 1 of 2 classes, a',
  ]
  assert 'a batch of 64 images' in said[-2]
  assert f'devices  4 x NVIDIA H100, 64 images a step, {text}' in said


def _cautions(config, names, batch_size, examples, sizes=None):
  train = types.SimpleNamespace(vocabulary=vocabulary.Vocabulary(names))
  return summary.cautions(config, train, batch_size, examples, sizes)


def test_usual_data_need_no_caution(config):
  assert _cautions(config, ('a', 'b'), 10, 10, np.array([9, 1])) == []
  assert _cautions(config, ('a', 'b'), 10, 11) == []


def test_a_batch_beyond_the_training_images(config):
  (line,) = _cautions(config, ('a', 'b'), 11, 10)
  assert 'a batch of 11 images is drawn from 10: images repeat' in line
  assert line.endswith('config.batch_size of at most 10')


@pytest.mark.parametrize(
  'source, side, enlarged',
  [
    ('anp_shapes', 224, True), ('anp_shapes', 73, True),
    ('anp_shapes', 72, False), ('anp_shapes', 48, False),
    ('folder', 224, False), ('tfds:mnist', 224, False),
  ],
)  # fmt: skip
def test_drawings_that_are_enlarged(config, source, side, enlarged):
  """A recipe for photographs, such as `paper`, says that it has none."""
  config.data.source = source
  config.data.image_size = side
  lines = _cautions(config, ('a', 'b'), 1, 10)
  assert len(lines) == enlarged
  for line in lines:
    assert f'drawings of 72 px are enlarged to {side}: ' in line
    assert '--config.data.source=folder --config.data.path=DIR' in line


def test_one_class(config):
  (line,) = _cautions(config, ('red\ncar',), 1, 10, np.array([10]))
  assert 'one class only, red\\ncar' in line


def test_classes_without_training_images(config):
  names = ('a_x', 'b_x', 'c_x', 'd_y')
  (line,) = _cautions(config, names, 1, 10, np.array([0, 5, 0, 5]))
  assert line.endswith('without a training image: 2 of 4 classes, a_x, c_x')
  config.data.held_out = ('c_x',)  # as the config says
  (line,) = _cautions(config, names, 1, 10, np.array([0, 5, 0, 5]))
  assert line.endswith('1 of 4 classes, a_x')
  many = tuple(f'c{i}' for i in range(9))
  (line,) = _cautions(config, many, 1, 10, np.arange(9) // 8)
  assert line.endswith('8 of 9 classes, c0, c1, c2, c3, c4 and 3 more')


def test_a_system_that_does_not_tell_of_cores(monkeypatch):
  """As macOS."""
  monkeypatch.delattr(os, 'sched_getaffinity')
  monkeypatch.setattr(os, 'cpu_count', lambda: 6)
  assert cores_lib.count() == 6
