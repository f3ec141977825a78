"""One process of an asynchronous run: it serves, trains, or both."""

import contextlib
import os
import threading
import time

import jax

from anp_jax import cluster
from anp_jax import config as config_lib
from anp_jax.cluster import process_info
from anp_jax.runtimes.server import chief as lead_lib
from anp_jax.runtimes.server import rendezvous
from anp_jax.runtimes.server import scheduler as desk_lib
from anp_jax.runtimes.server import secondary
from anp_jax.runtimes.server import setup as setup_lib
from anp_jax.runtimes.server import worker as worker_lib
from anp_jax.system import compile_cache

_POLL = 0.05  # seconds
_PARTING = 5.0  # seconds
_REPEAT = 1.0  # seconds between two requests to stop


def run(config, workdir: str, processes: cluster.Processes) -> dict:
  """Trains, or goes on with, the run of a workdir, together with others.

  The first config.strategy.servers processes are servers; unless these are
  dedicated, they train as well. Server 0's process is the one that scores,
  saves and says how it goes.

  Args:
    config: resolved and valid.
    workdir: folder of the run, which all processes see.
    processes: this one, and how many there are.

  Returns:
    The validation metrics of the last evaluation on process 0, else {}.

  Raises:
    ConfigError: if the config fits neither the processes nor the workdir.
    cluster.Failed: if a gradient or an update is not finite, say.
    cluster.Lost: if the servers have gone for good.
  """
  s = config.strategy
  index = processes.index
  workers = processes.count - (s.servers if s.dedicated else 0)
  if s.servers > processes.count or workers < 1:
    raise config_lib.ConfigError(
      f'config.strategy.servers={s.servers}: there are {processes.count} '
      f'processes{", and one must train" if s.dedicated else ""}'
    )
  if s.dedicated and 0 < index < s.servers:
    # A server computes on a CPU; its GPU, if it has one, is for others.
    jax.config.update('jax_platforms', 'cpu')
  compile_cache.enable(config)
  os.makedirs(workdir, exist_ok=True)
  launched = rendezvous.launched()
  card = process_info.collect(processes.env, config, {})
  # Before config.batch_size is filled in: the cards are compared.
  with contextlib.ExitStack() as stack:

    def connect(address=None):
      return rendezvous.connect(config, workdir, address)

    def prepare(said):
      config.batch_size = said['batch_size']
      return setup_lib.create(config, desk_lib.ahead(config, workers))

    worker = None
    if index >= s.servers or not s.dedicated:
      worker = worker_lib.Worker(
        index, config, connect, card, prepare, launched
      )
      stack.callback(worker.close)
    if index == 0:
      return _lead(config, workdir, processes, card, workers, worker)
    jobs = [_Job(worker.run, 'worker')] if worker else []
    if index < s.servers:
      follower = secondary.Follower(
        index, config, workdir, processes.env, card, launched
      )
      stack.callback(follower.close)
      jobs.append(_Job(lambda: follower.run(connect, prepare), 'follower'))
    with processes.handling_signals():
      _attend(processes, jobs, worker or follower, connect)
  return {}


def _lead(config, workdir, processes, card, workers, worker):
  """Process 0, term after term."""
  lead = lead_lib.Lead(config, workdir, processes, card, workers)
  job = worker and _Job(worker.run, 'worker')
  try:
    with processes.handling_signals(lead.expected_save_seconds):
      lead.begin()
      while not lead.attend(job, worker):
        lead.begin()
      return lead.finish()
  except (cluster.Failed, config_lib.ConfigError) as e:
    lead.fail(str(e))
    raise
  finally:
    lead.close()
    if worker:
      worker.close()
      job.join()


class _Job:
  """A function in a thread of its own, whose error is not lost."""

  def __init__(self, function, name):
    self._function = function
    self._error = None
    self._thread = threading.Thread(target=self._run, name=name, daemon=True)
    self._thread.start()

  def done(self) -> bool:
    """Whether it has ended; raises what it raised."""
    if self._thread.is_alive():
      return False
    if self._error:
      raise self._error
    return True

  def join(self) -> None:
    """Waits for its end, for a while.

    A thread that is within Arrow's code when Python shuts down takes the
    process down.
    """
    self._thread.join(_PARTING)

  def _run(self):
    try:
      self._function()
    except BaseException as e:  # noqa: BLE001 - raised by `done`
      self._error = e


def _attend(processes, jobs, living, connect):
  """Until all jobs are done: looks whether they live, and passes signals on."""
  seen, asked = -1, -_REPEAT
  while not all([job.done() for job in jobs]):
    if living.done != seen:
      seen = living.done
      processes.heartbeat('step', seen)
    # Until the end: server 0 may be on its way to its first term, or to another
    # that knows nothing of what the one before was asked.
    if processes.vote() and time.monotonic() - asked > _REPEAT:
      with contextlib.suppress(*worker_lib.BROKEN):
        with contextlib.closing(connect()) as desk:
          desk.ask('stop')
      asked = time.monotonic()
    time.sleep(_POLL)
