"""Paths as a shell leaves them: --workdir=~/x, and what quotes keep."""

import os
import pwd

import pytest

from anp_jax.config import argument_parser, command_line
from anp_jax.tools.compare import __main__ as compare

_TINY = 'configs/resnet_anp.py:tiny'


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
  monkeypatch.setenv('HOME', str(tmp_path))
  monkeypatch.setenv('SCRATCH_OF_TEST', str(tmp_path))
  monkeypatch.delenv('UNSET_BY_TEST', raising=False)
  return tmp_path


@pytest.mark.parametrize(
  'typed, path',
  [
    ('~/x', 'HOME/x'),
    ('~', 'HOME'),
    ('$HOME/x', 'HOME/x'),
    ('${SCRATCH_OF_TEST}/a/$HOME', 'HOME/a/HOME'),
    ('$UNSET_BY_TEST/x', '$UNSET_BY_TEST/x'),
    ('a~/x', 'a~/x'),
    ('~/c.py:tiny', 'HOME/c.py:tiny'),
    ('gs://b/~x', 'gs://b/~x'),
    (f'~{pwd.getpwuid(os.getuid())[0]}/x', f'{pwd.getpwuid(os.getuid()).pw_dir}/x'),
    ('~\0', '~\0'),
    ('', ''),
  ],
)
def test_a_path(typed, path, home):
  expected = path.replace('$HOME', str(home)).replace('HOME', str(home))
  assert argument_parser.expanded(typed) == expected


def test_a_path_that_exists_as_it_was_typed_stays(home, monkeypatch):
  monkeypatch.chdir(home)
  (home / '$HOME.jpg').write_text('')
  (home / '~').mkdir()
  assert argument_parser.expanded('$HOME.jpg') == '$HOME.jpg'
  assert argument_parser.expanded('~') == '~'
  assert argument_parser.expanded('$HOME.png') == f'{home}.png'


def test_the_workdir_of_a_run_is_no_folder_called_tilde(home, monkeypatch):
  monkeypatch.chdir(home)
  for text in ('~/run', '$HOME/run', '${HOME}/run'):
    flags = command_line.main_flags([f'--config={_TINY}', f'--workdir={text}', '--output=~/o'], '')
    assert (flags.workdir, flags.output) == (f'{home}/run', f'{home}/o')
    flags = command_line.main_flags([f'--config={_TINY}', f'--workdir={text}'], '')
    assert command_line.from_flags(flags, {})[1] == f'{home}/run'
  assert compare._parse(['~/run', '$HOME/b']).runs == [f'{home}/run', f'{home}/b']
  assert not os.listdir(home)


def test_keys_that_are_paths(home):
  (home / 'cert').write_text('')
  (home / 'set').mkdir()
  config = command_line.load(
    _TINY,
    {
      'data.source': 'folder',
      'data.path': '$HOME/set',
      'data.dir': '~/d',
      'init.from': '$HOME/w',
      'compile_cache.dir': '$SCRATCH_OF_TEST/x',
      'strategy.name': 'parameter_server',
      'strategy.tls_certificate': '~/cert',
      'strategy.tls_key': '$HOME/cert',
    },
  )
  assert config.data.path == f'{home}/set' and config.data.dir == f'{home}/d'
  assert config.init['from'] == f'{home}/w'
  assert config.compile_cache.dir == f'{home}/x'
  assert config.strategy.tls_certificate == f'{home}/cert'
  # It is compared with that of a run that was started so.
  config = command_line.load(_TINY, {'init.from': '~/w'})
  assert config.init['from'] == '~/w'
