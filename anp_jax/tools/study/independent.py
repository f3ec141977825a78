"""The strategy `independent`: the baseline of a ring, in which no model travels.

Process j trains models j, j + n, ... of config.strategy.models one after another
on its own devices. Nothing is saved but metrics and scores: a run that was stopped starts again.
"""

from collections.abc import Callable
import os
import time
from typing import Any

import jax
import ml_collections

from anp_jax import cluster, config as config_lib
from anp_jax.checkpoint import run_dir
from anp_jax.config import strategy as strategy_lib
from anp_jax.data import sources
from anp_jax.data.input import tensorflow_cpu
from anp_jax.parallel import mesh as mesh_lib
from anp_jax.reporting import telemetry
from anp_jax.runtimes.model_ring import (
  candidates as candidates_lib,
  compiled,
  leaderboard as leaderboard_lib,
  model_ring_strategy,
  ring as ring_lib,
  ring_runner,
  schedule as schedule_lib,
  spans as spans_lib,
)
from anp_jax.system import compile_cache, files
from anp_jax.tools.study import ring_times


class Independent(model_ring_strategy.ModelRing):
  """Many models, each trained by one process on the whole set."""

  name = 'independent'
  state = 'independent'

  def run(self, invocation: strategy_lib.Invocation, loop: Callable) -> dict:
    """Trains the models, and writes their scores as a ring does."""
    del loop
    if invocation.mode != 'train':
      raise config_lib.ConfigError(
        f'--mode={invocation.mode}: expected train, since nothing is saved'
      )
    config, processes = invocation.config, invocation.processes
    processes.check_shared(invocation.workdir)
    compile_cache.enable(config)
    trainer = Trainer(config, invocation.workdir, processes)
    laps = ring_lib.Laps(trainer.laps, 1)
    if not processes.index:
      run_dir.claim_workdir(invocation.workdir, config, trainer.source.vocabulary)
      models = [c.text for c in trainer.candidates]
      ring_times.start(invocation.workdir, models, len(trainer.source), laps, processes.count)
    processes.gather('opened')
    scores = processes.gather(trainer.run())
    if processes.index:
      return {}
    best = leaderboard_lib.Leaderboard(
      invocation.workdir, trainer.candidates, laps, config.checkpoint.best_metric
    )
    for record in (record for records in scores for record in records):
      best.add(*record)
    best.write()
    # A study that was interrupted sees by it that the run has ended.
    telemetry.write_result(invocation.workdir, {'step': scores[0][-1][2] if scores[0] else 0})
    return best.best()


class Trainer:
  """The models of one process.

  Attributes:
    candidates: models of all processes.
    laps: epochs of each model.
    source: whole training set.
  """

  def __init__(self, config: ml_collections.ConfigDict, workdir: str, processes: cluster.Processes):
    """Opens the data; nothing is trained yet."""
    self._processes = processes
    self._validation = sources.open_source(config, training=False)
    self.source = sources.open_source(config, training=True)
    self.laps = candidates_lib.laps('duration', config.duration)
    if self.source.kind == 'encoded' and config.data.decode == 'exact':
      tensorflow_cpu.load()  # seconds; not in the middle of a turn
    self._mesh = mesh_lib.create(config, jax.local_devices())
    self.candidates = candidates_lib.create(config, self._mesh.size)
    self._programs = compiled.Programs()
    self._workdir = workdir

  def run(self) -> list[tuple[int, int, int, dict]]:
    """Trains this process's models; returns (model, laps, step, scores) of each lap."""
    index, scores = self._processes.index, []
    spans = spans_lib.Spans(self._workdir, index)
    for model in range(index, len(self.candidates), self._processes.count):
      config: Any = self.candidates[model].config
      schedule = schedule_lib.RingSchedule((len(self.source),), config.batch_size, self.laps)
      shard: Any = self.source  # the whole set in place of a subset
      station = schedule_lib.Station(0, self._mesh, shard)
      runner = ring_runner.Runner(self.candidates[model], schedule, station, self._programs)
      with spans.record(index, 'prepare', model, None):
        runner.compile(len(self._validation))
        state, step = runner.new_state(''), 0
      for lap in range(self.laps):
        self._processes.heartbeat('training', step)
        segment = schedule.segment(lap, 0)
        runner.prepare(segment.first)
        with spans.record(index, 'train', model, lap) as span:
          for metrics, current in runner.train(state, step, segment.steps):
            if current is not None:
              state, step = current, metrics.step
              self._record(model, 'train', lap, step, metrics.values)
          jax.block_until_ready(state)
          span['steps'] = segment.steps
        with spans.record(index, 'score', model, lap + 1):
          values = runner.score(state.evaluated(), self._validation)
        self._record(model, 'validation', lap, step, values)
        scores.append((model, lap + 1, step, values))
      runner.close()
    return scores

  def _record(self, model, kind, lap, step, values):
    """Adds a line to the metrics of a model, where those of a ring are."""
    folder = os.path.join(self._workdir, 'models', self.candidates[model].name)
    os.makedirs(folder, exist_ok=True)
    line = {'kind': kind, 'step': step, 'time': time.time(), 'epoch': lap + 1, **values}
    files.append_json_line(os.path.join(folder, telemetry.METRICS), line)
