"""What the Dockerfile and the Apptainer recipe copy is there, and alike."""

import re
import tomllib

from tests import launching

_ROOT = launching.ROOT
_TARGET = '/opt/anp_jax'


def _docker():
  """The Dockerfile's instructions: [(name, arguments), ...]."""
  text = re.sub(r'^#.*\n', '', (_ROOT / 'Dockerfile').read_text(), flags=re.M)
  lines = text.replace('\\\n', ' ').splitlines()
  return [tuple(line.split(None, 1)) for line in lines if line.strip()]


def _copied():
  """What the Dockerfile copies, by where it comes to lie."""
  copied = {}
  for name, arguments in _docker():
    if name == 'COPY':
      *sources, target = arguments.split()
      for source in sources:
        is_folder = target.endswith('/')
        copied[source] = target + source if is_folder else target
  return copied


def _apptainer(section):
  text = (_ROOT / 'scripts/anp_jax.def').read_text()
  return re.search(rf'^%{section}\n(.*?)(?=^%|\Z)', text, re.M | re.S)[1]


def test_both_images_hold_the_same_files_which_exist():
  copied = _copied()
  assert copied == dict(line.split() for line in _apptainer('files').strip().splitlines())
  for source, target in copied.items():
    assert (_ROOT / source).exists(), source
    assert target == f'{_TARGET}/{source}'


def test_docker_is_given_all_that_it_copies_and_nothing_else():
  lines = (_ROOT / '.dockerignore').read_text().splitlines()
  assert lines[1] == '*'
  assert {line[1:] for line in lines if line.startswith('!')} == set(_copied())


def test_both_images_are_set_up_by_the_same_command():
  instructions = dict(reversed(_docker()))
  run = ' '.join(instructions['RUN'].split())
  for command in (
    f'python3 {_TARGET}/scripts/setup.py --no-dev --accelerator=',
    f'{_TARGET}/.venv/bin/python -m compileall -q {_TARGET}/anp_jax {_TARGET}/configs',
  ):
    assert command in run
    assert command in ' '.join(_apptainer('post').replace('\\\n', ' ').split())
  assert instructions['ARG'] in _apptainer('arguments')
  base = re.search('^From: (.*)$', (_ROOT / 'scripts/anp_jax.def').read_text(), re.M)[1]
  assert instructions['FROM'] == base


def test_the_image_starts_a_command_of_the_package():
  instructions = dict(_docker())
  project = tomllib.loads((_ROOT / 'pyproject.toml').read_text())['project']
  assert instructions['ENTRYPOINT'] == '["anp-train"]'
  assert 'anp-train' in project['scripts']
  assert f'{_TARGET}/.venv/bin:' in instructions['ENV']
  assert f'{_TARGET}/.venv/bin:' in _apptainer('environment')
