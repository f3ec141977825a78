"""One process of an asynchronous run: it serves, trains, or both."""

from collections.abc import Collection
from concurrent import futures
import os
import secrets

import ml_collections

from anp_jax import cluster, config as config_lib
from anp_jax.data.sources import agreement
from anp_jax.runtimes.parameter_server import (
  chief as chief_lib,
  gradient_worker,
  look_ahead,
  participant as participant_lib,
  secondary,
  service as service_lib,
  setup as setup_lib,
  threads,
)
from anp_jax.system import compile_cache

_POLL = 0.05  # seconds
_FAREWELL = 5.0  # seconds


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
  """
  s = config.strategy
  index = processes.index
  workers = _count_workers(s, processes.count)
  compile_cache.enable(config)
  os.makedirs(workdir, exist_ok=True)
  env = processes.env
  if processes.count == 1:  # it needs no file of a secret
    env = env._replace(secret=secrets.token_hex(32))
  participant = participant_lib.Participant(config, workdir, env)

  def prepare(settings):
    chosen = config_lib.replaced(config, {'batch_size': settings['batch_size']})
    setup = setup_lib.create(chosen, look_ahead.settings(config, workers))
    agreement.check_with(setup.source, settings['data'], index)
    return setup

  worker = None
  trains = index >= s.servers or not s.dedicated
  if trains:
    worker = gradient_worker.Worker(participant, prepare)
  if index == 0:
    return _run_chief(participant, processes, workers, worker)
  server = service = None
  if index < s.servers:
    service = service_lib.Service(config, env)
    server = secondary.SecondaryServer(participant, service, prepare)
  with processes.handling_signals():
    processes.receive_mail(participant.on_mail)
    endpoint = service and service.endpoint
    processes.send(0, {'endpoint': endpoint, 'worker': worker and participant.worker()})
    _wait_for_jobs(processes, participant, [member for member in (worker, server) if member])
  return {}


def _count_workers(s, processes):
  """The workers of a run of so many processes."""
  workers = processes - (s.servers if s.dedicated else 0)
  if s.servers > processes or workers < 1:
    raise config_lib.ConfigError(
      f'config.strategy.servers={s.servers}: there are {processes} '
      f'processes{", and one must train" if s.dedicated else ""}'
    )
  return workers


def _run_chief(participant, processes, workers, worker):
  """Process 0."""
  chief = chief_lib.Chief(participant, processes, workers)
  job = worker and threads.start(worker.run, 'worker')
  try:
    with processes.handling_signals(chief.recorder.checkpoints.expected_save_seconds):
      chief.open(worker and participant.worker())
      chief.supervise(job, worker)
      return chief.finish()
  finally:
    chief.close()
    if job:
      # A thread that is within Arrow's code when Python shuts down takes the
      # process down.
      futures.wait([job], _FAREWELL)


def _wait_for_jobs(processes, participant, members):
  """Waits until all members are done; passes heartbeats and signals on.

  Args:
    processes: this one among all.
    participant: this process.
    members: `Worker` and `SecondaryServer`, whose progress shows that they live; the
      step is the newest version that one of them knows.
  """
  progress, has_told = 0, False
  waiting: Collection[futures.Future] = [threads.start(m.run, type(m).__name__) for m in members]
  while waiting:
    done, waiting = futures.wait(waiting, _POLL, futures.FIRST_EXCEPTION)
    for job in done:
      job.result()
    if not participant.invited.done():  # server 0 may evaluate first
      processes.heartbeat('starting')
    elif members[0].progress != progress:
      progress = members[0].progress
      processes.heartbeat('step', max(member.version for member in members))
    if processes.vote() and not has_told:
      processes.send(0, chief_lib.STOP)
      has_told = True
