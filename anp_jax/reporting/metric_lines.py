"""The whole lines of metrics.jsonl; torn ones and others are left out."""

import math
import os
import re
import shlex
import sys

from anp_jax.system import files

NAME = 'metrics.jsonl'  # in a workdir
# Kinds of lines that hold no metrics of a step: how long something other than a
# step has taken, what the run has come to, a key of the config that is new from
# a step on, by which command a run began or was resumed.
TIME, RESULT, CHANGE, START = 'time', 'result', 'change', 'run'
WITHOUT_METRICS = TIME, RESULT, CHANGE, START


def read(workdir: str) -> list[dict]:
  """Returns the whole lines of a workdir's metrics.jsonl, oldest first."""
  lines = files.read_json_lines(os.path.join(workdir, NAME))
  return [line for line in lines if _is_whole(line)]


def command() -> str:
  """Returns this process's command line, for the line of kind START.

  Folders of the program and passwords in addresses are left out.
  """
  name = os.path.basename(sys.argv[0])
  program = {'__main__.py': ['python', '-m', 'anp_jax']}.get(
    name, ['python', name] if name.endswith('.py') else [name]
  )
  text = shlex.join([*program, *sys.argv[1:]])
  # An address may hold a name and a password.
  return re.sub(r'://[^/@\s]*@', '://', text)


def _is_whole(record):
  """Whether a line has what a line of its kind has, numbers of steps too."""
  kind, step = record.get('kind'), record.get('step')
  if not isinstance(kind, str) or not _is_number(step) or step < 0:
    return False
  if kind == RESULT:
    return True
  if kind == START:
    return isinstance(record.get('command'), str)
  if kind == CHANGE:
    return {'key', 'old', 'new'} <= record.keys()
  if kind == TIME:
    seconds = record.get('seconds')
    is_named = isinstance(record.get('what'), str)
    return is_named and _is_number(seconds) and 0 <= seconds < math.inf
  times = (record.get(name, 0) for name in ('epoch', 'seconds'))
  return all(_is_number(v) for k, v in record.items() if k != 'kind') and all(
    0 <= time < math.inf for time in times
  )


def _is_number(value):
  # Whole numbers that are no float would overflow where curves are drawn.
  return type(value) is float or (type(value) is int and abs(value) <= 2**53)
