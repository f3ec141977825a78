"""Checkpoints: Orbax behind one interface, with checksums and a fall-back.

Two managers, so that each can delete: `checkpoints/` holds the newest steps,
`best/` those with the best metric, saved only after an evaluation. Orbax
restores flipped bytes without a word; a checksum of each leaf, computed on the
device as part of the save, is stored with the state and compared on restore.
"""

from collections.abc import Callable, Collection, Sequence
import contextlib
import dataclasses
import gc
import math
import os
import shutil
import sys
import threading
import time
from typing import Any

from absl import logging
import jax
import ml_collections
import orbax.checkpoint as ocp

from anp_jax import cluster, config as config_lib
from anp_jax.checkpoint import checksums, reader
from anp_jax.cluster import process_info
from anp_jax.config import saved_run, urls
from anp_jax.system import memory, remote
from anp_jax.training import metric_labels

NEWEST, BEST = saved_run.NEWEST, saved_run.BEST
DAMAGED = 'damaged'
_LOWER_IS_BETTER = ('loss',)
_LOOK = 0.1  # seconds between two looks at a save
_WRITTEN = 'async_write_complete'  # Orbax's barrier after a process's own part of a save


class CheckpointError(cluster.RunFailedError):
  """A checkpoint could not be written; those before it are whole."""


