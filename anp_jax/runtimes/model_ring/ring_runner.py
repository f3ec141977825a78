"""A model at one station: its programs, and its stream of the shard there."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from anp_jax import config as config_lib, experiment
from anp_jax.data import sources
from anp_jax.data.input import feed as feed_lib, stream as stream_lib
from anp_jax.parallel import division, mesh as mesh_lib, state as state_lib
from anp_jax.reporting import delayed_metrics
from anp_jax.runtimes import transport
from anp_jax.runtimes.model_ring import (
  candidates as candidates_lib,
  compiled as programs_lib,
  ring as ring_lib,
  schedule as schedule_lib,
)
from anp_jax.training import (
  build,
  eval_loop,
  objective as objective_lib,
  run_spec,
  train_step as step_lib,
)


class Runner:
  """Trains and scores one model at one station.

  Attributes:
    config: config of the model.
    schedule: schedule of the model.
    abstract_state: the model's TrainState of jax.ShapeDtypeStruct, on the
      station's devices.
  """

  def __init__(
    self,
    candidate: candidates_lib.Candidate,
    schedule: schedule_lib.RingSchedule,
    station: schedule_lib.Station,
    programs: programs_lib.Programs,
  ):
    """Builds the model; nothing is compiled and no array made yet.

    Raises:
      ConfigError: for what a config alone does not show.
    """
    self.config = config = candidate.config
    self.schedule = schedule
    self._model, self._programs = candidate.index, programs
    mesh = station.mesh
    division.check(config, config.batch_size, mesh)
    # Schedules end with the last step: with several shards, more batches are
    # filled up than with one.
    build_config = config_lib.replaced(config, {'duration': f'{schedule.total} steps'})
    objective = objective_lib.create(station.shard.vocabulary, config)
    spec = run_spec.RunSpec(build_config, mesh, objective, config.batch_size, schedule.examples)
    self._experiment = experiment.Experiment(spec, station.shard)
    self.abstract_state = self._experiment.program.abstract_state
    self._stream, self._validation = (
      stream_lib.Stream(config_lib.replaced(config, {'seed': seed}), mesh_lib.batch_sharding(mesh))
      for seed in (schedule_lib.stream_seed(config.seed, station.number), candidate.run_seed)
    )
    self._feed: feed_lib.Feed | None = None
    self._next = 0  # step of the shard's stream that the feed yields next
    self._compiled: dict[str, jax.stages.Compiled] = {}  # programs by name

  def new_state(self, folder: str) -> state_lib.TrainState:
    """Returns the state with which the model begins.

    Args:
      folder: folder of the model, see `weights.initial.load`.
    """
    return self._experiment.new_state(folder)[0]

  def place(self, state: Any) -> state_lib.TrainState:
    """Returns a TrainState, or its bytes, on the devices of the station."""
    return _placed(state, self.abstract_state)

  def compile(self, validation: int) -> None:
    """Compiles what is not compiled yet, in the order in which it is needed.

    Args:
      validation: number of examples of the validation set.
    """
    self._train_step()
    size = stream_lib.evaluation_batch(self.config, validation, self._experiment.mesh.size)
    batch = build.abstract_batch(self.config, self._experiment.mesh, size)
    self._program('eval_step', *self.abstract_state.evaluated(), batch)

  def prepare(self, first: int) -> None:
    """Opens the stream of the shard, and compiles the step if it is not yet.

    Args:
      first: step of the shard's own stream.
    """
    if self._feed is None or self._next != first:
      self.close()
      # Open from lap to lap: a segment begins where the last one ended.
      shard = self._experiment.source
      self._feed = self._stream.train(shard, self.config.batch_size, first)
      self._next = first
    self._train_step()

  def train(
    self, state: Any, start_step: int, count: int, stopped: Callable[[], bool] = lambda: False
  ) -> Iterator[tuple[delayed_metrics.StepMetrics, state_lib.TrainState | None]]:
    """Makes the steps of a segment; call `prepare` first.

    Args:
      state: TrainState on the station's devices; donated.
      start_step: step of the state.
      count: steps to make.
      stopped: () -> whether to make no more.

    Yields:
      The metrics of each step, one step late, and the state where it is still
      that step's: where it is due to be saved, and at the last.

    Raises:
      delayed_metrics.NotFiniteError: naming the step; there is no state any more.
    """
    assert self._feed is not None
    program = self._train_step()
    names = step_lib.metric_names(self._experiment.spec.objective)
    metrics = delayed_metrics.DelayedMetrics(names)
    for step in range(start_step + 1, start_step + count + 1):
      if stopped():
        break
      batch = next(self._feed)
      self._next += 1
      state, values = program(state, batch)
      if previous := metrics.push(step, values):
        yield previous, None
      if self.is_save_due(step) and (current := metrics.flush()):
        yield current, state
    if last := metrics.flush():
      yield last, state

  def is_save_due(self, step: int) -> bool:
    """Returns whether config.checkpoint.every says to save after a step."""
    every = self._experiment.spec.steps(self.config.checkpoint.every)
    return step % every == 0 or step == self.schedule.total

  def score(self, evaluated: Any, source: sources.Source) -> dict[str, float]:
    """Computes means over a validation set, every example once.

    Args:
      evaluated: result of `TrainState.evaluated` at any station, or its bytes.
      source: validation set.
    """
    params, stats = _placed(evaluated, self.abstract_state.evaluated())

    def step(*arguments):
      return self._program('eval_step', *arguments)(*arguments)

    batches = self._validation.evaluation(source)
    state = state_lib.TrainState(0, params, stats, (), {})  # type: ignore[call-arg]  # of flax.struct
    return eval_loop.run(step, state, batches)

  def close(self) -> None:
    """Ends the stream; a later `prepare` opens it again."""
    if self._feed is not None:
      self._feed.close()
      self._feed = None

  def release(self) -> None:
    """Ends the stream, and drops what was compiled for this model alone."""
    self.close()
    for name in self._compiled:
      # What JAX keeps of a function holds its compiled program, too.
      getattr(self._experiment.program, name).clear_cache()
    self._compiled.clear()
    self._programs.release(self._model)

  def _train_step(self):
    batch = build.abstract_batch(self.config, self._experiment.mesh, self.config.batch_size)
    return self._program('train_step', self.abstract_state, batch)

  def _program(self, name, *arguments):
    """Returns the compiled program of this name, for arguments like these."""
    if name not in self._compiled:
      program = getattr(self._experiment.program, name)
      self._compiled[name] = self._programs.get(self._model, program, *arguments)
    return self._compiled[name]


class Runners:
  """The runners of one station by model, each created at its first use.

  Attributes:
    ring: models, stations and data.
    station: station at which the models run.
  """

  def __init__(self, ring: ring_lib.Ring, station: schedule_lib.Station):
    """Creates no runner yet."""
    self.ring, self.station = ring, station
    self._programs = programs_lib.Programs()
    self._runners: dict[int, Runner] = {}

  def __getitem__(self, model: int) -> Runner:
    """Returns a model's runner; any thread may call it.

    Raises:
      ConfigError: see `Runner`.
    """
    if model not in self._runners:
      runner = Runner(
        self.ring.candidates[model], self.ring.schedule(model), self.station, self._programs
      )
      # Of two threads that create one at the same time, the first one's counts.
      self._runners.setdefault(model, runner)
    return self._runners[model]

  def get(self, model: int) -> Runner | None:
    """Returns a model's runner if it was used before."""
    return self._runners.get(model)

  def place(self, model: int, state: Any) -> Any:
    """Begins to move a TrainState of this process to the station's devices."""
    runner = self.get(model)
    return runner.place(state) if runner and isinstance(state, state_lib.TrainState) else state

  def close(self) -> None:
    """Ends all streams."""
    for runner in list(self._runners.values()):
      runner.close()


def _placed(tree, abstract):
  """Returns a tree from elsewhere, or its bytes, with abstract's shardings."""
  if isinstance(tree, np.ndarray):
    tree = transport.split(tree, abstract)
  return jax.device_put(tree, jax.tree.map(lambda s: s.sharding, abstract))
