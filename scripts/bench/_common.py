"""What the benchmarks share: a table for people, a JSON line for machines."""

import argparse
import json
import os
import platform
import sys

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


def unmarked():
  """Standard output as it is now, before `cluster.start` marks its lines."""
  return os.fdopen(os.dup(sys.stdout.fileno()), 'w')


def show(title: str, rows: list[tuple], ratios: dict, file=None) -> None:
  """Prints a table and, last, one line of JSON.

  Args:
    title: of the table.
    rows: tuples of texts, the first one the heading.
    ratios: name to number.
    file: where to; None: standard output.
  """
  print(f'{title} ({len(os.sched_getaffinity(0))} cores, {platform.machine()})', file=file)
  widths = [max(len(str(r[i])) for r in rows) for i in range(len(rows[0]))]
  for row in rows:
    first, *rest = (str(c) for c in row)
    cells = [c.rjust(w) for c, w in zip(rest, widths[1:])]
    print('  '.join([first.ljust(widths[0]), *cells]), file=file)
  print(json.dumps({k: round(v, 4) for k, v in ratios.items()}), file=file)


def counts(text: str) -> tuple[int, ...]:
  """Numbers of processes or parts of a flag, such as '1,2,4'."""
  numbers = text.split(',')
  if not all(number.isdecimal() and int(number) for number in numbers):
    raise argparse.ArgumentTypeError(f'{text!r}: expected numbers of 1 or more, such as 1,2,4')
  return tuple(dict.fromkeys(map(int, numbers)))
