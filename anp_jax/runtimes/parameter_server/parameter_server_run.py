"""One process of an asynchronous run: it serves, trains, or both."""

import contextlib
import os
import secrets
import threading
import time

import jax

from anp_jax import cluster, config as config_lib
from anp_jax.cluster import process_info, secret as secret_lib
from anp_jax.data.sources import agreement
from anp_jax.runtimes import transport
from anp_jax.runtimes.parameter_server import (
  chief as chief_lib,
  gradient_worker as worker_lib,
  look_ahead,
  rendezvous,
  secondary,
  setup as setup_lib,
)
from anp_jax.system import compile_cache

_POLL = 0.05  # seconds
_FAREWELL = 5.0  # seconds
_REPEAT = 1.0  # seconds between two requests to stop


def run(config, workdir: str, processes: cluster.Processes) -> dict:
  """Trains, or continues, the run of a workdir, together with other processes.

  The first config.strategy.servers processes are servers; unless these are
  dedicated, they train as well. Server 0's process is the chief: it scores,
  saves and reports.

  Args:
    config: resolved and valid.
    workdir: folder of the run, which all processes see.
    processes: this one, and how many there are.

  Returns:
    The validation metrics of the last evaluation on process 0, else {}.

  Raises:
    ConfigError: if the config fits neither the processes nor the workdir.
    cluster.RunFailedError: if a gradient or an update is not finite, say.
    cluster.PeerLostError: if the servers have gone for good.
  """
  s = config.strategy
  index = processes.index
  workers = _count_workers(s, processes.count)
  if s.dedicated and 0 < index < s.servers:
    # A server computes on a CPU; its GPU, if it has one, is for others.
    jax.config.update('jax_platforms', 'cpu')
  compile_cache.enable(config)
  os.makedirs(workdir, exist_ok=True)
  participant = rendezvous.Participant(
    config=config,
    workdir=workdir,
    env=processes.env,
    process=process_info.collect(processes.env, config, {}),
    launch=rendezvous.launch_id(processes.env),
    before=rendezvous.last_record(workdir),
    secret=_secret(workdir, processes),
  )
  with contextlib.ExitStack() as stack:

    def prepare(settings):
      batch_size = settings['batch_size']
      chosen = config_lib.replaced(config, {'batch_size': batch_size})
      setup = setup_lib.create(chosen, look_ahead.settings(config, workers))
      agreement.check_with(setup.source, settings['data'], index)
      return setup

    worker = None
    trains = index >= s.servers or not s.dedicated
    if trains and not s.simulate.workers:
      worker = worker_lib.Worker(participant, prepare)
      stack.callback(worker.close)
    if index == 0:
      return _run_chief(participant, processes, workers, worker)
    jobs = [_Job(worker.run, 'worker')] if worker else []
    if index < s.servers:
      server = secondary.SecondaryServer(participant, prepare)
      stack.callback(server.close)
      jobs.append(_Job(server.run, 'server'))
    with processes.handling_signals():
      _wait_for_jobs(processes, jobs, worker or server, participant.connect)
  return {}


def _secret(workdir, processes):
  """The secret that the run's processes share."""
  if processes.count == 1:  # needs no file
    return secrets.token_hex(32)
  return secret_lib.for_run(workdir)


def _count_workers(s, processes):
  """The workers of a run of so many processes."""
  if s.simulate.workers:
    if processes > 1:
      raise config_lib.ConfigError(
        f'config.strategy.simulate.workers={s.simulate.workers}: expected one '
        f'process, which computes for all of them, found {processes}'
      )
    return s.simulate.workers
  workers = processes - (s.servers if s.dedicated else 0)
  if s.servers > processes or workers < 1:
    raise config_lib.ConfigError(
      f'config.strategy.servers={s.servers}: there are {processes} '
      f'processes{", and one must train" if s.dedicated else ""}'
    )
  return workers


def _run_chief(participant, processes, workers, worker):
  """Process 0, session after session."""
  chief = chief_lib.Chief(participant, processes, workers)
  job = worker and _Job(worker.run, 'worker')
  try:
    with processes.handling_signals(chief.expected_save_seconds):
      chief.begin_session()
      if not worker and (worker := chief.simulation()):
        job = _Job(worker.run, 'simulated workers')
      while not chief.supervise(job, worker):
        chief.begin_session()
      return chief.finish()
  except (cluster.RunFailedError, config_lib.ConfigError) as e:
    chief.fail(str(e))
    raise
  finally:
    chief.close()
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
    self._thread.join(_FAREWELL)

  def _run(self):
    try:
      self._function()
    except BaseException as e:  # noqa: BLE001 - raised by `done`
      self._error = e


def _wait_for_jobs(processes, jobs, member, connect):
  """Waits until all jobs are done; passes heartbeats and signals on.

  Args:
    processes: this one among all.
    jobs: threads of this process.
    member: `Worker` or `SecondaryServer` whose progress shows that it lives.
    connect: () -> `transport.Client` of server 0.
  """
  progress, last_request = -1, -_REPEAT
  while not all([job.done() for job in jobs]):
    if member.progress != progress:
      progress = member.progress
      processes.heartbeat('step', progress)
    # Until the end: server 0 may not have begun its first session, or may begin
    # another, which knows nothing of the request to the one before.
    if processes.vote() and time.monotonic() - last_request > _REPEAT:
      with contextlib.suppress(*transport.CONNECTION_ERRORS):
        with contextlib.closing(connect()) as chief:
          chief.ask('stop')
      last_request = time.monotonic()
    time.sleep(_POLL)
