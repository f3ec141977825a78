"""main.py with bad input: one clear line, before anything heavy is imported."""

import os
import pathlib
import subprocess
import sys

import pytest

import main
from tests import builders

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_RECIPE = '--config=configs/resnet_anp.py'


@pytest.mark.parametrize(
  'arguments, words',
  [
    ([], ['--config', 'missing']),
    (['--config=configs/resnet_amp.py'], ['resnet_amp', 'resnet_anp.py']),
    ([f'{_RECIPE}:dmo'], ["'dmo'", "did you mean 'demo'"]),
    (['--confg=x'], ['confg']),
    (['--mode=evaluat', _RECIPE], ['mode', 'evaluate']),
    ([_RECIPE, '--config.learning_rate=1'], ['config.learning_rate', 'optimizer.learning_rate']),
    ([_RECIPE, '--config.batch_size'], ['--config.batch_size', 'expected a value']),
    ([_RECIPE, '--mode=evaluate'], ['--mode=evaluate', '--workdir']),
    ([_RECIPE, '--checkpoint=bset'], ['--checkpoint', "'best'"]),
    ([_RECIPE, '--checkpoint=best'], ['--checkpoint=best', '--mode=evaluate']),
  ],
)
def test_bad_input_is_one_clear_line(arguments, words, capsys, monkeypatch):
  monkeypatch.chdir(_ROOT)
  assert main.main(['main.py', *arguments]) == 2
  line = builders.error_line(capsys)
  assert all(word in line for word in words), line


@pytest.mark.parametrize(
  'arguments, status, words',
  [
    ([_RECIPE, '--config.sed=1'], 2, "did you mean 'seed'"),
    (['--help', 'data'], 0, 'config.data.source = '),
  ],
)
def test_an_answer_imports_nothing_heavy(arguments, status, words, tmp_path):
  """With modules that fail to import in jax's and TensorFlow's places."""
  for name in ('jax', 'flax', 'optax', 'orbax', 'tensorflow', 'tensorflow_datasets'):
    (tmp_path / f'{name}.py').write_text('raise SystemExit("heavy")')
  done = subprocess.run(
    [sys.executable, 'main.py', *arguments],
    cwd=_ROOT,
    env={**os.environ, 'PYTHONPATH': str(tmp_path)},
    capture_output=True,
    text=True,
    timeout=120,
  )
  assert done.returncode == status
  assert words in done.stdout + done.stderr
