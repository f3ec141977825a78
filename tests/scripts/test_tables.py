"""scripts/tables.sh and pack_arrays: its commands are those of results, and data is packed."""

import csv
import os
import pathlib
import shlex
import subprocess

import numpy as np
from PIL import Image
import pytest

from anp_jax.data.sources import arrays
from scripts import pack_arrays
from tests import builders, typed_commands

_ROOT = pathlib.Path(__file__).parents[2]


def _run(*arguments, **variables):
  """Runs it without the caller's own data."""
  data = {'MNIST', 'CIFAR10', 'SEEDS', 'SMALL', 'OUT'}
  environment = {k: v for k, v in os.environ.items() if k not in data} | variables
  command = ['scripts/tables.sh', *arguments]
  return subprocess.run(command, cwd=_ROOT, env=environment, text=True, stdout=-1)


def _listed(**variables):
  lines = _run('--list', **variables).stdout.splitlines()
  return dict(line.split(': ', 1) for line in lines)


def _words(command):
  """What is typed, in any order; a row has `4 epochs` where a part has `4epochs`."""
  words = {word.replace(' ', '') for word in shlex.split(command)}
  return frozenset(word for word in words if not word.startswith('--workdir='))


def test_each_command_is_that_of_rows():
  with open(_ROOT / 'results/strategies.csv', newline='') as file:
    commands = {row['command'] for row in csv.DictReader(file)}
  rows = {_words(command) for several in commands for command in several.split('; ')}
  assert {name for name, command in _listed().items() if _words(command) not in rows} == set()


@pytest.mark.parametrize('small', ['', '1'])
def test_every_command_parses(small):
  for command in _listed(SMALL=small, SEEDS='3,4').values():
    ((module, arguments),) = typed_commands.split(command)
    typed_commands.check(module, arguments)
    assert small or '--seeds=3,4' in arguments


def _write_tree(folder):
  """Two classes: one image of each colour to train with, and one of the second to test with."""
  for place, level in (('train/red/b', 10), ('train/red/a', 20), ('train/sky/a', 30)):
    _write(folder / f'{place}.png', level)
  (folder / 'validation/red').mkdir(parents=True)
  _write(folder / 'validation/sky/c.png', 40)


def _write(path, level):
  path.parent.mkdir(parents=True, exist_ok=True)
  Image.new('RGB', (3, 2), (level, 0, level + 1)).save(path)


def test_a_tree_of_images_becomes_the_arrays_that_a_run_reads(tmp_path):
  _write_tree(tmp_path)
  np.savez(tmp_path / 'packed.npz', **pack_arrays.pack(tmp_path))
  packed = {}
  for split in ('train', 'test'):
    source = arrays.Arrays(str(tmp_path / 'packed.npz'), split)
    images, labels = source.read(np.arange(len(source)))
    assert {image.shape for image in images} == {(2, 3, 3)}
    assert source.vocabulary.names == ('red', 'sky')
    packed[split] = [(image[0, 0].tolist(), label) for image, label in zip(images, labels)]
  assert packed == {
    'train': [([20, 0, 21], 0), ([10, 0, 11], 0), ([30, 0, 31], 1)],
    'test': [([40, 0, 41], 1)],
  }


def test_two_folders_to_test_with_are_refused(tmp_path):
  _write_tree(tmp_path)
  (tmp_path / 'extra').mkdir()
  with pytest.raises(SystemExit, match='expected `train` and one folder to test with, not 2'):
    pack_arrays.pack(tmp_path)


def test_the_images_are_packed_once_for_the_parts_that_read_them(tmp_path):
  _write_tree(tmp_path / 'set')
  python = builders.write_program(
    tmp_path / 'python',
    f'echo "$2" >>{tmp_path}/calls\n[ "$2" != scripts.pack_arrays ] || touch "$4"',
  )
  variables = {'PYTHON': str(python), 'OUT': str(tmp_path / 'out'), 'CIFAR10': f'{tmp_path}/set'}
  assert _run('spread', 'cifar10_sync', 'resnet20_sync', **variables).returncode == 0
  study, pack = 'anp_jax.tools.study', 'scripts.pack_arrays'
  assert (tmp_path / 'calls').read_text().split() == ['pip', study, pack, study, study]


@pytest.mark.slow
def test_a_small_part_writes_its_page(tmp_path):
  done = _run('converged_32', SMALL='1', OUT=str(tmp_path))
  assert done.returncode == 0, done.stdout
  page = (tmp_path / 'converged_32/study.md').read_text()
  assert '| parameter_server | dana ' in page
