"""Runs the commands of the papers' pages, and keeps their results.

A measurement is a command of this repository whose last line of output is JSON,
or which writes a file of cells. It is run once: its result is kept in the study's
workdir, where the same study finds it. A training of days is never begun: its
command is for people, and its scores are read from the run that they trained.
"""

import contextlib
import csv
import datetime
import io
import json
import os
import shlex
import subprocess
import sys
from typing import NamedTuple

import jax

from anp_jax import config as config_lib
from anp_jax.reporting import run_page
from anp_jax.reporting.analysis import analysis_page
from anp_jax.reporting.run_page import html
from anp_jax.runtimes.offload import device
from anp_jax.system import files
from anp_jax.tools.plan import __main__ as planner
from anp_jax.tools.study import study_runner

_MEASURED = 'measured'
_RUNS = 'runs'
_CELLS = 'cells.csv'
_PLANNER = ['python', '-m', 'anp_jax.tools.plan']
_TRAIN = ['python', 'main.py']


class Result(NamedTuple):
  """The result of a command.

  Attributes:
    values: nested dicts and lists; {'cells': rows} of a study of strategies, scores
      of a run.
    hardware: hardware of the measurement, and a run's data; '' for a prediction.
  """

  values: dict
  hardware: str


class Lab:
  """Predicts and measures for the pages of a study.

  Attributes:
    failures: a line for each command that failed.
    predict_only: whether nothing is measured.
  """

  def __init__(self, folder: str, predict_only: bool = False):
    self.failures: list[str] = []
    self.predict_only = predict_only
    self._folder = folder
    self._results: dict[str, Result | None] = {}

  def typed(self, name: str, command: str) -> str:
    """Returns a command as a person would type it."""
    return command.replace('{folder}', os.path.join(self._folder, _RUNS, name))

  def result(self, name: str, command: str) -> Result | None:
    """Returns a command's result: predicted here, kept in the workdir, or measured now.

    Args:
      name: name of the command and its files.
      command: the command; '{folder}' is replaced by a folder of its own.

    Returns:
      None if it failed, or if nothing is measured.

    Raises:
      ConfigError: with the planner's line, if it refuses.
    """
    typed = self.typed(name, command)
    if typed not in self._results:
      arguments = shlex.split(typed)
      is_planned = arguments[: len(_PLANNER)] == _PLANNER and '--measure' not in arguments
      if is_planned:
        self._results[typed] = Result(_plan(arguments[len(_PLANNER) :]), '')
      elif arguments[: len(_TRAIN)] == _TRAIN:
        self._results[typed] = self._trained(name)
      else:
        self._results[typed] = self._kept(name, typed) or self._measure(name, arguments)
    return self._results[typed]

  def _trained(self, name) -> Result | None:
    """The scores of a run's last evaluation, if somebody has trained it."""
    workdir = os.path.join(self._folder, _RUNS, name)
    evaluation = analysis_page.load(html.newest_evaluation(workdir))
    if not evaluation:
      return None
    scores, devices = evaluation['scores'], run_page.facts(workdir).get('devices', 'not known')
    return Result(scores, f'{devices}; {scores["examples"]:,.0f} images of {evaluation["data"]}')

  def _kept(self, name, typed):
    record = files.read_json(self._path(f'{name}.json'))
    if record and shlex.split(record['command']) == shlex.split(typed):
      return Result(record['values'], record['hardware'])
    return None

  def _measure(self, name, arguments) -> Result | None:
    if self.predict_only:
      return None
    print(f'{name}: begins: {shlex.join(arguments)}', flush=True)
    folder = os.path.join(self._folder, _RUNS, name)
    # The cells of an earlier, other command are no result of this one.
    with contextlib.suppress(FileNotFoundError):
      os.remove(os.path.join(folder, _CELLS))
    hardware = f'{device.processor()}, JAX {jax.__version__}, {datetime.date.today()}'
    command = [sys.executable if a == 'python' else a for a in arguments]
    status, output, log = self._run(name, command)
    try:
      if status:
        raise ValueError(status)
      values = _read(output, folder)
    except (ValueError, OSError):
      error = study_runner.first_error(log)
      self.failures.append(f'{name}: its command ended with status {status}, see {log}: {error}')
      return None
    record = {'command': shlex.join(arguments), 'values': values, 'hardware': hardware}
    files.write_json(self._path(f'{name}.json'), record)
    return Result(values, hardware)

  def _run(self, name, command) -> tuple[int, str, str]:
    """Runs a command; returns its status, output and the file of its errors."""
    log = self._path(f'{name}.log')
    os.makedirs(os.path.dirname(log), exist_ok=True)
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

  def _path(self, file):
    return os.path.join(self._folder, _MEASURED, file)


def _plan(arguments):
  """The prediction of `python -m anp_jax.tools.plan`."""
  output, errors = io.StringIO(), io.StringIO()
  with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
    status = planner.main(arguments)
  if status:
    raise config_lib.ConfigError(f'anp_jax.tools.plan: {errors.getvalue().strip()}')
  return _read(output.getvalue(), '')


def _read(output, folder):
  """The cells that a study of strategies left, or the JSON in the last line of an output."""
  with contextlib.suppress(FileNotFoundError), open(os.path.join(folder, _CELLS), newline='') as f:
    return {'cells': list(csv.DictReader(f))}
  return json.loads((output.strip().splitlines() or [''])[-1])
