"""A recipe's name, in any folder, and what is nearest to a mistyped one."""

import pytest

from anp_jax import config as config_lib
from anp_jax.config import command_line
from anp_jax.config import recipes

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
  # By the name that it had before.
  assert command_line.load('configs/kernel_split_cifar10.py', {})


def test_a_file_of_the_folder_comes_first(folder):
  (folder / 'configs').mkdir()
  (folder / 'configs' / 'lenet.py').write_text(_MINE)
  assert recipes.find('configs/lenet.py') == 'configs/lenet.py'
  with pytest.raises(config_lib.ConfigError, match='must return a ConfigDict'):
    command_line.load('configs/lenet.py', {})


def test_an_installed_recipe_is_one_of_the_package(folder, monkeypatch):
  (folder / 'recipes').mkdir()
  (folder / 'recipes' / 'lenet.py').write_text(_MINE)
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
  (folder / 'mine').mkdir()
  (folder / 'mine' / 'lenet.py').write_text(_MINE)
  with pytest.raises(config_lib.ConfigError) as e:
    command_line.load(f'{typed}:tiny', {})
  assert str(e.value) == (
    f'--config: no file {typed!r}; did you mean {nearest!r}?'
  )