@dataclasses.dataclass
class Checkpoints(reader.Reader):
  """The checkpoints of one workdir.

  Attributes:
    kinds: kinds of checkpoints whose folders are opened.
    on_phase: called with 'committing' once other processes alone still write, and
      with 'saving' when they have.
  """

  kinds: tuple[str, ...] = (NEWEST, BEST)
  on_phase: Callable[[str], None] = lambda phase: None

  def __post_init__(self):
    """Opens the folders; they are made, and cleared of torn saves, for a run."""
    super().__post_init__()
    config, kinds = self.config, self.kinds
    self._metric = metric_labels.key(config.checkpoint.best_metric)
    self._managers = {}
    self._written: dict[str, threading.Event] = {}  # set once this process's part is
    if NEWEST in kinds:
      self._managers[NEWEST] = self._manager(NEWEST, max_to_keep=config.checkpoint.keep)
    self._save_starts: dict[str, float] = {}  # of the last save of each kind
    self._longest_save = 0.0  # seconds from a save's start until it is on disk
    if config.checkpoint.keep_best and BEST in kinds:
      self._managers[BEST] = self._manager(
        BEST,
        max_to_keep=config.checkpoint.keep_best,
        # Another metric may have chosen those that are there.
        best_fn=lambda metrics: sort_key(self._metric, metrics.get(self._metric, math.nan)),
        best_mode='min',
        keep_checkpoints_without_metrics=False,
      )
    # A process that looked at the folder later, while another writes to it,
    # would decide for itself what is among the best.
    saved = [self._managers[BEST].metrics(step) or {} for step in self.steps(BEST)]
    self._best_keys = sorted(
      sort_key(self._metric, metrics[self._metric]) for metrics in saved if self._metric in metrics
    )[: config.checkpoint.keep_best]

  def steps(self, kind: str = NEWEST) -> list[int]:
    """Returns the steps that have a checkpoint, ascending; NEWEST or BEST."""
    manager = self._managers.get(kind)
    return sorted(manager.all_steps()) if manager else []

  def save(self, step: int, state: Any) -> None:
    """Starts to write the newest checkpoint; returns while it is written.

    The caller has read the step's own finite flag before. The state's buffers
    may be donated as soon as this returns.

    Raises:
      CheckpointError: if this one or the one before cannot be written, for want of
        space say.
    """
    self._await_previous_save(NEWEST)
    if step not in self.steps(NEWEST):
      self._save(NEWEST, step, state)

  def save_best(self, step: int, state: Any, metrics: dict) -> None:
    """Writes a checkpoint if its metric is among the best so far.

    Args:
      step: step of the state.
      state: TrainState.
      metrics: results of an evaluation of this state.

    Raises:
      CheckpointError: as `save`.
    """
    if BEST not in self._managers:
      return
    self._await_previous_save(BEST)
    if step in self.steps(BEST):
      return
    # Orbax would write first and delete after; what cannot stay is not written.
    value, keep = metrics[self._metric], self.config.checkpoint.keep_best
    key = sort_key(self._metric, value)
    if len(self._best_keys) < keep or key < self._best_keys[-1]:
      self._save(BEST, step, state, {self._metric: value})
      self._best_keys = sorted([*self._best_keys, key])[:keep]

  def has_best_of(self, scores: Sequence[dict]) -> bool:
    """Whether the best steps of some evaluations are kept.

    Args:
      scores: metrics and 'step' of each evaluation, in order.
    """
    if BEST not in self._managers:
      return True
    order = sorted(scores, key=lambda s: sort_key(self._metric, s[self._metric]))
    best = {s['step'] for s in order[: self.config.checkpoint.keep_best]}
    return best <= set(self.steps(BEST))

  def restore(self, which: str = 'newest') -> tuple[Any, int] | None:
    """Reads the newest whole checkpoint, or a named one.

    A damaged newest one is named, and the one before is used. What is damaged is then
    moved to `damaged/`, unless the folders are only read. Where none can be read, all
    stay where they are: a full memory, or a store that does not answer, may be why.

    Args:
      which: 'newest', 'best' or a step.

    Returns:
      (state, step), or None where the workdir has no checkpoint yet.

    Raises:
      ConfigError: if the checkpoint belongs to another run, or none is whole.
    """
    if which != 'newest':
      return self._restore_named(which)
    manager = self._managers[NEWEST]
    tried: list[int] = []
    while left := self.gather([s for s in reversed(self.steps()) if s not in tried])[0]:
      step = left[0]
      try:
        state = self.read(manager.directory / str(step))
        self._quarantine(tried)
        return state, step
      except reader.CorruptCheckpointError as e:
        logging.error('checkpoint %d is damaged (%s)', step, e)
      tried.append(step)
      # The run that owns the folder may have deleted it, and saved another.
      manager.reload()
    if tried:
      raise config_lib.ConfigError(
        f'{self.workdir}: none of the checkpoints '
        f'{", ".join(map(str, tried))} is whole; to start again, choose '
        'another --workdir'
      )
    return None

  def changes(self) -> dict[str, tuple]:
    """Returns what --change altered since the restored checkpoint was saved."""
    saved = self.saved_config
    return config_lib.changes(saved, self.config) if saved else {}

  def expected_save_seconds(self) -> float:
    """Returns the seconds that one more save may take, judged by earlier ones.

    It must be called often, from any thread: this is how a save is timed.
    """
    left = 0.0
    for kind, start in tuple(self._save_starts.items()):
      spent = time.monotonic() - start
      saving = self._managers[kind].is_saving_in_progress()
      if saving and self._save_starts.get(kind) == start:  # not the next one
        self._longest_save = max(self._longest_save, spent)
        left = max(left, self._longest_save - spent)
    return left + self._longest_save

  def wait(self) -> None:
    """Returns when everything is on disk.

    Raises:
      CheckpointError: if it does not get there.
    """
    with contextlib.ExitStack() as stack:  # all, also if one raises
      for kind in self._managers:
        stack.callback(self._await_previous_save, kind)

  def close(self) -> None:
    """Waits and releases the managers.

    Raises:
      CheckpointError: if not everything gets to the disk.
    """
    with contextlib.ExitStack() as stack:
      for kind, manager in self._managers.items():
        stack.callback(self._call, kind, manager.close)

  def _call(self, kind, call, *arguments):
    """Calls Orbax; what a disk answers becomes a CheckpointError."""
    try:
      call(*arguments)
    except Exception as e:  # noqa: BLE001 - whatever a disk answers
      raise self._error(kind, reader.describe(e)) from e

  def _manager(self, folder, max_to_keep, **options):
    # What is not this run's own may be in the midst of a save.
    may_change = self.fingerprint is not None
    written, meet = threading.Event(), ocp.multihost.get_barrier_sync_fn()

    def meet_others(key, timeout_ms):
      if _WRITTEN in key:
        written.set()
      meet(key=key, timeout_ms=timeout_ms)

    self._written[folder] = written
    return ocp.CheckpointManager(
      remote.path(os.path.join(self.workdir, folder)),
      options=ocp.CheckpointManagerOptions(
        create=may_change,
        cleanup_tmp_directories=may_change,
        max_to_keep=max_to_keep if may_change else None,
        # Two managers save at once: their barriers must not be taken for one.
        multiprocessing_options=ocp.options.MultiprocessingOptions(barrier_sync_key_prefix=folder),
        async_options=ocp.AsyncOptions(barrier_sync_fn=meet_others),
        **options,
      ),
      item_handlers={'state': ocp.StandardCheckpointHandler(), 'meta': ocp.JsonCheckpointHandler()},
    )

  def _await_previous_save(self, kind):
    """Waits for the save before, as Orbax would, and sees whether it failed."""
    manager, waits = self._managers[kind], False
    while jax.process_count() > 1 and manager.is_saving_in_progress() and not waits:
      waits = self._written[kind].wait(_LOOK)
    if waits:
      self.on_phase('committing')
    self._call(kind, manager.wait_until_finished)
    if waits:
      self.on_phase('saving')

  def _save(self, kind, step, state, metrics=None):
    """Starts to write a checkpoint."""
    # One process looks, so that all save or none.
    problem = self.gather(self._disk_shortage())[0]
    if problem:
      raise self._error(kind, problem)
    start = time.monotonic()
    self._written[kind].clear()
    self._save_starts.pop(kind, None)
    self._call(kind, self._write, kind, step, state, metrics)
    self._save_starts[kind] = start

  def _write(self, kind, step, state, metrics):
    meta = reader.meta(self.config, self.fingerprint, process_info.versions())
    with _undisturbed():
      self._managers[kind].save(
        step,
        args=ocp.args.Composite(
          state=ocp.args.StandardSave({'state': state, 'sums': checksums.of_tree(state)}),
          meta=ocp.args.JsonSave(meta),
        ),
        metrics=metrics,
        force=True,
      )

  def _disk_shortage(self):
    """Why a save does not fit on the disk; '' if it fits."""
    if urls.scheme(self.workdir):
      return ''
    leaves = jax.tree.leaves(self.abstract_state)
    need = sum(map(memory.of_array, leaves))
    free = shutil.disk_usage(self.workdir).free
    if free >= need:
      return ''
    return f'it takes {need / 1e6:.1f} MB, and {free / 1e6:.1f} are free'

  def _error(self, kind, problem):
    steps = ', '.join(map(str, self.steps(kind))) or 'none'
    return CheckpointError(
      f'{self.workdir}/{kind}: a checkpoint could not be written: {problem} '
      f'(there are, whole: {steps})'
    )

  def _restore_named(self, which):
    if which == 'best':
      kind = BEST
      step = self._managers[BEST].best_step() if BEST in self._managers else None
      if step is None:
        raise config_lib.ConfigError(f'{self.workdir} has no best checkpoint')
    else:
      step = int(which)
      kind = next((k for k in (NEWEST, BEST) if step in self.steps(k)), None)
      if kind is None:
        steps = sorted({*self.steps(NEWEST), *self.steps(BEST)})
        raise config_lib.ConfigError(
          f'{self.workdir} has no checkpoint of step {step} (it has '
          f'{", ".join(map(str, steps)) or "none"})'
        )
    try:
      folder = self._managers[kind].directory / str(step)
      return self.read(folder), step
    except reader.CorruptCheckpointError as e:
      raise config_lib.ConfigError(f'{self.workdir}/{kind}/{step} is damaged: {e}') from e

  def _quarantine(self, steps):
    """Moves damaged checkpoints away, unless the folders are only read."""
    if not steps or self.fingerprint is None:
      return
    for step in steps:
      target = os.path.join(self.workdir, DAMAGED, f'{step}-{time.strftime("%Y%m%d-%H%M%S")}')
      if jax.process_index() == 0:
        remote.move(os.path.join(self.workdir, NEWEST, str(step)), target)
      logging.error('checkpoint %d is set aside as %s', step, self.gather(target)[0])
    self._managers[NEWEST].reload()


