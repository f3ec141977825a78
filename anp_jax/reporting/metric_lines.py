"""The complete lines of metrics.jsonl; torn ones and others are left out."""

import math
import os
import shlex
import sys

from anp_jax.system import files

NAME = 'metrics.jsonl'  # in a workdir
# Kinds of lines without metrics of a step: the seconds of something other than a
# step, the result of the run, a key of the config that changes at a step, the
# command by which a run began or was resumed, a restart in place.
TIME, RESULT, CHANGE, START, RESTART = 'time', 'result', 'change', 'run', 'restart'
WITHOUT_METRICS = TIME, RESULT, CHANGE, START, RESTART


def read(workdir: str) -> list[dict]:
  """Returns the complete lines of a workdir's metrics.jsonl, oldest first."""
  lines = files.read_json_lines(os.path.join(workdir, NAME))
  return [line for line in lines if _is_whole(line)]


def command() -> str:
  """Returns this process's command line, for the line of kind START.

  Folders of the program are left out.
  """
  name = os.path.basename(sys.argv[0])
  program = {'__main__.py': ['python', '-m', 'anp_jax']}.get(
    name, ['python', name] if name.endswith('.py') else [name]
  )
  return shlex.join([*program, *sys.argv[1:]])


def _is_whole(record):
  """Returns whether a line has the fields of its kind."""
  kind, step = record.get('kind'), record.get('step')
  if not isinstance(kind, str) or not _is_number(step) or step < 0:
    return False
  if kind == RESULT:
    return True
  if kind == START:
    return isinstance(record.get('command'), str)
  if kind == RESTART:
    return {'lost', 'processes', 'seconds', 'repeated'} <= record.keys()
  if kind == CHANGE:
    return {'key', 'old', 'new'} <= record.keys()
  if kind == TIME:
    return isinstance(record.get('what'), str) and _is_time(record.get('seconds'))
  numbers = [v for k, v in record.items() if k != 'kind']
  times = [record.get(name, 0) for name in ('epoch', 'seconds')]
  return all(map(_is_number, numbers)) and all(map(_is_time, times))


def _is_time(value):
  return _is_number(value) and 0 <= value < math.inf


def _is_number(value):
  # Whole numbers that are no float would overflow where curves are drawn.
  return type(value) is float or (type(value) is int and abs(value) <= 2**53)
