"""Programs that a study runs as processes of this machine."""

import pytest

from anp_jax.tools.study import launching

_PROGRAM = """
import pathlib, sys
flags = dict(argument.lstrip('-').split('=') for argument in sys.argv[1:])
folder = pathlib.Path(flags['workdir'])
(folder / flags['process_id']).write_text(flags['num_processes'])
if 'fails' in flags and flags['process_id'] == '1':
  sys.exit('error: no such key')
"""


def _launch(tmp_path, *more):
  path = tmp_path / 'program.py'
  path.write_text(_PROGRAM)
  folder = tmp_path / 'run'
  launching.launch([str(path)], str(folder), 2, [f'--workdir={folder}', *more])
  return folder


def test_each_process_has_its_number(tmp_path):
  folder = _launch(tmp_path)
  assert [(folder / rank).read_text() for rank in '01'] == ['2', '2']


def test_a_run_that_fails_says_why(tmp_path):
  with pytest.raises(launching.RunFailedError, match='run: no such key$'):
    _launch(tmp_path, '--fails=1')
