"""One process of a ring: it hands each event to the object that handles it."""

import contextlib
import queue

import ml_collections

from anp_jax import cluster, config as config_lib
from anp_jax.cluster import preemption
from anp_jax.runtimes.model_ring import (
  controller as controller_lib,
  messages,
  ring as ring_lib,
  ring_runner as runner_lib,
  ring_worker as worker_lib,
  spans as spans_lib,
  store as store_lib,
)
from anp_jax.system import compile_cache

_POLL = 0.05  # seconds
# Phases of a station, what may last longest first.
_PHASES = 'compiling', 'evaluating', 'saving', 'step', 'waiting'


def run(
  config: ml_collections.ConfigDict,
  workdir: str,
  processes: cluster.Processes,
  mode: str = 'train',
  which: str = 'newest',
) -> dict:
  """Trains, or continues, the models of a ring; or scores them again.

  Args:
    config: config, resolved and valid.
    workdir: folder of the run, which all processes see.
    processes: processes of the run.
    mode: 'train' or 'evaluate'.
    which: checkpoint that mode 'evaluate' scores: 'newest', 'best' or a step.

  Returns:
    On process 0, the last scores of the best model, {} if there are none.

  Raises:
    ConfigError: if the config fits neither the devices nor the workdir.
    cluster.RunFailedError: if too many examples cannot be read.
  """
  processes.check_shared(workdir)
  compile_cache.enable(config)
  if mode == 'evaluate' and processes.count > 1:
    raise config_lib.ConfigError(
      f'--mode=evaluate of a ring takes one process, not {processes.count}'
    )
  training = mode == 'train'
  ring = ring_lib.create(config, workdir, processes)
  store_lib.claim_workdir(ring, processes, training)
  runners = [runner_lib.Runners(ring, s) for s in ring.local_stations]
  # Bad input is refused now, rather than when it is a model's turn.
  for model in ring.models:
    runners[0][model]
  with contextlib.ExitStack() as stack:
    store = store_lib.Store(runners[0], training)
    stack.callback(store.close)
    if not training:
      return controller_lib.evaluate(runners[0], store, which)
    return _RingProcess(ring, runners, store, processes, stack).train()


class _RingProcess:
  """The stations of this process, on process 0 the controller, and their events.

  Stations, controller and other processes share nothing but the events that
  they send. Messages go straight to the queue of a station; all other events
  are handled one at a time by the main thread.
  """

  def __init__(self, ring, runners, store, processes, stack):
    """Opens the port of this process, which `stack` closes; nothing is trained yet."""
    self._processes, self._store = processes, store
    self._end: messages.End | None = None
    self._latest = ('', 0)  # phase and progress at the last heartbeat
    spans = spans_lib.Spans(ring.workdir, processes.index)
    queues = {r.station.number: messages.MessageQueue(r.place) for r in runners}
    self._sender = messages.Sender(ring, processes, store, spans, queues)
    stack.callback(self._sender.close)
    send_event = self._sender.send_event
    self._controller = None
    if not processes.index:
      self._controller = controller_lib.RingController(runners[0], store, send_event)
    self._workers = [
      worker_lib.RingWorker(r, queues[r.station.number], store, spans, send_event) for r in runners
    ]
    stack.callback(self._close)

  def train(self) -> dict:
    """Trains until all models have left the ring, or a signal."""
    processes = self._processes
    with processes.handling_signals(self._store.expected_save_seconds):
      models = self._controller.start() if self._controller else None
      models = processes.gather(models)[0]
      for worker in self._workers:
        worker.start(models)
      while self._end is None:
        if vote := processes.vote():
          end = messages.End(preemption.REASONS[vote])
          self._sender.send_event(messages.ALL, end)
        elif self._controller and self._controller.is_over():
          self._sender.send_event(messages.ALL, messages.End(''))
        self._handle_events(_POLL)
        self._heartbeat()
      for worker in self._workers:
        worker.join()
      self._gather('halted')
      steps = self._finish()
    if self._controller is None:
      return {}
    return self._controller.conclude(steps, self._end.reason)

  def _handle_events(self, wait=0.0):
    """Handles all events that are there; waits seconds for the first."""
    while True:
      try:
        event = self._sender.events.get(timeout=wait)
      except queue.Empty:
        return
      wait = 0.0
      if isinstance(event, BaseException):
        raise event
      if isinstance(event, messages.End):
        self._end = self._end or event
        for worker in self._workers:
          worker.stop()
      else:
        self._controller.on_event(event)

  def _heartbeat(self):
    phases = {worker.phase for worker in self._workers}
    phase = next(phase for phase in _PHASES if phase in phases)
    latest = phase, sum(worker.progress for worker in self._workers)
    if latest != self._latest or phase == 'waiting':  # else nothing has moved
      self._latest = latest
      self._processes.heartbeat(phase, max(worker.step for worker in self._workers))

  def _finish(self):
    """Saves and scores what waits; returns the steps of models in the ring."""
    workers = self._workers
    steps: dict[int, int] = {}
    self._processes.heartbeat('saving')
    for worker in workers:
      steps |= worker.save_waiting()
    self._store.wait()
    self._processes.heartbeat('evaluating')
    for worker in workers:
      worker.handle_waiting(messages.ScoreRequest)
    gathered = self._gather(steps)
    for worker in workers:
      worker.handle_waiting(messages.Ranked)
    self._store.wait()
    return {int(model): step for process_steps in gathered for model, step in process_steps.items()}

  def _gather(self, value):
    """Gathers values; what was sent before is handled when this returns."""
    self._sender.wait()
    self._handle_events()
    values = self._processes.gather(value)
    self._handle_events()
    return values

  def _close(self):
    for worker in self._workers:
      worker.close()