def sort_key(metric: str, value: float) -> float:
  """Returns a key that sorts values of a metric from the best on, NaN last."""
  if math.isnan(value):
    return math.inf
  return value if metric in _LOWER_IS_BETTER else -value


def check_best_metric(config: ml_collections.ConfigDict, names: Collection[str]) -> None:
  """Refuses, before training, a metric that evaluation will not give.

  Args:
    config: the run's config.
    names: names of an evaluation's metrics.

  Raises:
    ConfigError: naming the metric and the nearest there is.
  """
  chosen = config.checkpoint.best_metric
  if metric_labels.key(chosen) not in names:
    labels = metric_labels.names(names).values()
    raise config_lib.ConfigError(
      f'config.checkpoint.best_metric={chosen!r}: evaluation of this data set '
      f'gives {", ".join(labels)}{config_lib.nearest(chosen, labels)}'
    )


@contextlib.contextmanager
def _undisturbed():
  """Keeps Python's collector and other threads from delaying a save.

  A pass of the collector over a large heap took 100 ms; and each of Orbax's
  nine threads may hold the interpreter for its switch interval, often 5 ms.
  """
  enabled, interval = gc.isenabled(), sys.getswitchinterval()
  gc.disable()
  sys.setswitchinterval(2e-4)
  try:
    yield
  finally:
    sys.setswitchinterval(interval)
    if enabled:
      gc.enable()
