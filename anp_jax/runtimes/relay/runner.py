"""A model at one station: its programs, and its stream of the part there."""

import jax
import numpy as np

from anp_jax import config as config_lib
from anp_jax.checkpoint.weights import initial
from anp_jax.data.input import stream as stream_lib
from anp_jax.parallel import division
from anp_jax.parallel import mesh as mesh_lib
from anp_jax.parallel import state as state_lib
from anp_jax.runtimes import transport
from anp_jax.runtimes.relay import programs as programs_lib
from anp_jax.runtimes.relay import schedule as itinerary_lib
from anp_jax.training import build
from anp_jax.training import eval_loop
from anp_jax.training import objective as objective_lib
from anp_jax.training import run_spec
from anp_jax.training import step as step_lib

_NAMES = ('init', 'train_step', 'eval_step', 'predict_step')


class NotFinite(ArithmeticError):
  """A step of a model gave a number that is not finite."""


class Runner:
  """Trains and scores one model at one station.

  One thread trains; another may `compile` beside it.

  Attributes:
    config: of the model.
    itinerary: `itinerary.Itinerary` of the model.
    like: its TrainState of jax.ShapeDtypeStruct, on the station's devices.
  """

  def __init__(self, candidate, mesh, part, number, sizes, laps, programs):
    """Puts it together; nothing is compiled and no array made yet.

    Args:
      candidate: `candidates.Candidate`.
      mesh: of the station's devices.
      part: `subset.Subset` that the station holds.
      number: of the station.
      sizes: examples of each part.
      laps: of a model that goes on to the end.
      programs: `programs.Programs` of the station.

    Raises:
      ConfigError: for what a config alone does not show.
    """
    self.config = config = candidate.config
    division.check(config, config.batch_size, mesh)
    self.itinerary = itinerary_lib.Itinerary(sizes, config.batch_size, laps)
    self._model = candidate.index
    self._part = part
    self._programs = programs
    self._mesh = mesh
    # Schedules end with the last step: in several parts, more batches are
    # filled up than in one.
    whole = config.copy_and_resolve_references()
    whole.duration = f'{self.itinerary.total} steps'
    objective = objective_lib.create(part.vocabulary, config)
    self._objective = objective
    self._parts = build.create(
      run_spec.RunSpec(whole, mesh, objective, config.batch_size, sum(sizes))
    )
    self.like = self._parts.abstract_state
    self._every = config_lib.steps(
      config.checkpoint.every, config.batch_size, sum(sizes)
    )
    self._names = step_lib.metric_names(objective)
    sharding = mesh_lib.batch_sharding(mesh)
    seeds = itinerary_lib.stream_seed(config.seed, number), candidate.run_seed
    self._stream, self._validation = (
      stream_lib.Stream(_with_seed(config, seed), sharding) for seed in seeds
    )
    self._feed = self._next = None
    self._compiled = programs_lib.Once()

  def new(self, folder: str) -> state_lib.TrainState:
    """The state with which the model begins.

    Args:
      folder: of the model, see `weights.initial.load`.
    """
    given, _ = initial.load(
      self.config, self._parts, self._objective, self._part.vocabulary, folder,
    )  # fmt: skip
    return self._program('init', given)(given)

  def place(self, state) -> state_lib.TrainState:
    """A state from another station, or its bytes, on this one's devices."""
    return self._placed(state, self.like)

  def compile(
    self, validation: int, begins: bool, stopped=lambda: False
  ) -> None:
    """Compiles what is not compiled yet, what is needed first to begin with.

    Args:
      validation: examples of the validation set.
      begins: whether the model begins here, with `new`.
      stopped: () -> whether to begin no further program.
    """
    size = stream_lib.evaluation_batch(self.config, validation, self._mesh.size)
    batch = self._batch(size)
    evaluated = self.like.evaluated()
    needed = [
      ('train_step', (self.like, self._batch(self.config.batch_size))),
      ('eval_step', (*evaluated, batch)), ('predict_step', (*evaluated, batch)),
    ]  # fmt: skip
    # One that takes weights is compiled with their shapes, when it has them.
    if begins and not self.config.init['from']:
      needed.insert(0, ('init', ({},)))
    for name, arguments in needed:
      if stopped():
        return
      self._program(name, *arguments)

  def prepare(self, first: int) -> None:
    """Opens the stream of the part, and has the step compiled.

    Args:
      first: step of the part's own stream.
    """
    if self._feed is None or self._next != first:
      self.close()
      # It stays open from lap to lap: a visit goes on where the last one ended.
      self._feed = self._stream.train(self._part, self.config.batch_size, first)
      self._next = first
    self._train_step()

  def train(self, state, step: int, count: int, stopped, after):
    """Makes the steps of a visit; `prepare` comes first.

    Args:
      state: on the station's devices; donated.
      step: of the state.
      count: steps to make.
      stopped: () -> whether to make no more.
      after: called (step, values, state or None) for each step in turn, with
        its metrics by name and the state where it is that step's still.

    Returns:
      The new state and its step.

    Raises:
      NotFinite: naming the step; there is no state any more.
    """
    program = self._train_step()
    pending = None
    for _ in range(count):
      if stopped():
        break
      batch = next(self._feed)
      self._next += 1
      state, values = program(state, batch)
      # Read one step late, while the next one computes.
      if pending is not None:
        after(*self._read(*pending), None)
      step += 1
      pending = (step, values)
      if self.is_due(step):
        after(*self._read(*pending), state)
        pending = None
    if pending is not None:
      after(*self._read(*pending), state)
    return state, step

  def is_due(self, step: int) -> bool:
    """Whether config.checkpoint.every says to save after a step."""
    return step % self._every == 0 or step == self.itinerary.total

  def score(self, evaluated, source) -> dict[str, float]:
    """Means over a validation set, every example once.

    Args:
      evaluated: what `TrainState.evaluated` gave at any station, or its bytes.
      source: of the validation set.
    """
    params, stats = self._placed(evaluated, self.like.evaluated())

    def step(*arguments):
      return self._program('eval_step', *arguments)(*arguments)

    batches = self._validation.evaluation(source)
    state = state_lib.TrainState(0, params, stats, (), {})
    return eval_loop.run(step, state, batches)

  def probabilities(self, evaluated, source):
    """What the model makes of every example of a validation set, in order.

    Args:
      evaluated: as for `score`.
      source: of the validation set.

    Returns:
      probabilities (n, ...) by name, labels (n,) int32 and weights (n,)
      float32, 0 for examples that cannot be read; NumPy.
    """
    params, stats = self._placed(evaluated, self.like.evaluated())
    found = []
    for batch in self._validation.evaluation(source):
      program = self._program('predict_step', params, stats, batch)
      found.append(
        jax.device_get(
          (program(params, stats, batch), batch['label'], batch['weight'])
        )
      )
    return jax.tree.map(lambda *x: np.concatenate(x)[: len(source)], *found)

  def close(self) -> None:
    """Ends the stream; a later visit opens it again."""
    if self._feed is not None:
      self._feed.close()
      self._feed = None

  def release(self) -> None:
    """Ends the stream, and forgets what was compiled for this model alone."""
    self.close()
    for name in _NAMES:
      self._compiled.forget(name)
      if name != 'init':
        # What JAX keeps of a function holds its compiled program, too.
        getattr(self._parts, name).clear_cache()
    self._programs.release(self._model)

  def _train_step(self):
    batch = self._batch(self.config.batch_size)
    return self._program('train_step', self.like, batch)

  def _batch(self, size):
    return build.abstract_batch(self.config, self._mesh, size)

  def _program(self, name, *arguments):
    """The compiled program of this name, for arguments like these."""

    def make():
      program = getattr(self._parts, name)
      if name == 'init':
        shardings = jax.tree.map(lambda s: s.sharding, self.like)
        program = jax.jit(program, out_shardings=shardings)
      return self._programs.get(self._model, program, *arguments)

    return self._compiled.get(name, make)

  def _placed(self, tree, like):
    """A tree from elsewhere, or its bytes, on this station's devices."""
    if isinstance(tree, np.ndarray):
      leaves, structure = jax.tree.flatten(like)
      tree = jax.tree.unflatten(structure, transport.split(tree, leaves))
    return jax.device_put(tree, jax.tree.map(lambda s: s.sharding, like))

  def _read(self, step, values):
    values = jax.device_get(values).tolist()
    metrics = dict(zip(self._names, values, strict=True))
    del metrics['vote']
    if not metrics.pop('finite'):
      raise NotFinite(
        f'step {step} is not finite: loss {metrics["loss"]}, gradient norm '
        f'{metrics["grad_norm"]}'
      )
    return step, metrics


def _with_seed(config, seed):
  own = config.copy_and_resolve_references()
  own.seed = seed
  return own
