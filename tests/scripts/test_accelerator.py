"""scripts/accelerator.sh: its parts, their commands, and what becomes of one that fails."""

import json
import os
import pathlib
import re
import subprocess

import pytest

from tests import builders, typed_commands

_ROOT = pathlib.Path(__file__).parents[2]
_SCRIPT = 'scripts/accelerator.sh'


def _run(*arguments, **variables):
  environment = {**os.environ, **variables}
  return subprocess.run([_SCRIPT, *arguments], cwd=_ROOT, env=environment, text=True, stdout=-1)


def _listed(**variables):
  lines = _run('--list', **variables).stdout.splitlines()
  return dict(line.split(': ', 1) for line in lines)


def test_the_page_names_the_parts_in_their_order():
  text = (_ROOT / 'docs/gpu.md').read_text()
  (names,) = re.findall(r'The parts: ([^.]*)\.', text)
  assert re.findall(r'`(\w+)`', names) == list(_listed())


@pytest.mark.parametrize('small', ['', '1'])
def test_every_command_parses(small):
  for command in _listed(SMALL=small).values():
    ((module, arguments),) = typed_commands.split(command)
    typed_commands.check(module, arguments)


def test_a_part_that_fails_does_not_stop_the_next(tmp_path):
  python = builders.write_program(
    tmp_path / 'python',
    'case "$2" in\n'
    "  *resume) echo '{\"early\": 1}'; echo 'ValueError: a bad card' >&2; exit 3;;\n"
    '  *plan) echo text; echo \'{"rate": 2}\';;\n'
    '  anp_jax) for a; do case $a in --workdir=*) w=${a#*=};; esac; done\n'
    '    case $w in */cifar10) file=ensemble;; *) file=benchmark;; esac\n'
    '    mkdir -p $w; echo \'{"wait": 3}\' >$w/$file.json;;\n'
    '  *) echo "not asked for"; exit 1;;\nesac',
  )
  out = tmp_path / 'out'
  done = _run('benchmark', 'resume', 'cifar10', 'plan', PYTHON=str(python), OUT=str(out))
  assert done.returncode == 1
  endings = [re.sub(r' +\d+ s +', ' ', x) for x in done.stdout.splitlines()[-4:]]
  assert endings == [
    'resume failed: ValueError: a bad card',
    'cifar10 done',
    'plan done',
    'benchmark done',
  ]
  assert {path.stem: json.loads(path.read_text()) for path in out.glob('*.json')} == {
    'resume': {'early': 1},
    'cifar10': {'wait': 3},
    'plan': {'rate': 2},
    'benchmark': {'wait': 3},
  }
  assert _run('plan', PYTHON=str(python), OUT=str(out)).returncode == 0
  assert _run('plans').returncode == 2


@pytest.mark.slow
def test_a_small_part_needs_no_tensorflow(tmp_path):
  """`plan` compiles and times a step; the modules that a bare machine lacks fail to import."""
  for name in ('tensorflow', 'tensorboardX', 'pyarrow', 'matplotlib', 'array_record'):
    (tmp_path / f'{name}.py').write_text('raise ImportError("blocked")')
  done = _run('plan', SMALL='1', OUT=str(tmp_path), PYTHONPATH=str(tmp_path))
  assert done.returncode == 0, done.stdout
  batches = json.loads((tmp_path / 'plan.json').read_text())['measured']['batches']
  assert [images for images, _ in batches] == [8, 16]
  assert all(seconds > 0 for _, seconds in batches)
