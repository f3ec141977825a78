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
import fcntl
import hashlib
import json
import os
import pathlib
import platform
import subprocess
import sys

import hardware

ROOT = pathlib.Path(__file__).resolve().parent.parent
STAMP = 'anp_jax-setup.json'

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


class SetupError(Exception):
  """What went wrong, in one line for the person at the terminal."""


# ------------------------------------------------------------------ decisions


def python_supported(version) -> bool:
  """Whether a (major, minor, ...) version of Python can run the project."""
  return OLDEST_PYTHON <= tuple(version[:2]) <= NEWEST_PYTHON


def resolve_accelerator(requested: str, recorded: str | None, detect) -> tuple[str, str]:
  """Settles what 'auto' means.

  Args:
    requested: 'auto' or an accelerator's name, which always wins.
    recorded: what `.venv` is set up for already, if it is.
    detect: a function that looks at the machine; called only if it matters.

  Returns:
    The accelerator and the reason.
  """
  if requested != 'auto':
    return requested, 'asked for'
  # A login node must not undo what a compute node, or a person, settled.
  if recorded not in (None, 'cpu'):
    return recorded, '.venv has it; to change it name another: ACCELERATOR=...'
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


# --------------------------------------------------------------------- set-up


def folder(accelerator: str) -> pathlib.Path:
  """The environment of an accelerator: one for all that are run on."""
  suffix = '-portability' if accelerator == 'portability' else ''
  return ROOT / f'.venv{suffix}'


def optional(accelerator: str) -> list[str]:
  """Requirements without which a set-up is whole, but slower."""
  # Not at the top: an old Python must reach the line that says it is too old.
  import tomllib

  project = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
  extras = OPTIONAL.get(accelerator, ())
  return [line for extra in extras for line in project['optional-dependencies'][extra]]


def digest(dev: bool) -> str:
  """A name for all requirements that changes when any of them does."""
  texts = [(ROOT / name).read_bytes() for name in ('requirements.txt', 'pyproject.toml')]
  return hashlib.sha256(b'\n'.join([*texts, b'dev' * dev])).hexdigest()


@contextlib.contextmanager
def locked(path: pathlib.Path):
  """Holds a lock that also holds between the machines of a cluster.

  POSIX record locks, because NFS, Lustre and GPFS carry those to all clients
  and the kernel drops them with a process that dies. The file itself stays:
  to remove it would let two processes lock two files of one name.
  """
  with open(path, 'a') as file:
    try:
      try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except (BlockingIOError, PermissionError):
        _say('waiting for another set-up')
        fcntl.lockf(file, fcntl.LOCK_EX)
    except OSError as error:
      _say(
        f'no lock on this file system ({error.strerror}): set up once by hand, '
        'not from several processes'
      )
    yield


def read_json(path: pathlib.Path) -> dict:
  """The object in a file; empty where there is none."""
  try:
    return json.loads(path.read_text())
  except (OSError, ValueError):
    return {}


def set_up(accelerator: str, dev: bool, pin_python: bool) -> None:
  """Brings `.venv` to what is asked for; does nothing if it is there."""
  venv = folder(accelerator)
  stamp = venv / STAMP
  with locked(venv.with_name(f'{venv.name}.lock')):
    recorded = read_json(stamp)
    had = recorded.get('accelerator')
    accelerator, reason = resolve_accelerator(accelerator, had, hardware.detect)
    _say(f'{accelerator} ({reason})')
    python_version = _venv_python(venv)
    named = sys.version_info[:2] if pin_python else None
    fresh = must_recreate(python_version, named, had, accelerator)
    python = hardware.dotted(sys.version_info[:2] if fresh else python_version)
    expected = {'accelerator': accelerator, 'python': python, 'requirements': digest(dev)}
    if not fresh and recorded == expected:
      os.utime(stamp)  # make compares times.
      return
    _say(f'{"making" if fresh else "updating"} {venv.name} for Python {python} (some minutes)')
    if fresh:
      _make_venv(venv)
    # Until pip is done: what this is for, but too old for make to believe and
    # equal to nothing that is wanted.
    stamp.write_text(json.dumps({'accelerator': accelerator}))
    os.utime(stamp, (0, 0))
    extras = ','.join(EXTRAS[accelerator] + (('dev',) if dev else ()))
    _install(venv, f'--editable={ROOT}' + f'[{extras}]' * bool(extras))
    for line in optional(accelerator):
      try:
        _install(venv, line)
      except SetupError:
        _say(f'going on without {line.partition(";")[0]}, see docs/cpu.md')
    stamp.write_text(json.dumps(expected))
    _say(f'{venv.name} is ready')


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


def _install(venv: pathlib.Path, requirement: str) -> None:
  environment = dict(os.environ, PIP_DISABLE_PIP_VERSION_CHECK='1')
  # Clusters set these for their own Python; each sends packages elsewhere.
  for name in ('PIP_USER', 'PIP_TARGET', 'PIP_PREFIX', 'PIP_ROOT'):
    environment.pop(name, None)
  # -I: a PYTHONPATH's packages would count as installed.
  command = [str(venv / 'bin' / 'python'), '-I', '-m', 'pip', 'install', requirement]
  if not sys.stderr.isatty():
    command.append('--quiet')
  if subprocess.run(command, env=environment, check=False).returncode:
    raise SetupError(
      'pip did not succeed; above is why. Without a network, bring wheels here: see docs/install.md'
    )


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
    set_up(flags.accelerator, not flags.no_dev, flags.pin_python)
  except SetupError as error:
    _say(f'error: {error}')
    return 1
  return 0


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
