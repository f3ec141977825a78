"""Tests of train: files that cannot be read."""

import os

import pytest

from anp_jax import train
from anp_jax.training import eval_loop
from tests import builders

pytestmark = pytest.mark.usefixtures('on_one_device')


@pytest.fixture
def photographs(tmp_path, tiny_config):
  tiny_config.data.source = 'folder'
  tiny_config.data.path = str(builders.photographs(tmp_path / 'photographs', 40))
  tiny_config.duration = '12 steps'
  return tiny_config


def _broken(config, split, numbers):
  for i in numbers:
    path = f'{config.data.path}/{split}/class_{"ab"[i % 2]}/{i:03}.png'
    with open(path, 'r+b') as f:
      f.truncate(90)


def test_too_many_broken_files_end_a_run(tmp_path, photographs, capsys):
  photographs.data.max_damaged = 0.0
  root = tmp_path / 'photographs' / 'validation'
  (root / 'class_c').mkdir()
  (root / 'class_a' / '002.png').rename(root / 'class_c' / '002.png')
  _broken(photographs, 'train', [3])
  with pytest.raises(eval_loop.CorruptExampleError) as e:
    train.run(photographs, str(tmp_path / 'run'))
  text = str(e.value)
  assert '\n' not in text and 'config.data.max_damaged=0' in text
  assert '/photographs: train' in text
  line = 'caution  without a training image: 1 of 3 classes, class_c'
  assert capsys.readouterr().out.splitlines().count(line) == 1


@pytest.mark.slow
@pytest.mark.parametrize('count', [1, 8])
def test_too_many_broken_files_end_an_evaluation(tmp_path, photographs, count):
  photographs.data.max_damaged = 0.0 if count == 1 else 0.5
  _broken(photographs, 'validation', range(count))
  with pytest.raises(eval_loop.CorruptExampleError, match=f'{count} of 8 examples of .*validation'):
    train.run(photographs, str(tmp_path / 'run'))
  # What was trained until then is kept, for when the file is back.
  assert '6' in os.listdir(tmp_path / 'run' / 'checkpoints')


@pytest.mark.parametrize(
  'damaged, examples, good',
  [
    (10, 64, True),
    (11, 64, False),
    (10, 1000, True),
    (11, 1000, False),
    (100, 10000, True),
    (101, 10000, False),
  ],
)
def test_rate_is_of_a_thousand_examples_at_least(tiny_config, damaged, examples, good):
  tiny_config.data.max_damaged = 0.01
  if good:
    eval_loop.check_excess(tiny_config, damaged, examples, 'set')
  else:
    with pytest.raises(eval_loop.CorruptExampleError, match=f'{damaged} of {examples}'):
      eval_loop.check_excess(tiny_config, damaged, examples, 'set')
