"""A model at one station: its programs, and its stream of the shard there."""

from collections.abc import Callable, Iterator

import jax
import numpy as np

from anp_jax import config as config_lib
from anp_jax.checkpoint.weights import initial
from anp_jax.data.input import stream as stream_lib
from anp_jax.parallel import division, mesh as mesh_lib, state as state_lib
from anp_jax.reporting import delayed_metrics
from anp_jax.runtimes import transport
from anp_jax.runtimes.model_ring import (
  candidates as candidates_lib,
  compiled as programs_lib,
  schedule as schedule_lib,
)
from anp_jax.training import (
  build,
  eval_loop,
  objective as objective_lib,
  run_spec,
  train_step as step_lib,
)

_NAMES = ('init_fn', 'train_step', 'eval_step')


class Runner:
  """Trains and scores one model at one station.

  Attributes:
    config: of the model.
    schedule: of the model.
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
    self._model = candidate.index
    self._shard, self._mesh = station.shard, station.mesh
    self._programs = programs
    division.check(config, config.batch_size, self._mesh)
    # Schedules end with the last step: with several shards, more batches are
    # filled up than with one.
    build_config = config_lib.replaced(config, {'duration': f'{schedule.total} steps'})
    self._objective = objective_lib.create(self._shard.vocabulary, config)
    self._build = build.create(
      run_spec.RunSpec(
        build_config, self._mesh, self._objective, config.batch_size, schedule.examples
      )
    )
    self.abstract_state = self._build.abstract_state
    self._save_every = config_lib.steps(
      config.checkpoint.every, config.batch_size, schedule.examples
    )
    self._metric_names = step_lib.metric_names(self._objective)
    self._stream, self._validation = (
      stream_lib.Stream(
        config_lib.replaced(config, {'seed': seed}), mesh_lib.batch_sharding(self._mesh)
      )
      for seed in (schedule_lib.stream_seed(config.seed, station.number), candidate.run_seed)
    )
    self._feed = self._next = None
    self._compiled = {}  # programs by name

  def new_state(self, folder: str) -> state_lib.TrainState:
    """Returns the state with which the model begins.

    Args:
      folder: of the model, see `weights.initial.load`.
    """
    weights, _ = initial.load(self.config, self._build, self._shard.vocabulary, folder)
    return self._program('init_fn', weights)(weights)

  def place(self, state) -> state_lib.TrainState:
    """Returns a state, or its bytes, on the devices of the station."""
    return _placed(state, self.abstract_state)

  def compile(self, validation: int, begins: bool) -> None:
    """Compiles what is not compiled yet, in the order in which it is needed.

    Args:
      validation: examples of the validation set.
      begins: whether the model begins here, with `new_state`.
    """
    size = stream_lib.evaluation_batch(self.config, validation, self._mesh.size)
    batch = self._batch(size)
    evaluated = self.abstract_state.evaluated()
    programs = [('train_step', self._train_arguments()), ('eval_step', (*evaluated, batch))]
    # One that takes weights is compiled with their shapes, when it has them.
    if begins and not self.config.init['from']:
      programs.insert(0, ('init_fn', ({},)))
    for name, arguments in programs:
      self._program(name, *arguments)

  def prepare(self, first: int) -> None:
    """Opens the stream of the shard, and compiles the step if it is not yet.

    Args:
      first: step of the shard's own stream.
    """
    if self._feed is None or self._next != first:
      self.close()
      # Open from lap to lap: a segment begins where the last one ended.
      self._feed = self._stream.train(self._shard, self.config.batch_size, first)
      self._next = first
    self._program('train_step', *self._train_arguments())

  def train(
    self, state, start_step: int, count: int, stopped: Callable = lambda: False
  ) -> Iterator[tuple[delayed_metrics.StepMetrics, state_lib.TrainState | None]]:
    """Makes the steps of a segment; call `prepare` first.

    Args:
      state: on the station's devices; donated.
      start_step: of the state.
      count: steps to make.
      stopped: () -> whether to make no more.

    Yields:
      The metrics of each step, one step late, and the state where it is still
      that step's: where it is due to be saved, and at the last.

    Raises:
      delayed_metrics.NotFiniteError: naming the step; there is no state any more.
    """
    program = self._program('train_step', *self._train_arguments())
    metrics = delayed_metrics.DelayedMetrics(self._metric_names)
    for step in range(start_step + 1, start_step + count + 1):
      if stopped():
        break
      batch = next(self._feed)
      self._next += 1
      state, values = program(state, batch)
      if previous := metrics.push(step, values):
        yield previous, None
      if self.is_save_due(step):
        yield metrics.flush(), state
    if last := metrics.flush():
      yield last, state

  def is_save_due(self, step: int) -> bool:
    """Returns whether config.checkpoint.every says to save after a step."""
    return step % self._save_every == 0 or step == self.schedule.total

  def score(self, evaluated, source) -> dict[str, float]:
    """Computes means over a validation set, every example once.

    Args:
      evaluated: what `TrainState.evaluated` gave at any station, or its bytes.
      source: of the validation set.
    """
    params, stats = _placed(evaluated, self.abstract_state.evaluated())

    def step(*arguments):
      return self._program('eval_step', *arguments)(*arguments)

    batches = self._validation.evaluation(source)
    state = state_lib.TrainState(0, params, stats, (), {})
    return eval_loop.run(step, state, batches)

  def close(self) -> None:
    """Ends the stream; a later `prepare` opens it again."""
    if self._feed is not None:
      self._feed.close()
      self._feed = None

  def release(self) -> None:
    """Ends the stream, and forgets what was compiled for this model alone."""
    self.close()
    for name in _NAMES:
      self._compiled.pop(name, None)
      if name != 'init_fn':
        # What JAX keeps of a function holds its compiled program, too.
        getattr(self._build, name).clear_cache()
    self._programs.release(self._model)

  def _train_arguments(self):
    return self.abstract_state, self._batch(self.config.batch_size)

  def _batch(self, size):
    return build.abstract_batch(self.config, self._mesh, size)

  def _program(self, name, *arguments):
    """Returns the compiled program of this name, for arguments like these."""
    if name not in self._compiled:
      program = getattr(self._build, name)
      if name == 'init_fn':
        shardings = jax.tree.map(lambda s: s.sharding, self.abstract_state)
        program = jax.jit(program, out_shardings=shardings)
      self._compiled[name] = self._programs.get(self._model, program, *arguments)
    return self._compiled[name]


class Runners:
  """The runners of one station by model, each made at its first use.

  Attributes:
    ring: `ring.Ring`.
    station: where the models run.
  """

  def __init__(self, ring, station: schedule_lib.Station):
    """Makes no runner yet."""
    self.ring, self.station = ring, station
    self._programs = programs_lib.Programs()
    self._runners = {}

  def __getitem__(self, model: int) -> Runner:
    """Returns a model's runner; any thread may ask.

    Raises:
      ConfigError: see `Runner`.
    """
    if model not in self._runners:
      runner = Runner(
        self.ring.candidates[model], self.ring.schedule(model), self.station, self._programs
      )
      # Of two threads that make one at the same time, the first one's counts.
      self._runners.setdefault(model, runner)
    return self._runners[model]

  def place(self, message) -> None:
    """Begins to move a model of this process to the station's devices."""
    runner = self.get(message.model)
    if runner and isinstance(message.state, state_lib.TrainState):
      message.state = runner.place(message.state)

  def get(self, model: int) -> Runner | None:
    """Returns a model's runner if it was used before."""
    return self._runners.get(model)

  def close(self) -> None:
    """Ends all streams."""
    for runner in list(self._runners.values()):
      runner.close()


def _placed(tree, abstract):
  """Returns a tree from elsewhere, or its bytes, with abstract's shardings."""
  if isinstance(tree, np.ndarray):
    leaves, structure = jax.tree.flatten(abstract)
    tree = jax.tree.unflatten(structure, transport.split(tree, leaves))
  return jax.device_put(tree, jax.tree.map(lambda s: s.sharding, abstract))
