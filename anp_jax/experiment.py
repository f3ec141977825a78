"""The devices, data, objective, programs and state of one network's training."""

from collections.abc import Callable, Sequence
import contextlib
import dataclasses
import functools
from typing import Any

import jax
from ml_collections import ConfigDict

from anp_jax import config as config_lib
from anp_jax.checkpoint import run_dir
from anp_jax.checkpoint.weights import initial
from anp_jax.config import saved_run
from anp_jax.data import sources
from anp_jax.data.input import feed, stream
from anp_jax.data.sources import agreement, balance, label_mapping
from anp_jax.parallel import division, mesh as mesh_lib, state as state_lib
from anp_jax.training import build, objective as objective_lib, run_spec


@dataclasses.dataclass(frozen=True)
class Experiment:
  """The parts of a training that are the same in each step.

  Attributes:
    spec: config, mesh, objective and sizes.
    source: training examples, or those that are evaluated.
  """

  spec: run_spec.RunSpec
  source: sources.Source

  @property
  def config(self) -> ConfigDict:
    """The config, with its batch size."""
    return self.spec.config

  @property
  def mesh(self) -> jax.sharding.Mesh:
    """The mesh of the training."""
    return self.spec.mesh

  @functools.cached_property
  def program(self) -> build.ModelAndSteps:
    """The steps; nothing is compiled yet.

    Raises:
      ConfigError: for what a config alone does not show.
    """
    return build.create(self.spec)

  def with_config(self, config: ConfigDict) -> 'Experiment':
    """The same training with another config for the same mesh and data."""
    if config == self.config:
      return self  # and its program, which takes a trace of the network to build
    return dataclasses.replace(self, spec=dataclasses.replace(self.spec, config=config))

  def new_state(
    self, workdir: str = '', gather: Callable[[Any], list] = lambda value: [value]
  ) -> tuple[state_lib.TrainState, list[str]]:
    """Returns the initial state of a run, and lines about its weights.

    Args:
      workdir: folder of the run; '': there is none.
      gather: `cluster.Processes.gather`; by default for one process.

    Raises:
      ConfigError: if the weights that config.init names do not fit.
    """
    program = self.program
    weights, messages = initial.load(self.config, program, self.source.vocabulary, workdir, gather)
    return program.new_state(weights), messages

  def batches(self, step: int = 0) -> feed.Feed:
    """Returns the device batches from a step on; the caller closes the feed."""
    sharding = mesh_lib.batch_sharding(self.mesh)
    return stream.Stream(self.config, sharding).train(self.source, self.spec.batch_size, step)


def open(  # noqa: A001 - like gzip.open
  config: ConfigDict,
  devices: Sequence[jax.Device] | None = None,
  hosts: Sequence[str] = ('',),
  *,
  workdir: str = '',
  offload_devices: tuple = (),
  divides_batch: bool = True,
) -> Experiment:
  """Opens devices and training data; nothing is compiled and no array made yet.

  Args:
    config: resolved and valid config; its batch_size may be 0.
    devices: devices of the mesh, which may be of another machine; None: all
      devices of all processes.
    hosts: host of each process.
    workdir: folder of the run, whose batch size a resumed run keeps; '': none.
    offload_devices: devices outside the mesh that compute for it.
    divides_batch: whether the batch of a step is divided over this mesh alone.

  Raises:
    ConfigError: if the config does not fit the devices or the data.
  """
  mesh = mesh_lib.create(config, devices, hosts)
  config = run_dir.with_sizes(config, workdir, mesh_lib.batch_devices(mesh))
  if divides_batch:
    division.check(config, config.batch_size, mesh)
  source = sources.open_source(config, training=True)
  objective = objective_lib.create(source.vocabulary, config, balance.class_weights(config, source))
  spec = run_spec.RunSpec(config, mesh, objective, config.batch_size, len(source), offload_devices)
  return Experiment(spec, source)


def sizes(config: ConfigDict, workdir: str, hosts: Sequence[str]) -> list[int]:
  """Returns the numbers of these processes over which a step's batch divides.

  Args:
    config: resolved and valid config; its batch_size may be 0.
    workdir: folder of the run.
    hosts: host of each process.
  """
  mesh = mesh_lib.create(config, None, hosts)
  config = run_dir.with_sizes(config, workdir, mesh_lib.batch_devices(mesh))
  result = []
  for count in range(1, len(hosts) + 1):
    devices = [d for d in jax.devices() if d.process_index < count]
    with contextlib.suppress(config_lib.ConfigError):
      division.check(config, config.batch_size, mesh_lib.create(config, devices, hosts[:count]))
      result.append(count)
  return result


def open_evaluation(config: ConfigDict, workdir: str, processes: Any) -> Experiment:
  """Opens devices and the examples that a trained network is scored on.

  Their labels are numbers of the classes that the run of the workdir was trained
  to name. Without a checkpoint the weights of config.init name the classes.

  Args:
    config: resolved and valid config; its batch_size may be 0.
    workdir: folder of the run.
    processes: `cluster.Processes` of the evaluation.

  Raises:
    ConfigError: if the data do not fit the classes, or are others on a process.
  """
  mesh = mesh_lib.create(config, hosts=processes.hosts)
  config = run_dir.with_sizes(config, workdir, mesh_lib.batch_devices(mesh))
  source = sources.open_source(config, training=False)
  agreement.check(processes, evaluation=source)
  vocabulary = run_dir.labels(workdir) if saved_run.has_checkpoints(workdir) else None
  vocabulary = vocabulary or initial.vocabulary(config, source.vocabulary)
  objective = objective_lib.create(vocabulary, config)
  spec = run_spec.RunSpec(config, mesh, objective, config.batch_size, 1)
  return Experiment(spec, label_mapping.map_labels(source, vocabulary))
