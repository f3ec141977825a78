"""The wheel, installed in an environment of its own, in an empty folder."""

import json
import shutil
import sys
import sysconfig
import venv
import zipfile

from PIL import Image
import pytest

from tests import launching

pytestmark = pytest.mark.slow
_SOURCES = ('anp_jax', 'configs', 'pyproject.toml', 'setup.py', 'requirements.txt', 'LICENSE')
_TINY = '--config=configs/resnet_anp.py:tiny'
# In every Python of the environment: which files of the checkout are opened.
_WATCH = """
import os
import sys

def _note(event, arguments):
  path = arguments[0] if event == 'open' else None
  if isinstance(path, str) and path.startswith({root!r}) and not (
    path.startswith({skipped!r})
  ):
    os.write(_log, (path + '\\n').encode())

_log = os.open({log!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
sys.addaudithook(_note)
"""


def _build(folder):
  """The wheel, of copies: an earlier build's files would be taken too."""
  for name in _SOURCES:
    path = launching.ROOT / name
    if path.is_dir():
      ignored = shutil.ignore_patterns('__pycache__')
      shutil.copytree(path, folder / 'source' / name, ignore=ignored)
    else:
      (folder / 'source').mkdir(exist_ok=True)
      shutil.copy(path, folder / 'source' / name)
  _pip('wheel', '--no-deps', '--no-build-isolation', f'-w{folder}', str(folder / 'source'))
  (wheel,) = folder.glob('*.whl')
  return wheel


def _pip(*arguments):
  flags = '--disable-pip-version-check', '--quiet'
  launching.python('-m', 'pip', *flags, *arguments, status=0)


class _Installation:
  """An environment with the wheel, and the packages of this one.

  Attributes:
    wheel: that is installed.
    bin: the folder of its commands.
    folder: an empty one, where commands run.
  """

  def __init__(self, root):
    venv.create(root / 'venv', symlinks=True)
    self.bin = root / 'venv' / 'bin'
    self.folder = root / 'empty'
    self._log = root / 'opened.txt'
    self.folder.mkdir()
    self.wheel = _build(root)
    _pip(f'--python={self.bin / "python"}', 'install', '--no-deps', '--no-index', str(self.wheel))
    (site,) = (root / 'venv').glob('lib/python*/site-packages')
    packages = sysconfig.get_path('purelib')
    # This environment, and the compile cache of all tests; see conftest.py.
    skipped_paths = sys.prefix, str(launching.ROOT / '.pytest_cache')
    fields = {'root': f'{launching.ROOT}/', 'skipped': skipped_paths}
    (site / 'checkout_watch.py').write_text(_WATCH.format(log=str(self._log), **fields))
    # After this environment's own packages, and without their .pth files.
    (site / 'packages.pth').write_text(f'{packages}\nimport checkout_watch\n')

  def run(self, name, *arguments, status=0):
    """Runs a command, or Python; returns its output and its errors."""
    options = {'status': status, 'folder': self.folder, 'PYTHONPATH': '', 'VIRTUAL_ENV': ''}
    done = launching.command(self.bin / name, *arguments, **options)
    return done.stdout, done.stderr

  def opened(self):
    """The files of the checkout that were opened since the last call."""
    text = self._log.read_text()
    self._log.write_text('')
    return text.splitlines()


@pytest.fixture(scope='module')
def installation(tmp_path_factory):
  return _Installation(tmp_path_factory.mktemp('wheel'))


def test_the_wheel_holds_every_file_of_the_package(installation):
  with zipfile.ZipFile(installation.wheel) as archive:
    names = {n for n in archive.namelist() if '.dist-info/' not in n}
  files = {
    str(path.relative_to(launching.ROOT))
    for path in (launching.ROOT / 'anp_jax').rglob('*')
    if path.is_file() and '__pycache__' not in path.parts
  }
  recipes = (launching.ROOT / 'configs').glob('*.py')
  assert names == files | {f'anp_jax/recipes/{path.name}' for path in recipes}


def test_a_network_is_trained_and_used_in_an_empty_folder(installation):
  run = installation.run
  run('anp-train', _TINY, '--workdir=run', '--config.duration=2 steps', '--config.model.name=lenet')
  Image.new('RGB', (40, 30), (200, 30, 30)).save(installation.folder / 'photo.png')
  output, _ = run('anp-predict', '--checkpoint=run', 'photo.png', '--top=1')
  assert output.splitlines()[-1].startswith('photo.png,')
  run('anp-compare', 'run')
  assert (installation.folder / 'comparison.html').is_file()
  assert not installation.opened()


@pytest.mark.soak
def test_a_study_starts_its_processes(installation):
  study = 'anp-study', 'strategies', '--config=configs/lenet.py', '--strategies=sync'
  keys = {'data.source': 'synthetic', 'duration': '4 steps', 'batch_size': 8}
  installation.run(*study, '--workdir=study', '--nodes=2', *launching.typed(keys))
  assert (installation.folder / 'study' / 'study.md').is_file()
  _, errors = installation.run(*study, '--workdir=jobs', '--nodes=1', '--slurm', status=2)
  assert 'start the study in the checkout of anp_jax' in errors
  assert not installation.opened()


def test_a_plan_needs_no_checkout(installation):
  output, _ = installation.run(
    'anp-plan', _TINY, '--device=h200', '--nodes=1,2', '--link=ib-ndr400x8'
  )
  points = json.loads(output.splitlines()[-1])['points']
  assert [p['nodes'] for p in points] == [1, 2]
  assert not installation.opened()


@pytest.mark.parametrize('name', ['prepare', 'study'])
def test_help_names_the_command(installation, name):
  output, _ = installation.run(f'anp-{name}', '--help')
  assert output.startswith(f'usage: anp-{name} ')
  assert not installation.opened()


def test_use_of_the_checkout_would_be_seen(installation):
  path = str(launching.ROOT / 'main.py')
  installation.run('python', '-c', f'open({path!r}).close()')
  assert installation.opened() == [path]
