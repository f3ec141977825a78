"""Tests of the set-up: which build for which card, bounds, the Makefile."""

import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from unittest import mock

import pytest

from scripts import hardware
from tests import builders, launching


@pytest.fixture(scope='module')
def setup():
  with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(launching.ROOT / 'scripts')  # it finds `hardware` beneath itself
    from scripts import setup
  return setup


# Compute capabilities and branches of drivers as NVIDIA lists them.
@pytest.mark.parametrize(
  ('lines', 'expected'),
  [
    ('580.65.06, 9.0, NVIDIA H200', 'cuda13'),
    ('580.65.06, 7.5, Tesla T4', 'cuda13'),
    # Driver too old for CUDA 13 only.
    ('579.99, 9.0, NVIDIA H100', 'cuda12'),
    ('525.60.13, 8.0, NVIDIA A100', 'cuda12'),
    # Card too old for CUDA 13 only: Volta, Pascal, Maxwell.
    ('580.65.06, 7.0, Tesla V100-SXM2-16GB', 'cuda12'),
    ('580.65.06, 5.2, Tesla M40', 'cuda12'),
    # Too old for both: the driver, then the card.
    ('520.61.05, 8.0, NVIDIA A100', 'cpu'),
    ('470.256.02, 3.7, Tesla K80', 'cpu'),
    ('525.60.13, 5.0, NVIDIA GeForce GTX 750', 'cpu'),
    # The answer of a driver that does not know compute_cap.
    ('470.256.02, Tesla V100-SXM2-16GB', 'cpu'),
    ('580.65.06, [N/A], Some new card', 'cuda12'),
    # The oldest card that any wheel serves decides.
    ('580.1, 9.0, H100\n580.1, 7.0, V100', 'cuda12'),
    ('580.1, 8.6, RTX 3090\n580.1, 5.0, GTX 750', 'cuda13'),
    ('', 'cpu'),
    ('No devices were found', 'cpu'),
  ],
)
def test_choice_of_build(lines, expected):
  gpus = hardware.parse_gpus(lines)
  # A GPU in a TPU's host is what a person put there.
  assert hardware.choose(gpus, True)[0] == (expected if gpus else 'tpu')
  chosen, reason = hardware.choose(gpus, False)
  assert chosen == expected
  assert '\n' not in reason
  if expected == 'cpu' and gpus:
    assert 'CPU build' in reason
  if '7.0, Tesla V100' in lines:
    for word in ('Maxwell', 'Pascal', 'Volta', 'GTX', 'P100', 'V100'):
      assert word in reason


def test_nvidia_smi_is_read(tmp_path, monkeypatch):
  # An old driver refuses the query with compute_cap and answers the second.
  tool = tmp_path / 'nvidia-smi'
  builders.write_program(
    tool,
    'case "$1" in *compute_cap*) echo "not a valid field"; exit 2;; esac\n'
    'echo "470.82.01, Tesla V100"',
  )
  monkeypatch.setenv('PATH', f'{tmp_path}:{os.environ["PATH"]}')
  assert hardware._find_gpus() == [('Tesla V100', (470, 82, 1), None)]
  builders.write_program(tool, 'exit 9')  # No driver loaded.
  assert hardware._find_gpus() == []


@pytest.mark.parametrize(
  ('requested', 'recorded', 'expected'),
  [
    ('auto', None, 'detected'),
    ('auto', 'cpu', 'detected'),
    ('auto', 'cuda12', 'cuda12'),
    ('cuda12', None, 'cuda12'),
    ('cpu', 'cuda13', 'cpu'),
  ],
)
def test_what_auto_means(setup, requested, recorded, expected):
  chosen, _ = setup.resolve_accelerator(requested, recorded, lambda: ('detected', ''))
  assert chosen == expected


