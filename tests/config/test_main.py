"""Tests of main.py as a person types it: bad input, one clear line."""

import os
import pathlib
import subprocess
import sys

import pytest

_ROOT = str(pathlib.Path(__file__).resolve().parents[2])
_RECIPE = 'configs/resnet_anp.py'


def _main(*arguments, **environment):
  return subprocess.run(
    [sys.executable, 'main.py', *arguments],
    cwd=_ROOT,
    env={**os.environ, **environment},
    capture_output=True,
    text=True,
    timeout=120,
  )


@pytest.mark.parametrize(
  'arguments, words',
  [
    ([], ['--config', 'missing']),
    (['--config=configs/resnet_amp.py'], ['resnet_amp', 'resnet_anp.py']),
    ([f'--config={_RECIPE}:dmo'], ["'dmo'", "did you mean 'demo'"]),
    (['--confg=x'], ['confg']),
    (['--mode=evaluat', f'--config={_RECIPE}'], ['mode', 'evaluate']),
    (
      [f'--config={_RECIPE}', '--config.optimizer.learning_rat=1'],
      ['unknown key config.optimizer.learning_rat', 'learning_rate'],
    ),
    (
      [f'--config={_RECIPE}', '--config.learning_rate=1'],
      ['unknown key config.learning_rate', 'optimizer.learning_rate'],
    ),
    (
      [f'--config={_RECIPE}', '--config.batch_size=many'],
      ["config.batch_size='many'", 'a whole number'],
    ),
    ([f'--config={_RECIPE}', '--config.batch_size'], ['--config.batch_size', 'expected a value']),
    ([f'--config={_RECIPE}', '--config.model.name=resnet51'], ["'resnet51'", 'resnet50']),
    ([f'--config={_RECIPE}', '--config.optimizer.name=nestrov'], ["'nestrov'", "'nesterov'"]),
    (
      [f'--config={_RECIPE}', '--config.data.lists=anps.txt'],
      ['config.data.lists belongs to data.source=folder, list:*, tar:*', 'hf:*, not anp_shapes'],
    ),
    ([f'--config={_RECIPE}', '--config.duration=3 epocs'], ['config.duration', "'epochs'"]),
    ([f'--config={_RECIPE}', '--config.data.source=foldr'], ["'foldr'", "'folder'"]),
    (
      [f'--config={_RECIPE}', '--config.data.source=folder'],
      ['config.data.path', 'path of the folder'],
    ),
    ([f'--config={_RECIPE}', '--config.model=x'], ['config.model is a group', 'model.name']),
    ([f'--config={_RECIPE}', '--mode=evaluate'], ['--mode=evaluate', '--workdir']),
    ([f'--config={_RECIPE}', '--checkpoint=bset'], ['--checkpoint', "'best'"]),
    ([f'--config={_RECIPE}', '--checkpoint=best'], ['--checkpoint=best', '--mode=evaluate']),
  ],
)
def test_bad_input_is_one_clear_line(arguments, words):
  done = _main(*arguments)
  assert done.returncode == 2
  assert done.stdout == ''
  lines = done.stderr.strip().splitlines()
  assert len(lines) == 1, done.stderr
  for word in words:
    assert word in lines[0]


def test_bad_input_is_answered_before_anything_heavy_is_imported(tmp_path):
  """With modules that fail to import in jax's and TensorFlow's places."""
  for name in ('jax', 'flax', 'optax', 'tensorflow', 'tensorflow_datasets'):
    (tmp_path / f'{name}.py').write_text('raise SystemExit("heavy")')
  done = _main(f'--config={_RECIPE}', '--config.sed=1', PYTHONPATH=str(tmp_path))
  assert done.returncode == 2
  assert "did you mean 'seed'" in done.stderr


def test_error_in_the_users_config_file_names_it(tmp_path):
  file = tmp_path / 'mine.py'
  file.write_text('def get_config(variant):\n  return 1 / 0\n')
  done = _main(f'--config={file}')
  assert done.returncode == 2
  assert 'mine.py' in done.stderr and 'ZeroDivisionError' in done.stderr
  assert len(done.stderr.strip().splitlines()) == 1


def test_main_is_short():
  with open(os.path.join(_ROOT, 'main.py')) as f:
    assert len(f.readlines()) < 70
