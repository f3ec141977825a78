"""Models, stations and data of a ring, on which all processes agree before a model is trained."""

from collections.abc import Sequence
import dataclasses
import os

import jax
import ml_collections

from anp_jax import cluster
from anp_jax.checkpoint import manager as checkpoint_lib
from anp_jax.data import sources
from anp_jax.data.sources import agreement
from anp_jax.parallel import mesh as mesh_lib
from anp_jax.runtimes.model_ring import candidates as candidates_lib, schedule as schedule_lib
from anp_jax.training import objective as objective_lib


@dataclasses.dataclass(frozen=True)
class Laps:
  """Number of laps of each model, and those after which it is scored.

  Attributes:
    total: laps of the whole run.
    every: laps between two scores.
  """

  total: int
  every: int

  def is_score_due(self, laps: int) -> bool:
    """Returns whether a model is scored after so many laps."""
    return laps == self.total or laps % self.every == 0


@dataclasses.dataclass(frozen=True)
class Ring:
  """The models, the stations and the data of a ring.

  Attributes:
    config: the run's config.
    workdir: folder of the run.
    candidates: all models.
    source: training examples.
    eval_source: validation examples.
    sizes: number of training examples of each station.
    owners: process of each station.
    laps: number of laps of each model, and those after which it is scored.
    local_stations: stations of this process.
  """

  config: ml_collections.ConfigDict
  workdir: str
  candidates: Sequence[candidates_lib.Candidate]
  source: sources.Source
  eval_source: sources.Source
  sizes: Sequence[int]
  owners: Sequence[int]
  laps: Laps
  local_stations: Sequence[schedule_lib.Station]

  @property
  def models(self) -> range:
    """The indices of all models."""
    return range(len(self.candidates))

  @property
  def stations(self) -> int:
    """The number of stations of all processes."""
    return len(self.owners)

  def schedule(self, model: int) -> schedule_lib.RingSchedule:
    """Returns the schedule of a model."""
    batch_size = self.candidates[model].config.batch_size
    return schedule_lib.RingSchedule(self.sizes, batch_size, self.laps.total)

  def scorer(self, model: int, laps: int) -> int:
    """Returns the station that scores a model after so many laps."""
    # In turn; in the end the first, which is the first to have nothing to do.
    return 0 if laps == self.laps.total else (model + laps) % self.stations

  def folder(self, model: int) -> str:
    """Returns the folder of a model."""
    return os.path.join(self.workdir, 'models', self.candidates[model].name)


def create(config: ml_collections.ConfigDict, workdir: str, processes: cluster.Processes) -> Ring:
  """Opens the data, and divides them over the stations of all processes.

  Raises:
    ConfigError: if the config does not fit the devices or the data.
  """
  meshes = _meshes(config)
  counts = processes.gather(len(meshes))
  owners = tuple(p for p, count in enumerate(counts) for _ in range(count))
  # Hosts may have stations of other sizes: the first one's decides about batches.
  candidates = candidates_lib.create(config, processes.gather(meshes[0].size)[0])
  source = sources.open_source(config, training=True)
  eval_source = sources.open_source(config, training=False)
  agreement.check_classes(eval_source, source)
  agreement.check(processes, training=source, evaluation=eval_source)
  objective = objective_lib.create(source.vocabulary, config)
  checkpoint_lib.check_best_metric(config, objective.metric_names)
  sizes = schedule_lib.shard_sizes(config, len(source), len(owners))
  laps = Laps(
    candidates_lib.laps('duration', config.duration),
    candidates_lib.laps('eval.every', config.eval.every),
  )
  shards = schedule_lib.data_shards(source, sizes)
  first = sum(counts[: processes.index])
  stations = [
    schedule_lib.Station(number, mesh, shards[number]) for number, mesh in enumerate(meshes, first)
  ]
  return Ring(config, workdir, candidates, source, eval_source, sizes, owners, laps, stations)


def _meshes(config):
  """Returns the mesh of each station of this process."""
  devices = jax.local_devices()
  each = 1 if config.strategy.station == 'device' else len(devices)
  return [mesh_lib.create(config, devices[i : i + each]) for i in range(0, len(devices), each)]