@pytest.mark.parametrize(
  ('version', 'supported'),
  [
    ((3, 10, 13), False),
    ((3, 11, 0), True),
    ((3, 12, 1, 'final', 0), True),
    ((3, 13), True),
    ((3, 14, 0), False),
    ((2, 7, 18), False),
  ],
)
def test_which_python_will_do(setup, version, supported):
  assert setup.python_supported(version) is supported


def test_python_bounds_agree_with_the_package(setup):
  project = tomllib.loads((launching.ROOT / 'pyproject.toml').read_text())['project']
  oldest, newest = setup.OLDEST_PYTHON, setup.NEWEST_PYTHON
  assert project['requires-python'] == (f'>={oldest[0]}.{oldest[1]},<{newest[0]}.{newest[1] + 1}')


@pytest.mark.parametrize(
  ('current', 'named', 'recorded', 'accelerator_wanted', 'expected'),
  [
    (None, None, None, 'cpu', True),  # Missing or broken.
    ((3, 10), None, None, 'cpu', True),  # Too old.
    ((3, 12), None, 'cpu', 'cpu', False),
    ((3, 12), (3, 12), 'cpu', 'cpu', False),
    ((3, 12), (3, 13), 'cpu', 'cpu', True),
    ((3, 12), None, None, 'cuda13', False),  # A person's own.
    ((3, 12), None, 'cpu', 'cuda13', False),  # Adds a plugin.
    ((3, 12), None, 'cuda12', 'cuda12', False),
    ((3, 12), None, 'cuda12', 'cuda13', True),  # Would leave the old one.
    ((3, 12), None, 'cuda12', 'cpu', True),
  ],
)
def test_when_venv_is_made_anew(setup, current, named, recorded, accelerator_wanted, expected):
  assert setup.must_recreate(current, named, recorded, accelerator_wanted) is expected


def test_second_set_up_waits(setup, tmp_path):
  # A process of its own: record locks do not hold inside one.
  path = tmp_path / 'lock'
  code = (
    'import sys, pathlib, time; sys.path.insert(0, sys.argv[1])\n'
    'import setup\n'
    'with setup.locked(pathlib.Path(sys.argv[2])):\n'
    '  print("held", flush=True); time.sleep(0.5)\n'
    '  print(time.time(), flush=True)\n'
  )
  with launching.start('-c', code, launching.ROOT / 'scripts', path) as first:
    first.hears('held')
    with setup.locked(path):
      entered = time.time()
    assert entered >= float(first.stdout.readline())


@pytest.fixture
def bare(setup, tmp_path, monkeypatch):
  """A checkout in which pip and venv only leave notes in the list given."""
  for name in ('requirements.txt', 'pyproject.toml'):
    shutil.copy(launching.ROOT / name, tmp_path / name)
  done = []

  def make_venv(venv):
    shutil.rmtree(venv, ignore_errors=True)
    venv.mkdir()
    done.append('venv')

  monkeypatch.setattr(setup, 'ROOT', tmp_path)
  monkeypatch.setattr(setup, '_make_venv', make_venv)
  monkeypatch.setattr(setup, '_install', lambda venv, requirement: done.append(requirement))
  monkeypatch.setattr(
    setup, '_venv_python', lambda venv: sys.version_info[:2] if venv.exists() else None
  )
  return tmp_path, done


def test_set_up_is_done_once(setup, bare):
  root, done = bare
  setup.set_up('cpu', dev=True, pin_python=False)
  assert done[:2] == ['venv', f'--editable={root}[dev]']
  assert done[2].startswith('onednn-cpu-gomp')  # alone: it may be missing
  setup.set_up('cpu', dev=True, pin_python=False)
  assert len(done) == 3
  with open(root / 'requirements.txt', 'a') as file:
    file.write('another>=1,<2\n')
  setup.set_up('cpu', dev=True, pin_python=False)
  assert done[3:] == done[1:3]  # into the same environment
  setup.set_up('cpu', dev=False, pin_python=False)
  assert done[5] == f'--editable={root}'


