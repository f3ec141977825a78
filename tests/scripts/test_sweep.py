"""Tests of sweep.sbatch: a line is words, and nothing of it is executed."""

import pytest

from tests import launching


def _start(folder, line, status=0):
  """The arguments that train.sbatch was started with, and the errors."""
  train = folder / 'scripts' / 'slurm' / 'train.sbatch'
  train.parent.mkdir(parents=True)
  train.write_text('printf "%s\\n" "$@"\n')
  (folder / 'sweep.txt').write_text(f'--config.seed=1\n{line}\n')
  words = 'bash', 'scripts/slurm/sweep.sbatch', 'sweep.txt', 'runs', '--config=x.py'
  variables = {'SLURM_SUBMIT_DIR': str(folder), 'SLURM_ARRAY_TASK_ID': '2'}
  done = launching.command(*words, status=status, **variables)
  return done.stdout.splitlines(), done.stderr


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
  arguments, _ = _start(tmp_path, line)
  assert arguments == ['--config=x.py', *words, '--workdir=runs/2']
  assert not (tmp_path / 'ran').exists()


def test_a_quote_without_an_end_is_refused(tmp_path):
  arguments, text = _start(tmp_path, "--a='2000 steps", status=2)
  assert not arguments
  assert 'error: sweep.txt:2: expected words' in text
