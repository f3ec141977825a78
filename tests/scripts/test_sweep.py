"""Tests of sweep.sbatch: a line is words, and nothing of it is executed."""

import os
import pathlib
import subprocess

import pytest

_SCRIPT = pathlib.Path(__file__).parents[2] / 'scripts/slurm/sweep.sbatch'


def _start(folder, line):
  """Status, and the arguments that train.sbatch was started with."""
  train = folder / 'scripts' / 'slurm' / 'train.sbatch'
  train.parent.mkdir(parents=True)
  train.write_text('printf "%s\\n" "$@"\n')
  (folder / 'sweep.txt').write_text(f'--config.seed=1\n{line}\n')
  done = subprocess.run(
    ['bash', str(_SCRIPT), 'sweep.txt', 'runs', '--config=x.py'],
    env={**os.environ, 'SLURM_SUBMIT_DIR': str(folder), 'SLURM_ARRAY_TASK_ID': '2'},
    capture_output=True,
    text=True,
  )
  return done.returncode, done.stdout.splitlines(), done.stderr


@pytest.mark.parametrize(
  'line, words',
  [
    ('--config.seed=2', ['--config.seed=2']),
    ('--a=\'2000 steps\' --b="x y"  --c=', ['--a=2000 steps', '--b=x y', '--c=']),
    ("--a='' --b=(1,2)", ['--a=', '--b=(1,2)']),
    ('--a=$(touch ran) --b=`touch ran`;', ['--a=$(touch', 'ran)', '--b=`touch', 'ran`;']),
    ('x); touch ran; (:', ['x);', 'touch', 'ran;', '(:']),
    ('--a=$HOME --b=*', ['--a=$HOME', '--b=*']),
  ],
)
def test_a_line_is_words(tmp_path, line, words):
  status, arguments, _ = _start(tmp_path, line)
  assert status == 0
  assert arguments == ['--config=x.py', *words, '--workdir=runs/2']
  assert not (tmp_path / 'ran').exists()


def test_a_quote_without_an_end_is_refused(tmp_path):
  status, arguments, text = _start(tmp_path, "--a='2000 steps")
  assert status == 2 and not arguments
  assert 'error: sweep.txt:2: expected words' in text