def test_set_up_cut_short_is_not_believed(setup, bare, monkeypatch):
  root, done = bare
  error = setup.SetupError('no network')
  with monkeypatch.context() as patch:
    patch.setattr(setup, '_install', mock.Mock(side_effect=error))
    with pytest.raises(setup.SetupError):
      setup.set_up('cuda12', dev=True, pin_python=False)
  stamp = root / '.venv' / setup.STAMP
  assert stamp.stat().st_mtime < (root / 'requirements.txt').stat().st_mtime
  # What it was for is not forgotten: another plugin gets a new environment.
  setup.set_up('cuda13', dev=True, pin_python=False)
  assert done[:2] == ['venv', 'venv']
  assert setup.read_json(stamp)['accelerator'] == 'cuda13'
  # A machine without a GPU keeps it.
  setup.set_up('auto', dev=True, pin_python=False)
  assert len(done) == 3
  stamp.write_text('{"cut of')
  setup.set_up('cpu', dev=True, pin_python=False)
  assert setup.read_json(stamp)['accelerator'] == 'cpu'


def test_set_up_is_whole_without_what_an_index_lacks(setup, bare, monkeypatch, capsys):
  root, _ = bare

  def fail(_, requirement):
    if requirement.startswith('onednn'):
      raise setup.SetupError('no such package')

  monkeypatch.setattr(setup, '_install', fail)
  setup.set_up('cpu', dev=False, pin_python=False)
  assert 'going on without onednn-cpu-gomp' in capsys.readouterr().err
  stamp = setup.read_json(root / '.venv' / setup.STAMP)
  assert stamp['accelerator'] == 'cpu' and 'requirements' in stamp


def test_compilers_have_an_environment_of_their_own(setup, bare):
  root, done = bare
  setup.set_up('cpu', dev=True, pin_python=False)
  setup.set_up('portability', dev=True, pin_python=False)
  assert done[3:] == ['venv', f'--editable={root}[portability,dev]']
  for name, accelerator in (('', 'cpu'), ('-portability', 'portability')):
    stamp = root / f'.venv{name}' / setup.STAMP
    assert setup.read_json(stamp)['accelerator'] == accelerator
  # Neither undoes the other.
  setup.set_up('portability', dev=True, pin_python=False)
  setup.set_up('cpu', dev=True, pin_python=False)
  assert len(done) == 5


def _extras():
  project = tomllib.loads((launching.ROOT / 'pyproject.toml').read_text())['project']
  return project['optional-dependencies']


def _requirement_lines():
  lines = []
  for name in ('requirements.txt', 'requirements-peers.txt'):
    for line in (launching.ROOT / name).read_text().splitlines():
      line = line.partition('#')[0].strip()
      if line:
        lines.append(line)
  # jax's own extras take their bounds from jax's line.
  extras = _extras().values()
  return lines + [line for extra in extras for line in extra if not line.startswith('jax[')]


def test_every_requirement_is_bounded():
  for line in _requirement_lines():
    bounds = re.fullmatch(r'[A-Za-z0-9_.-]+(.*)', line.partition(';')[0].strip())[1]
    assert re.fullmatch(r'==[\d.]+|>=[\d.]+,<[\d.]+', bounds), line


def test_every_extra_exists(setup):
  extras = _extras()
  for names in [*setup.EXTRAS.values(), *setup.OPTIONAL.values(), ('dev',)]:
    assert extras.keys() >= set(names)
  assert extras['cuda'] == ['jax[cuda13]']
  # cuDNN 9.11 dropped the cards that CUDA 12 is here for.
  assert any(re.fullmatch(r'nvidia-cudnn-cu12>=.*,<9\.11', line) for line in extras['cuda12'])


