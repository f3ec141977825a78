"""What the benchmarks share: a table for people, a JSON line for machines."""

import argparse
import json
import os
import platform
import socket
import subprocess
import sys

from anp_jax.system import cores, markdown

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), '..', '..'))
_RECIPE = os.path.join(ROOT, 'configs', 'resnet_anp.py')
# With it each command that a benchmark starts would compile the package, up to a second.
os.environ.pop('PYTHONDONTWRITEBYTECODE', None)


def load(keys: dict[str, str]):
  """Returns the config of configs/resnet_anp.py with other values.

  Args:
    keys: values by key; those that the config's network or strategy does not have are left out.
  """
  # Heavy, and not every process of a benchmark needs it.
  from anp_jax.config import command_line

  return command_line.load(_RECIPE, command_line.applying(_RECIPE, keys))


def synthetic(model: str, size: int, batch: int) -> dict[str, str]:
  """Returns the keys of a run on noise, for `load`.

  Args:
    model: the network.
    size: pixels a side of the images.
    batch: global batch size.
  """
  return {
    'batch_size': str(batch),
    'data.image_size': str(size),
    'data.resize': str(size),
    'data.source': 'synthetic',
    'model.name': model,
    'schedule.warmup': '0 steps',
  }


def train(*flags: str) -> None:
  """Runs main.py, whose output is not this command's.

  Raises:
    CalledProcessError: if it fails.
  """
  subprocess.run([sys.executable, 'main.py', *flags], cwd=ROOT, stdout=sys.stderr, check=True)


def unmarked():
  """Standard output as it is now, before `cluster.start` marks its lines."""
  return os.fdopen(os.dup(sys.stdout.fileno()), 'w')


def show(title: str, rows: list[tuple], ratios: dict, file=None) -> None:
  """Prints a table and, last, one line of JSON.

  Args:
    title: heading of the table.
    rows: tuples of one-line texts and numbers, the first one the heading.
    ratios: name to number.
    file: where to; None: standard output.
  """
  print(f'{title} ({cores.count()} cores, {platform.machine()})', file=file)
  print(markdown.plain([list(map(str, row)) for row in rows], 'lr'), file=file)
  # A part of scripts/accelerator.sh may be stopped after it.
  print(json.dumps({k: round(v, 4) for k, v in ratios.items()}), file=file, flush=True)


def counts(text: str) -> tuple[int, ...]:
  """Numbers of processes or parts of a flag, such as '1,2,4'."""
  numbers = text.split(',')
  if not all(number.isdecimal() and int(number) for number in numbers):
    raise argparse.ArgumentTypeError(f'{text!r}: expected numbers of 1 or more, such as 1,2,4')
  return tuple(dict.fromkeys(map(int, numbers)))


def free_port() -> int:
  """Returns a port that a child process may open."""
  with socket.create_server(('127.0.0.1', 0)) as s:
    return s.getsockname()[1]
