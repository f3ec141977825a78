"""A recipe's name, in any folder, and what is nearest to a mistyped one."""

import sys
import textwrap

import pytest

from anp_jax import __main__ as main
from anp_jax.config import command_line, recipes
from tests import builders

_MINE = 'from anp_jax import config\n\n\ndef get_config(variant):\n  return 1\n'


@pytest.fixture
def folder(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  return tmp_path


def test_a_shipped_recipe_is_found_in_any_folder(folder):
  path = recipes.find('configs/lenet.py')
  assert path == str(recipes.shipped() / 'lenet.py')
  config = command_line.load('./configs/resnet_anp.py:tiny', {})
  assert config.model.name == 'resnet18'


def test_a_file_of_the_folder_comes_first(folder):
  builders.write_tree(folder / 'configs', {'lenet.py': _MINE})
  assert recipes.find('configs/lenet.py') == 'configs/lenet.py'
  builders.assert_refused('must return a ConfigDict', command_line.load, 'configs/lenet.py', {})


def test_an_installed_recipe_is_one_of_the_package(folder, monkeypatch):
  builders.write_tree(folder / 'recipes', {'lenet.py': _MINE})
  monkeypatch.setattr(recipes, '_PACKAGE', folder)
  assert recipes.find('configs/lenet.py') == str(folder / 'recipes/lenet.py')


@pytest.mark.parametrize(
  'typed, nearest',
  [
    ('configs/resnet_amp.py', 'configs/resnet_anp.py'),
    ('resnet_anp.py', 'configs/resnet_anp.py'),
    ('mine/lenets.py', 'mine/lenet.py'),
    ('lenet/lenet.py', 'configs/lenet.py'),
  ],
)
def test_a_mistyped_recipe_is_answered_with_the_nearest(folder, typed, nearest):
  builders.write_tree(folder / 'mine', {'lenet.py': _MINE})
  line = builders.refusal(command_line.load, f'{typed}:tiny', {})
  assert line == (f'--config: no file {typed!r}; did you mean {nearest!r}?')


@pytest.mark.parametrize(
  'typed, words',
  [
    ('run/config.json', ['--workdir=run --mode=evaluate', 'recipe (.py)']),
    ('run', ['--config=run is', '--workdir=run --mode=evaluate']),
    ('config.json', ['--workdir=. --mode=evaluate']),
    ('notes.txt', ['--config=notes.txt', 'expected a Python file (.py)']),
    ('recipe', ['--config=recipe', 'expected a Python file (.py)']),
    ('empty.py', ['--config=empty.py', 'no get_config', 'see configs/']),
    ('number.py', ['--config=number.py', 'no get_config']),
    ('zeros.py', ['zeros.py: ', 'null bytes']),
  ],
)
def test_what_is_no_recipe_is_said_with_what_to_type(folder, typed, words, capsys):
  (folder / 'run').mkdir()
  for name in ('run/config.json', 'config.json', 'notes.txt', 'recipe'):
    (folder / name).write_text('{}')
  (folder / 'empty.py').write_text('')
  (folder / 'number.py').write_text('get_config = 3')
  (folder / 'zeros.py').write_bytes(bytes(9))
  assert main.main(['main.py', f'--config={typed}']) == 2
  assert 'anp_config' not in builders.error_line(capsys, *words)


def test_a_recipe_may_have_dataclasses_and_a_helper_beside_it(folder):
  (folder / 'of_a_friend').mkdir()
  (folder / 'of_a_friend' / 'helper_for_recipes.py').write_text('RATE = 0.25\n')
  (folder / 'of_a_friend' / 'mine.py').write_text(
    textwrap.dedent("""
      from __future__ import annotations
      import dataclasses

      import helper_for_recipes
      from anp_jax import config as config_lib

      @dataclasses.dataclass
      class Run:
        seed: int = 7
        none: dataclasses.KW_ONLY = None

      def get_config(variant=''):
        c = config_lib.base()
        c.seed = Run().seed
        c.optimizer.learning_rate = helper_for_recipes.RATE
        return c
    """)
  )
  before = list(sys.path)
  config = command_line.load('of_a_friend/mine.py', {})
  assert (config.seed, config.optimizer.learning_rate) == (7, 0.25)
  assert sys.path == before
  assert 'anp_config' not in sys.modules
  sys.modules.pop('helper_for_recipes')