@pytest.fixture
def checkout(tmp_path):
  """The files make needs, and a PATH on which every Python fails."""
  if not shutil.which('make'):
    pytest.skip('no make')
  root = tmp_path / 'checkout'
  (root / 'scripts').mkdir(parents=True)
  for name in ('Makefile', 'requirements.txt', 'pyproject.toml'):
    shutil.copy(launching.ROOT / name, root / name)
  for name in ('setup.py', 'hardware.py'):
    shutil.copy(launching.ROOT / 'scripts' / name, root / 'scripts' / name)
  fakes = tmp_path / 'fakes'
  fakes.mkdir()
  for name in ('python3', 'python3.13', 'python3.12', 'python3.11'):
    builders.write_program(fakes / name, 'exit 127')
  return root, fakes


def _make(root, fakes, *arguments):
  environment = {
    key: value
    for key, value in os.environ.items()
    if not key.startswith('MAKE') and key not in ('PYTHON', 'ACCELERATOR')
  }
  environment['PATH'] = f'{fakes}:{os.environ["PATH"]}'
  return subprocess.run(
    ['make', '--no-print-directory', '-C', str(root), *arguments],
    env=environment,
    capture_output=True,
    text=True,
    timeout=30,
    check=False,
  )


@pytest.mark.parametrize('target', ['setup', 'test', 'demo'])
def test_make_without_python_says_so(checkout, target):
  named = f'{checkout[1]}/python3.12'
  assert f'found at {named}:' in _make(*checkout, target, f'PYTHON={named}').stderr
  done = _make(*checkout, target)
  assert done.returncode != 0
  makes = [line for line in done.stderr.splitlines() if not line.startswith('make: ')]
  assert makes == [
    'No Python 3.11, 3.12 or 3.13 with venv found: install one, or name it: '
    'make PYTHON=/path/to/python3'
  ]
  assert not (checkout[0] / '.venv').exists()


def test_make_takes_the_first_python_that_will_do(checkout):
  root, fakes = checkout
  # Answers like a good Python and shows how it is called.
  builders.write_program(fakes / 'python3.12', 'echo "$0 $*"')
  done = _make(root, fakes, 'setup', 'ACCELERATOR=cuda12')
  assert done.returncode == 0, done.stderr
  assert done.stdout.splitlines() == [f'{fakes}/python3.12 scripts/setup.py --accelerator=cuda12']


def test_make_repeats_set_up_only_for_new_requirements(setup, checkout):
  root, fakes = checkout
  stamp = root / '.venv' / setup.STAMP
  stamp.parent.mkdir()
  stamp.write_text('{}')
  later = stamp.stat().st_mtime + 10
  os.utime(stamp, (later, later))
  assert _make(root, fakes, '-n', 'test').stdout.count('setup.py') == 0
  # An accelerator that is named has to be compared with what .venv has.
  named = _make(root, fakes, '-n', 'test', 'ACCELERATOR=cuda12')
  assert named.stdout.count('--accelerator=cuda12') == 1
  later += 10
  os.utime(root / 'requirements.txt', (later, later))
  again = _make(root, fakes, '-n', 'test')
  assert again.stdout.count('--accelerator=auto') == 1


def test_make_compiles_for_other_machines_apart(checkout):
  done = _make(*checkout, '-n', 'portability', 'ACCELERATOR=cuda12')
  # Of two, setup.py takes the last.
  assert done.stdout.index('cuda12') < done.stdout.index('=portability')
  assert '.venv-portability/bin/python -m pytest' in done.stdout
  for target in ('test', 'test-all'):
    makes = _make(*checkout, '-n', target).stdout
    chosen = re.findall(r'-m "(.*?)"', makes)
    assert chosen
    for which in chosen:
      assert re.search(r'\bnot \([a-z ]*portability\b', which), which


def test_help_is_the_default(checkout):
  done = _make(*checkout)
  assert done.returncode == 0
  for target in ('setup', 'demo', 'test', 'test-all', 'lint', 'bench'):
    assert re.search(rf'^  make {target} ', done.stdout, re.MULTILINE)
