#!/usr/bin/env python3
"""Makes `.venv`: finds the accelerator and installs what a run on it needs.

Standard library only: it runs on a bare Python, before anything is installed.
`make setup`, `make demo` and `make test` call it; by hand:

    python3 scripts/setup.py --accelerator=cuda12

`--accelerator=portability` makes `.venv-portability` instead, with the
compilers of all accelerators and none of their drivers' libraries.

It may be called by many processes on a shared file system at once: one does
the work, the others wait and then find it done.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import hashlib
import json
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tempfile

import hardware

ROOT = pathlib.Path(__file__).resolve().parent.parent
STAMP = 'anp_jax-setup.json'
MANIFEST = 'wheelhouse.json'

OLDEST_PYTHON = (3, 11)
NEWEST_PYTHON = (3, 13)

# Extras of pyproject.toml that each accelerator needs.
EXTRAS = {
  'cpu': (),
  'cuda12': ('cuda12',),
  'cuda13': ('cuda',),
  'tpu': ('tpu',),
  'portability': ('portability',),
}


# Extras that an index may lack: set-up goes on without them.
OPTIONAL = {'cpu': ('onednn',)}


# As pip writes them: a first line that names the Python could be too long.
_COMMAND = """\
#!/bin/sh
'''exec' '{python}' "$0" "$@"
' '''
from {module} import {function}

if __name__ == '__main__':
  {function}()
