"""The folders of a ring's models: their checkpoints, and who may write."""

import os
import threading
from typing import Any

from anp_jax import cluster, config as config_lib
from anp_jax.checkpoint import manager as checkpoint_lib, run_dir
from anp_jax.config import saved_run
from anp_jax.data import sources
from anp_jax.reporting import delayed_metrics
from anp_jax.runtimes.model_ring import (
  records as records_lib,
  ring as ring_lib,
  ring_runner as runner_lib,
)
from anp_jax.system import files

_FILE = 'model_ring.json'


def claim_workdir(ring: ring_lib.Ring, processes: cluster.Processes, training: bool) -> None:
  """Claims the workdir for a ring; process 0 reads and writes.

  Args:
    ring: models, stations and data.
    processes: processes of the run.
    training: whether the ring is to train; else its checkpoints are scored,
      and nothing is written.

  Raises:
    ConfigError: on all processes, if the workdir belongs to another run.
  """
  refusal = '' if processes.index else _refusal(ring, training)
  refusal = processes.gather(refusal)[0]
  if refusal:
    raise config_lib.ConfigError(refusal)
  if training and not processes.index:
    for model in ring.models:
      os.makedirs(ring.folder(model), exist_ok=True)


class Store:
  """Writes the folders of the models that this process holds.

  A process that holds a model is the only one to write its newest checkpoints:
  before the model goes to another process, its last save has to be done
  (`let_go`). The best are written by the process whose station ended the lap.

  Attributes:
    records: metrics of the models.
  """

  def __init__(self, runners: runner_lib.Runners, training: bool):
    """Prepares the folders' writers; nothing is written yet.

    Args:
      runners: runners of the station on whose devices checkpoints are restored.
      training: whether the ring trains; else nothing is changed.
    """
    self._ring = ring = runners.ring
    self._runners = runners
    examples = len(ring.source)
    self._log_every = [
      config_lib.steps(ring.config.log.every, c.config.batch_size, examples)
      for c in ring.candidates
    ]
    self._fingerprint = sources.fingerprint(ring.source) if training else None
    # Orbax numbers its saves: two that begin at one time wait for each other.
    self._saving = threading.Lock()
    self._checkpoints: dict[int, checkpoint_lib.Checkpoints] = {}
    self._training = training
    self._held: dict[tuple[int, int], Any] = {}  # states by model and step
    self._best: dict[int, checkpoint_lib.Checkpoints] = {}
    self._damage = [
      delayed_metrics.DamageCounter(ring.config, ring.source.name, c.config.batch_size)
      for c in ring.candidates
    ]
    self._save_seconds = 0.0  # of models that were let go
    self.records = records_lib.Records(ring)

  def checkpoints(self, model: int) -> checkpoint_lib.Checkpoints:
    """Returns a model's checkpoints, opened at the first call."""
    if model not in self._checkpoints:
      kinds = [checkpoint_lib.NEWEST]
      if not self._training:  # nobody writes
        kinds.append(checkpoint_lib.BEST)
      self._checkpoints[model] = self._open(model, *kinds)
    return self._checkpoints[model]

  def save(self, model: int, step: int, state: Any) -> None:
    """Begins to save a model, unless it is saved at this step."""
    with self._saving:
      self.checkpoints(model).save(step, state)

  def hold(self, model: int, step: int, state: Any) -> None:
    """Keeps a copy of a model's state in memory until its scores come."""
    self._held[model, step] = state

  def keep_if_best(self, model: int, step: int, scores: dict) -> None:
    """Begins to save a state that is held, if its scores are among the best.

    Args:
      model: index of the model.
      step: step of the state.
      scores: scores of the state.
    """
    state = self._held.pop((model, step), None)
    if state is None:
      return
    with self._saving:
      if model in self._best:
        self._best.pop(model).close()
      # Opened for each: the lap before may have ended in another process.
      best = self._best[model] = self._open(model, checkpoint_lib.BEST)
      best.save_best(step, self._runners[model].place(state), scores)

  def expected_save_seconds(self) -> float:
    """Returns the seconds that saves of all models take; any thread may call it."""
    seconds = max((self._save_seconds, *(c.expected_save_seconds() for c in self._all())))
    return seconds * len(self._ring.models)

  def let_go(self, model: int) -> None:
    """Returns once a model's last save is done and its files are closed."""
    self.records.close_model(model)
    with self._saving:
      checkpoints = self._checkpoints.pop(model, None)
    if checkpoints:
      checkpoints.close()
      self._save_seconds = max(self._save_seconds, checkpoints.expected_save_seconds())

  def wait(self) -> None:
    """Returns once all saves are done."""
    for checkpoints in self._all():
      checkpoints.wait()

  def close(self) -> None:
    """Waits, and releases all checkpoints and files."""
    self.records.close()
    for checkpoints in self._all():
      checkpoints.close()

  def record_step(self, model: int, metrics: delayed_metrics.StepMetrics) -> None:
    """Records the metrics of a model's step, as often as config.log.every says.

    Raises:
      eval_loop.CorruptExampleError: if too many examples cannot be read.
    """
    damage, step = self._damage[model], metrics.step
    damage.add_step(metrics.values['damaged'])
    if step % self._log_every[model] == 0 or step == self._runners[model].schedule.total:
      values = metrics.values | {'damaged': damage.damaged}
      self.records.train(model, step, values)

  def _all(self):
    return [*self._checkpoints.values(), *self._best.values()]

  def _open(self, model, *kinds):
    return checkpoint_lib.Checkpoints(
      self._ring.folder(model),
      self._ring.candidates[model].config,
      self._fingerprint,
      self._runners[model].abstract_state,
      kinds=kinds,
    )


def _refusal(ring, training):
  """Returns why the workdir is refused; '' if it is taken."""
  path = os.path.join(ring.workdir, _FILE)
  current = {
    'parts': list(ring.sizes),
    'laps': ring.laps.total,
    'models': [c.text for c in ring.candidates],
  }
  saved = files.read_json(path)
  if not saved and not training:
    return f'{ring.workdir} has no checkpoint of a ring to evaluate'
  if saved:
    if not training:  # scores are the same on any devices
      saved['parts'] = current['parts']
    if difference := _difference(saved, current, ring):
      return f'{ring.workdir} belongs to another {difference}'
  if training:
    run_dir.claim_workdir(ring.workdir, ring.config, ring.source.vocabulary)
    files.write_json(path, current)
  return ''


def _difference(saved, current, ring):
  """Returns what makes a workdir's ring another one; '' if nothing does."""
  other = '; choose another --workdir'
  for key, what in (('parts', 'stations have parts of'), ('laps', 'models make laps:')):
    if saved[key] != current[key]:
      return f'ring: its {what} {saved[key]}, not {current[key]}{other}'
  if saved['models'] != current['models'][: len(saved['models'])]:
    return f'ring: config.strategy.models may only grow at its end{other}'
  difference = config_lib.difference(saved_run.read(ring.workdir), ring.config)
  return difference and f'run: {difference}{other}'
