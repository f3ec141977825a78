"""Whether every process of a run sees a folder, and can write to it."""

import contextlib
import time
from typing import Any

from anp_jax import config as config_lib
from anp_jax.config import urls
from anp_jax.system import error_lines, remote

_SEEN_WITHIN = 15.0  # seconds: NFS clients remember for a while what was there


def check(workdir: str, processes: Any) -> None:
  """Refuses a workdir that some process does not see or cannot write to.

  Each process writes a file of its own: checkpoints are written by all.

  Args:
    workdir: folder of the run, or its address; made if it is missing.
    processes: `cluster.Processes`; all of them call it.

  Raises:
    ConfigError: on all processes, naming the rank and host.
  """
  folder, name, problem = remote.path(workdir), '', ''
  if not processes.index:
    name = f'.seen-by-all-{time.time_ns()}'
    problem = _write(folder / name)
  name, problem = processes.gather([name, problem])[0]
  problems = [problem]
  if not problem:  # else there is nothing to see
    if processes.index:
      problem = _try(folder / name, processes)
    problems = processes.gather(problem)
    if not processes.index:
      _remove(folder / name)
  for index, problem in enumerate(problems):
    if problem and processes.is_ended_by(index):
      raise config_lib.ConfigError(
        f'--workdir={urls.remote_url(workdir)}: {processes.name(index)} {problem}'
      )


def _try(path, processes):
  """Why this process cannot use the folder in which rank 0 wrote a file; or ''."""
  if not _appears(path):
    return (
      f'does not see what {processes.name(0)} wrote there; it must be a folder that all hosts share'
    )
  probe = path.parent / f'{path.name}-{processes.index}'
  problem = _write(probe)
  if not problem:
    _remove(probe)
  return problem


def _write(path):
  """Writes a file; returns why it cannot be written, or ''."""
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(path.name)
  except Exception as e:  # noqa: BLE001 - each store has errors of its own
    # Without the path, which is of a file that nobody knows.
    why = getattr(e, 'strerror', None) or error_lines.first_line(e)
    return f'cannot write there: {why}; all processes write checkpoints'
  return ''


def _remove(path):
  with contextlib.suppress(OSError):
    path.unlink()


def _appears(path):
  """Whether a file that another host wrote can be seen here."""
  deadline = time.monotonic() + _SEEN_WITHIN
  while time.monotonic() < deadline:
    with contextlib.suppress(OSError):
      # A listing makes an NFS client look again.
      next(path.parent.iterdir(), None)
    if path.exists():
      return True
    time.sleep(0.2)
  return False