"""


class SetupError(Exception):
  """What went wrong, in one line for the person at the terminal."""


# ------------------------------------------------------------------ decisions


def python_supported(version) -> bool:
  """Whether a (major, minor, ...) version of Python can run the project."""
  return OLDEST_PYTHON <= tuple(version[:2]) <= NEWEST_PYTHON


def resolve_accelerator(
  requested: str, recorded: str | None, packed: str | None, detect
) -> tuple[str, str]:
  """Settles what 'auto' means.

  Args:
    requested: 'auto' or an accelerator's name, which always wins.
    recorded: what `.venv` is set up for already, if it is.
    packed: what `./wheelhouse` was packed for, if there is one.
    detect: a function that looks at the machine; called only if it matters.

  Returns:
    The accelerator and the reason.
  """
  if requested != 'auto':
    return requested, 'asked for'
  # A login node must not undo what a compute node, or a person, settled.
  if recorded not in (None, 'cpu'):
    return recorded, '.venv has it; to change it name another: ACCELERATOR=...'
  if packed is not None:
    return packed, './wheelhouse was packed for it'
  return detect()


def must_recreate(python_version, named, recorded: str | None, expected: str) -> bool:
  """Whether an existing `.venv` has to be made again.

  Args:
    python_version: (major, minor) of its Python; None if that is broken.
    named: (major, minor) that the person asked for, or None.
    recorded: the accelerator it was set up for, if known.
    expected: the accelerator to set up for.
  """
  if python_version is None or not python_supported(python_version):
    return True
  if named is not None and python_version != named:
    return True
  # Two CUDA plugins side by side confuse JAX, and pip removes neither.
  return recorded not in (None, 'cpu', expected)


def check_wheelhouse(manifest: dict, python: str, accelerator: str) -> None:
  """Raises SetupError if the packed wheels cannot serve this set-up."""
  here = {'python': python, 'machine': platform.machine()}
  for key, value in here.items():
    if manifest.get(key, value) != value:
      raise SetupError(
        f'./wheelhouse was packed for {key} {manifest[key]}, this is {value}: '
        'pack it again here, name another PYTHON=..., or remove it'
      )
  packed = manifest.get('accelerator', accelerator)
  if accelerator not in ('cpu', packed):
    raise SetupError(
      f'./wheelhouse was packed for {packed}, not {accelerator}: pack it '
      f'again with make wheelhouse ACCELERATOR={accelerator}'
    )


# --------------------------------------------------------------------- set-up


def folder(accelerator: str) -> pathlib.Path:
  """The environment of an accelerator: one for all that are run on."""
  suffix = '-portability' if accelerator == 'portability' else ''
  return ROOT / f'.venv{suffix}'


def requirements(accelerator: str, dev: bool) -> list[str]:
  """All requirements of a set-up, as pip takes them, without comments."""
  lines = (ROOT / 'requirements.txt').read_text().splitlines()
  listed = [line.partition('#')[0].strip() for line in lines]
  project = _project()
  extras = EXTRAS[accelerator] + (('dev',) if dev else ())
  for extra in extras:
    listed += project['optional-dependencies'][extra]
  return [line for line in listed if line]


def optional(accelerator: str) -> list[str]:
  """Requirements without which a set-up is whole, but slower."""
  project = _project()
  extras = OPTIONAL.get(accelerator, ())
  return [line for extra in extras for line in project['optional-dependencies'][extra]]


def _project() -> dict:
  """What pyproject.toml says of the package."""
  # Not at the top: an old Python must reach the line that says it is too old.
  import tomllib

  return tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']


def digest(listed: list[str]) -> str:
  """A name for a list of requirements that changes when any of them does."""
  return hashlib.sha256('\n'.join(sorted(listed)).encode()).hexdigest()


@contextlib.contextmanager
def locked(path: pathlib.Path):
  """Holds a lock that also holds between the machines of a cluster.

  POSIX record locks, because NFS, Lustre and GPFS carry those to all clients
  and the kernel drops them with a process that dies. The file itself stays:
  to remove it would let two processes lock two files of one name.
  """
  with open(path, 'a+') as file:
    try:
      try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
          raise
        file.seek(0)
        _say(f'waiting for the set-up that runs as {file.read() or "?"}')
        fcntl.lockf(file, fcntl.LOCK_EX)
    except OSError as error:
      _say(
        f'no lock on this file system ({error.strerror}): set up once by hand, '
        'not from several processes'
      )
    file.seek(0)
    file.truncate()
    file.write(f'process {os.getpid()} on {platform.node()}')
    file.flush()
    yield


def read_json(path: pathlib.Path) -> dict:
  """The object in a file; empty where there is none."""
  try:
    return json.loads(path.read_text())
  except (OSError, ValueError):
    return {}


def write_json(path: pathlib.Path, value: dict) -> None:
  """Writes a whole file or none, also if several do at once."""
  temporary = path.with_name(f'{path.name}.{platform.node()}.{os.getpid()}')
  temporary.write_text(json.dumps(value, indent=2) + '\n')
  os.replace(temporary, path)


def set_up(accelerator: str, dev: bool, pin_python: bool) -> None:
  """Brings `.venv` to what is asked for; does nothing if it is there."""
  venv = folder(accelerator)
  stamp = venv / STAMP
  wheelhouse = ROOT / 'wheelhouse'
  with locked(venv.with_name(f'{venv.name}.lock')):
    recorded = read_json(stamp)
    manifest = read_json(wheelhouse / MANIFEST)
    had = recorded.get('accelerator')
    accelerator, reason = resolve_accelerator(
      accelerator, had, manifest.get('accelerator'), hardware.detect
    )
    _say(f'{accelerator} ({reason})')
    python_version = _venv_python(venv)
    named = sys.version_info[:2] if pin_python else None
    fresh = must_recreate(python_version, named, had, accelerator)
    python = hardware.dotted(sys.version_info[:2] if fresh else python_version)
    listed = requirements(accelerator, dev)
    expected = {
      'accelerator': accelerator,
      'python': python,
      'requirements': digest([*listed, *optional(accelerator)]),
      'commands': _project()['scripts'],
    }
    if not fresh and recorded == expected:
      os.utime(stamp)  # make compares times.
      return
    offline = wheelhouse.is_dir()
    if offline:
      check_wheelhouse(manifest, python, accelerator)
    _say(
      f'{"making" if fresh else "updating"} {venv.name} for Python {python}'
      + (', from ./wheelhouse' if offline else '')
      + ' (some minutes)'
    )
    if fresh:
      _make_venv(venv)
    # Until pip is done: what this is for, but too old for make to believe and
    # equal to nothing that is wanted.
    write_json(stamp, {'accelerator': accelerator})
    os.utime(stamp, (0, 0))
    arguments = ['--no-index', f'--find-links={wheelhouse}'] if offline else []
    _pip(venv, 'install', *arguments, *listed)
    _pip_optional(venv, accelerator, 'install', *arguments)
    _make_importable(venv)
    _make_commands(venv)
    write_json(stamp, expected)
    _say(f'{venv.name} is ready')


def pack(accelerator: str, dev: bool) -> None:
  """Fills `./wheelhouse` with all wheels of a set-up."""
  accelerator, reason = resolve_accelerator(accelerator, None, None, hardware.detect)
  _say(f'packing wheels for {accelerator} ({reason})')
  target = ROOT / 'wheelhouse'
  fresh = ROOT / 'wheelhouse.new'
  shutil.rmtree(fresh, ignore_errors=True)
  with tempfile.TemporaryDirectory() as folder:
    # An environment of its own: the bare Python may have no pip, and what it
    # has installed must not count as already there.
    venv = pathlib.Path(folder) / 'venv'
    _make_venv(venv)
    # `wheel`, not `download`: what has no wheel is built now, since building
    # needs further packages from a network.
    wheels = f'--wheel-dir={fresh}'
    _pip(venv, 'wheel', wheels, *requirements(accelerator, dev))
    _pip_optional(venv, accelerator, 'wheel', wheels)
  write_json(
    fresh / MANIFEST,
    {
      'accelerator': accelerator,
      'python': hardware.dotted(sys.version_info[:2]),
      'machine': platform.machine(),
    },
  )
  shutil.rmtree(target, ignore_errors=True)
  os.replace(fresh, target)
  size = sum(path.stat().st_size for path in target.iterdir())
  _say(f'./wheelhouse holds {size / 1e9:.1f} GB; copy it next to Makefile')


def _venv_python(venv: pathlib.Path):
  """(major, minor) of the Python in a working environment, else None."""
  probe = 'import sys, pip; print(*sys.version_info[:2])'
  try:
    answer = subprocess.run(
      [venv / 'bin' / 'python', '-I', '-c', probe], capture_output=True, text=True, check=True
    )
  except (OSError, subprocess.CalledProcessError):
    return None
  return tuple(int(part) for part in answer.stdout.split())


def _make_venv(venv: pathlib.Path) -> None:
  command = [sys.executable, '-I', '-m', 'venv', '--clear', str(venv)]
  if subprocess.run(command, check=False).returncode:
    raise SetupError(f'{sys.executable} could not make {venv}; above is why')


def _pip(venv: pathlib.Path, *arguments: str) -> None:
  environment = dict(os.environ, PIP_DISABLE_PIP_VERSION_CHECK='1')
  # Clusters set these for their own Python; each sends packages elsewhere.
  for name in ('PIP_USER', 'PIP_TARGET', 'PIP_PREFIX', 'PIP_ROOT'):
    environment.pop(name, None)
  # -I: a PYTHONPATH's packages would count as installed.
  command = [str(venv / 'bin' / 'python'), '-I', '-m', 'pip', *arguments]
  if not sys.stderr.isatty():
    command.append('--quiet')
  if subprocess.run(command, env=environment, check=False).returncode:
    raise SetupError(
      'pip did not succeed; above is why. Without a network, run make '
      'wheelhouse where there is one and bring ./wheelhouse here'
    )


def _pip_optional(venv, accelerator, *arguments) -> None:
  for line in optional(accelerator):
    try:
      _pip(venv, *arguments, line)
    except SetupError:
      _say(f'going on without {line.partition(";")[0]}, see docs/cpu.md')


def _make_importable(venv: pathlib.Path) -> None:
  """Lets scripts in any folder import the checkout's packages.

  One path file does what an editable install does, without a build, and so
  without the packages a build needs.
  """
  (site,) = venv.glob('lib/python*/site-packages')
  (site / 'anp_jax.pth').write_text(f'{ROOT}\n')


def _make_commands(venv: pathlib.Path) -> None:
  """Writes anp-train and the others, as an installed package has them."""
  folder = venv / 'bin'
  folder.mkdir(exist_ok=True)
  for name, target in _project()['scripts'].items():
    module, _, function = target.partition(':')
    fields = {'python': folder / 'python', 'module': module}
    (folder / name).write_text(_COMMAND.format(function=function, **fields))
    (folder / name).chmod(0o755)


def _say(text: str) -> None:
  print(f'setup: {text}', file=sys.stderr, flush=True)


def main(arguments: list[str]) -> int:
  """Reads the flags, does the work, returns the exit status."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--accelerator', default='auto', choices=('auto', *EXTRAS))
  parser.add_argument('--no-dev', action='store_true', help='no tools for testing')
  parser.add_argument(
    '--pin-python',
    action='store_true',
    help='new .venv if its Python differs from the one running this',
  )
  parser.add_argument('--wheelhouse', action='store_true', help='wheels only, no set-up')
  parser.add_argument(
    '--check-python', action='store_true', help='exit status only: whether this Python is supported'
  )
  flags = parser.parse_args(arguments)
  try:
    if not python_supported(sys.version_info):
      raise SetupError(
        f'this is Python {platform.python_version()}, needed is '
        f'{hardware.dotted(OLDEST_PYTHON)} to {hardware.dotted(NEWEST_PYTHON)}'
      )
    try:
      import ensurepip  # noqa: F401  Debian packs these two apart.
      import venv  # noqa: F401
    except ImportError as error:
      raise SetupError(
        f'{sys.executable} has no {error.name}; on Debian and Ubuntu: apt install python3-venv'
      ) from error
    if flags.check_python:
      return 0
    if flags.wheelhouse:
      pack(flags.accelerator, dev=not flags.no_dev)
    else:
      set_up(flags.accelerator, not flags.no_dev, flags.pin_python)
  except SetupError as error:
    _say(f'error: {error}')
    return 1
  return 0


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
