"""Simulated workers: the order of their updates, worked out before they are computed."""

from collections.abc import Iterator
import contextlib
import threading
from typing import NamedTuple

import jax
import numpy as np

from anp_jax import cluster
from anp_jax.parallel import division
from anp_jax.runtimes.parameter_server import (
  delayed_step,
  log as log_lib,
  look_ahead,
  scheduler,
  timeline as timeline_lib,
)
from anp_jax.system import emulation
from anp_jax.training import run_spec


class _Update(NamedTuple):
  """One update.

  Attributes:
    step: step of its tickets, or (n,) the step of each row.
    rows: (n,) rows of these steps' batches.
    order: `delayed_step.Order`, (7,) int32.
    staleness: updates between reading and applying.
    seconds: simulated seconds until it is made.
  """

  step: int | np.ndarray
  rows: np.ndarray
  order: np.ndarray
  staleness: int
  seconds: float


class Simulation:
  """The updates of a session, with the times of config.strategy.simulate.

  Threads that read batches ahead call it. An update is forgotten once `values` was
  called for a later one.
  """

  orders_batches = True

  def __init__(self, spec: run_spec.RunSpec, workdir: str, version: int):
    """Begins where the log's update to a version ended.

    Args:
      spec: spec of the run.
      workdir: folder of the run, with its log.
      version: updates that the state has had.

    Raises:
      ConfigError: if a batch does not divide into the parts of an update, or a part
        not over the devices.
    """
    self._spec, config = spec, spec.config
    s, self._workdir, self._start = config.strategy, workdir, version
    self._parts = scheduler.data_shards(config, s.simulate.workers)
    scheduler.check_batch(config, self._parts)
    division.check(config, config.batch_size // self._parts, spec.mesh)
    records = log_lib.read(workdir)
    self._seconds = log_lib.simulated_seconds(records, version)
    self._ahead = look_ahead.settings(config, s.simulate.workers)
    timeline = timeline_lib.Timeline(config, records, spec.total_steps, version)
    self._coming = self._work_out(timeline)
    self._updates: dict[int, _Update] = {}
    self._next = self._counted = version  # to be worked out; to be in metrics
    self._lock = threading.Lock()

  def step_and_rows(self, step: int) -> tuple[int | np.ndarray, np.ndarray]:
    """The batch of the update from version `step` on; see `BatchSampler.tickets`."""
    update = self._update(step)
    return update.step, update.rows

  def ordered(
    self, batches: Iterator[dict], sharding: jax.sharding.Sharding, start: int
  ) -> Iterator[dict]:
    """Yields device batches from update `start` on, each with its order."""
    for step, batch in enumerate(batches, start):
      yield batch | {delayed_step.ORDER: jax.device_put(self.order(step), sharding)}

  def order(self, step: int) -> np.ndarray:
    """The `delayed_step.Order` (7,) int32 of the update from version `step` on."""
    return self._update(step).order

  def values(self, kind: str, step: int) -> dict[str, float]:
    """Metrics at a version.

    Args:
      kind: 'train' or 'validation'.
      step: version.

    Returns:
      'simulated_seconds' from the run's start; in training also the mean 'staleness' of
      the updates since the last call, and how many had which.
    """
    with self._lock:
      if step > self._start:
        self._seconds = self._updates[step - 1].seconds
      values = {'simulated_seconds': self._seconds}
      if kind != 'train':
        return values
      recent = [self._updates[n].staleness for n in range(self._counted, step)]
      self._counted = step
      self._updates = {n: u for n, u in self._updates.items() if n >= step - 1}
    return values | log_lib.staleness_metrics(recent)

  def describe(self) -> str:
    """Returns what is simulated, in one line."""
    s = self._spec.config.strategy
    passes = ', '.join(emulation.describe_pass(s.simulate, 'worker'))
    return (
      f'simulated, {s.mode}: {s.simulate.workers}{look_ahead.describe(self._ahead)}, {passes}, '
      f'pull {s.simulate.pull_seconds:g} s, push {s.simulate.push_seconds:g} s; '
      f'{delayed_step.slots(self._spec.config)} versions of the weights are kept'
    )

  def close(self) -> None:
    """Closes the log."""
    with self._lock:
      self._coming.close()

  def _update(self, step):
    with self._lock:
      # Streams read in blocks, from before the first update and past the last one.
      while self._next <= min(max(step, self._start), self._spec.total_steps - 1):
        update = next(self._coming, None)
        if update is None:
          raise cluster.RunFailedError(f'no update of version {self._next} is ordered')
        self._updates[self._next] = update
        self._next += 1
      return self._updates.get(step, self._updates[self._next - 1])

  def _work_out(self, timeline):
    """Yields the updates in order, once they are in the log."""
    config = self._spec.config
    images, workers = config.batch_size // self._parts, config.strategy.simulate.workers
    settings = log_lib.session_settings(config, self._parts, self._ahead, workers)
    log = log_lib.UpdateLog(self._workdir, self._start, settings)
    holders = look_ahead.first_holders(self._ahead, self._start)
    momentum, is_new, nobodys = len(holders), False, len(holders)
    unread = delayed_step.slots(config) - 1
    free, slots = set(range(unread)), dict[int, int]()  # slots by version
    with contextlib.closing(log):
      for version, update in enumerate(timeline.updates(), self._start):
        contributions = [c | {'weight': float(images)} for c in update.contributions]
        log.append(version, self._spec.mesh.size, contributions)
        first = contributions[0]
        free |= {slots.pop(v) for v in slots.keys() - update.reads}
        if version in update.reads:
          slots[version] = free.pop()
        last, gone = momentum, None
        if holders:
          before, in_flight = holders, self._ahead.in_flight
          holders, momentum, gone = look_ahead.claim(holders, first['worker'], version, in_flight)
          is_new = before[momentum].is_gone or momentum == gone
        steps, shards = zip(*(c['ticket'] for c in contributions))
        read = first['reads'][0]
        order = delayed_step.Order(
          ticket=steps[0],
          write=slots.get(version, unread),
          read=slots[read],
          last=last,
          momentum=momentum,
          is_new=is_new,
          gone=nobodys if gone is None else gone,
        )
        yield _Update(
          step=steps[0] if len(set(steps)) == 1 else np.repeat(steps, images),
          rows=np.concatenate([np.arange(images) + shard * images for shard in shards]),
          order=np.array(order, np.int32),
          staleness=version - read,
          seconds=first['seconds'],
        )
