"""One process of an asynchronous run: it serves, trains, or both."""

from concurrent import futures
import contextlib
import os
import secrets
import time

import jax
import ml_collections

from anp_jax import cluster, config as config_lib
from anp_jax.cluster import process_info, secret as secret_lib
from anp_jax.data.sources import agreement
from anp_jax.runtimes import transport
from anp_jax.runtimes.parameter_server import (
  chief as chief_lib,
  gradient_worker,
  look_ahead,
  rendezvous,
  secondary,
  setup as setup_lib,
  threads,
)
from anp_jax.system import compile_cache

_POLL = 0.05  # seconds
_FAREWELL = 5.0  # seconds
_REPEAT = 1.0  # seconds between two requests to stop


def run(
  config: ml_collections.ConfigDict, workdir: str, processes: cluster.Processes
) -> dict[str, float]:
  """Trains, or continues, the run of a workdir, together with other processes.

  The first config.strategy.servers processes are servers; unless these are
  dedicated, they train as well. Server 0's process is the chief: it scores,
  saves and reports.

  Args:
    config: resolved and valid config.
    workdir: folder of the run, which all processes see.
    processes: this process among all.

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
    # A lone process needs no file of a secret.
    secret=secrets.token_hex(32) if processes.count == 1 else secret_lib.for_run(workdir),
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
      worker = gradient_worker.Worker(participant, prepare)
      stack.callback(worker.close)
    if index == 0:
      return _run_chief(participant, processes, workers, worker)
    jobs = [threads.start(worker.run, 'worker')] if worker else []
    member: gradient_worker.Worker | secondary.SecondaryServer | None = worker
    if index < s.servers:
      server = secondary.SecondaryServer(participant, prepare)
      stack.callback(server.close)
      jobs.append(threads.start(server.run, 'server'))
      member = member or server
    with processes.handling_signals():
      _wait_for_jobs(processes, jobs, member, participant.connect)
  return {}


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
  job = worker and threads.start(worker.run, 'worker')
  try:
    with processes.handling_signals(chief.recorder.checkpoints.expected_save_seconds):
      chief.begin_session()
      if not worker and (worker := chief.simulation()):
        job = threads.start(worker.run, 'simulated workers')
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
      # A thread that is within Arrow's code when Python shuts down takes the
      # process down.
      futures.wait([job], _FAREWELL)


def _wait_for_jobs(processes, jobs, member, connect):
  """Waits until all jobs are done; passes heartbeats and signals on.

  Args:
    processes: this one among all.
    jobs: futures of this process.
    member: `Worker` or `SecondaryServer` whose progress shows that it lives.
    connect: () -> `transport.Client` of server 0.
  """
  progress, last_request, waiting = -1, -_REPEAT, jobs
  while waiting:
    done, waiting = futures.wait(waiting, _POLL, futures.FIRST_EXCEPTION)
    for job in done:
      job.result()
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
