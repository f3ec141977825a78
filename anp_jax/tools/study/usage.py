"""Runs a program of a study, and writes down what its process used.

  python -m anp_jax.tools.study.usage main.py --config=... --workdir=runs/one

The program is a file, or -m and a module. At its end the numbers go to
WORKDIR/usage, a file for each process: `read_bytes` and `read_images` that the
input pipeline took from the files of the data set, its caches left out (the
system may have had the files in memory all the same); `peak_bytes`, the most
memory that was resident; `sent_bytes` of the network interfaces but loopback.
"""

import collections
import glob
import os
import platform
import runpy
import sys

from anp_jax.data import sources
from anp_jax.system import files, xla_flags

_FOLDER = 'usage'
_COUNTERS = '/sys/class/net/*/statistics/tx_bytes'


def count_reads(open_split, totals: dict[str, int]):
  """Returns `sources.open_split`, whose sources add what is read to totals.

  Args:
    open_split: the function.
    totals: where `read_bytes` and `read_images` grow.
  """

  def open_counted(*arguments):
    source = open_split(*arguments)
    read = source.read

    def read_counted(indices):
      images, labels = read(indices)
      totals['read_bytes'] += sum(memoryview(image).nbytes for image in images)
      totals['read_images'] += len(images)
      return images, labels

    source.read = read_counted
    return source

  return open_counted


def read(folder: str) -> list[dict[str, int]]:
  """Returns what each process of the run in a folder used."""
  paths = sorted(glob.glob(os.path.join(folder, _FOLDER, '*.json')))
  return [files.read_json(path) for path in paths]


def main(arguments: list[str]) -> None:
  """Runs the program as if Python had been started with it."""
  totals = collections.Counter(read_bytes=0, read_images=0)
  sources.open_split = count_reads(sources.open_split, totals)
  sent = _sent()
  is_module = arguments[0] == '-m'
  program, sys.argv = arguments[is_module], arguments[is_module:]
  try:
    if is_module:
      runpy.run_module(program, run_name='__main__', alter_sys=True)
    else:
      runpy.run_path(program, run_name='__main__')
  finally:
    values = {**totals, 'peak_bytes': _peak(), 'sent_bytes': _sent() - sent}
    _write(arguments, values)


def _write(arguments, values):
  """Writes the numbers to the folder of the program's --workdir."""
  flag = '--workdir='
  workdir = next(a for a in arguments if a.startswith(flag))[len(flag) :]
  folder = os.path.join(workdir, _FOLDER)
  os.makedirs(folder, exist_ok=True)
  name = f'{platform.node()}-{os.getpid()}.json'
  files.write_json(os.path.join(folder, name), values)


def _peak():
  """The most bytes of this process that were resident; 0 where unknown.

  Not getrusage's, which is inherited from the process that started this one.
  """
  try:
    with open('/proc/self/status') as f:
      line = next(line for line in f if line.startswith('VmHWM:'))
  except OSError:  # not of Linux
    return 0
  return int(line.split()[1]) * 1024


def _sent():
  """Bytes that this host's interfaces have sent, loopback left out."""
  total = 0
  for path in glob.glob(_COUNTERS):
    if '/lo/' not in path:
      with open(path) as f:
        total += int(f.read())
  return total


if __name__ == '__main__':
  xla_flags.use_huge_pages()
  main(sys.argv[1:])
