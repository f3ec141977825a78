"""The complete lines of metrics.jsonl; torn ones and others are left out."""

from collections.abc import Callable
import math
import os
import shlex
import sys
from typing import Any

from anp_jax.system import files

NAME = 'metrics.jsonl'  # in a workdir
# Kinds of lines without metrics of a step: the seconds of something other than a
# step, the result of the run, a key of the config that changes at a step, the
# command by which a run began or was resumed, processes that were lost or have come.
TIME, RESULT, CHANGE, START, RESTART = 'time', 'result', 'change', 'run', 'restart'
WITHOUT_METRICS = TIME, RESULT, CHANGE, START, RESTART
_MOST_SECONDS = 1e11  # since 1970, a year with four digits


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
  """Returns whether a line has the fields of its kind, each such as this package writes it."""
  kind, step = record.get('kind'), record.get('step')
  if not isinstance(kind, str) or not _is_count(step):
    return False
  if kind in _FIELDS:
    return all(name in record and holds(record[name]) for name, holds in _FIELDS[kind].items())
  numbers = [v for k, v in record.items() if k != 'kind']
  times = [record.get(name, 0) for name in ('epoch', 'seconds', 'time')]
  rate = record.get('images_per_second', 1)
  return all(map(_is_number, numbers)) and all(map(_is_time, times)) and 0 < rate < math.inf


def _is_text(value):
  return isinstance(value, str)


def _are_texts(value):
  return isinstance(value, list) and all(map(_is_text, value))


def _is_anything(_):
  return True


def _is_count(value):
  return type(value) is int and 0 <= value <= 2**53


def _is_time(value):
  return _is_number(value) and 0 <= value < _MOST_SECONDS


def _is_number(value):
  # Others would overflow where curves are drawn: whole numbers that are no float, and sums of
  # numbers beyond those of float32.
  if type(value) is int:
    return abs(value) <= 2**53
  return type(value) is float and not 1e39 < abs(value) < math.inf


# The fields of each kind without metrics, and what each holds.
_FIELDS: dict[str, dict[str, Callable[[Any], bool]]] = {
  RESULT: {},
  START: {
    'time': _is_time,
    'training_images': _is_count,
    'validation_images': _is_count,
    **dict.fromkeys(('command', 'data', 'classes'), _is_text),
  },
  RESTART: {'lost': _are_texts, 'processes': _is_count, 'seconds': _is_time, 'repeated': _is_count},
  CHANGE: dict.fromkeys(('key', 'old', 'new'), _is_anything),
  TIME: {'what': _is_text, 'seconds': _is_time},
}
