"""What a paper's page is made of: predictions, and measurements that are kept.

A measurement is a command of this repository, whose last line of output is
JSON, or which leaves files. It is run once; what it gave is kept in the
study's workdir, so that the same study goes on where it was stopped.
"""

from collections.abc import Callable, Sequence
import contextlib
import csv
import dataclasses
import datetime
import io
import json
import os
import shlex
import subprocess
import sys

import jax

from anp_jax.runtimes.offload import device
from anp_jax.system import cores as cores_lib, files
from anp_jax.tools.plan import __main__ as planner

_MEASURED = 'measured'
_RUNS = 'runs'
_CELLS = 'cells.csv'
_BENCHMARKS = 'scripts/bench'


@dataclasses.dataclass(frozen=True)
class Measurement:
  """What became of a command that measures.

  Attributes:
    values: what it gave; None: nothing, see why_not.
    hardware: on which it ran.
    why_not: why there is nothing; '': there is.
    seconds: that it took.
  """

  values: dict | None = None
  hardware: str = ''
  why_not: str = ''
  seconds: float = 0.0

  def get(self, *keys):
    """A value by nested keys; None if there is none."""
    value = self.values
    for key in keys:
      if not isinstance(value, dict | list):
        return None
      try:
        value = value[key]
      except (KeyError, IndexError):
        return None
    return value


def last_json(output: str, folder: str) -> dict:
  """The JSON object in the last line of a command's output.

  Raises:
    ValueError: if that is none.
  """
  del folder
  return json.loads((output.strip().splitlines() or [''])[-1])


def cells(output: str, folder: str) -> dict:
  """The cells of a study of strategies, from its cells.csv.

  Returns:
    {'cells': a list of dicts of texts}.
  """
  del output
  with open(os.path.join(folder, _CELLS), newline='') as f:
    return {'cells': list(csv.DictReader(f))}


class Lab:
  """Predicts and measures for the pages of a study.

  Attributes:
    cores: that this process may use.
    hardware: this machine's name and JAX's version.
    folder: of the study.
  """

  def __init__(self, folder: str, predict_only: bool = False):
    self.folder = folder
    self.cores = cores_lib.count()
    self.hardware = f'{device.processor()}, JAX {jax.__version__}'
    self._predict_only = predict_only
    self._commands = []
    self._failures = []

  @property
  def too_small(self) -> str:
    """Why an experiment for larger machines was not run on this one."""
    return f'not run, because this machine has {self.cores} cores'

  @property
  def two_devices(self) -> str:
    """Why convolutions were not split over more than two devices."""
    return 'not run, because this study splits over two devices at most'

  @property
  def no_cluster(self) -> str:
    """Why an experiment for clusters of GPUs was not run."""
    return 'not run, because this study measures on one machine, without GPUs'

  @property
  def failures(self) -> list[str]:
    """A line for each command that failed."""
    return list(self._failures)

  def take_commands(self) -> list[str]:
    """The commands since the last call, as a person would type them."""
    commands, self._commands = self._commands, []
    return list(dict.fromkeys(commands))

  def plan(self, *arguments: str) -> list[dict]:
    """Points that `python -m anp_jax.tools.plan` predicts.

    Args:
      *arguments: of the command.

    Returns:
      Its points, see `anp_jax.tools.plan.points.Point.to_json`.

    Raises:
      RuntimeError: with the planner's line, if it refuses.
    """
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
      status = planner.main(list(arguments))
    if status:
      raise RuntimeError(f'anp_jax.tools.plan: {errors.getvalue().strip()}')
    self._commands.append(shlex.join(['python', '-m', 'anp_jax.tools.plan', *arguments]))
    return last_json(output.getvalue(), '')['points']

  def measure(
    self, name: str, command: Sequence[str], read: Callable = last_json, cores: str = ''
  ) -> Measurement:
    """Runs a command, unless its result is in the workdir.

    Args:
      name: of the measurement: its files' names.
      command: its arguments after 'python'; '{folder}' in them stands for a
        folder of its own.
      read: gives the values from the output and that folder.
      cores: to which it is bound, as taskset writes them; '': to none.
    """
    folder = os.path.join(self.folder, _RUNS, name)
    arguments = [a.replace('{folder}', folder) for a in command]
    binding = ['taskset', '-c', cores] if cores else []
    typed = shlex.join([*binding, 'python', *arguments])
    path = os.path.join(self.folder, _MEASURED, f'{name}.json')
    record = files.read_json(path)
    if record and record['command'] == list(command):
      self._commands.append(typed)
      return Measurement(record['values'], record['hardware'], seconds=record['seconds'])
    if self._predict_only:
      return Measurement(why_not='not run, because of --predict_only')
    if _is_benchmark(command) and not os.path.isdir(_BENCHMARKS):
      return Measurement(
        why_not=f'not run, because {_BENCHMARKS} is not here: start the study '
        'in the checkout of anp_jax'
      )
    print(f'{name}: begins: {typed}', flush=True)
    # What an earlier, other command left is no result of this one.
    with contextlib.suppress(FileNotFoundError):
      os.remove(os.path.join(folder, _CELLS))
    start = datetime.datetime.now()
    status, output, log = self._run(name, [*binding, sys.executable, *arguments])
    seconds = (datetime.datetime.now() - start).total_seconds()
    try:
      if status:
        raise ValueError(status)
      values = read(output, folder)
    except (ValueError, OSError):
      line = f'its command ended with status {status}, see {log}'
      self._failures.append(f'{name}: {line}')
      return Measurement(why_not=f'not run, because {line}')
    hardware = f'{self.hardware}, {start:%Y-%m-%d}'
    files.write_json(
      path,
      {
        'command': list(command),
        'values': values,
        'hardware': hardware,
        'seconds': round(seconds, 1),
      },
    )
    self._commands.append(typed)
    return Measurement(values, hardware, seconds=seconds)

  def _run(self, name, command) -> tuple[int, str, str]:
    """Runs a command; returns its status, output and the file of its errors."""
    folder = os.path.join(self.folder, _MEASURED)
    os.makedirs(folder, exist_ok=True)
    log = os.path.join(folder, f'{name}.log')
    with open(log, 'w') as errors:
      child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
      try:
        output, _ = child.communicate()
      except BaseException:
        child.terminate()
        child.wait()
        raise
      errors.write(output)
    return child.returncode, output, log


def _is_benchmark(command):
  """Whether a command is a module of scripts/bench."""
  return command[1].replace('.', '/').startswith(_BENCHMARKS)
