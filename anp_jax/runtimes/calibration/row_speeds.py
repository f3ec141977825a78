"""A batch's rows in proportion to the measured speeds of unequal devices."""

from collections.abc import Callable
import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np

from anp_jax import cluster, config as config_lib, experiment
from anp_jax.config import strategy as strategy_lib
from anp_jax.parallel import mesh as mesh_lib
from anp_jax.parallel.sync import sync_strategy
from anp_jax.runtimes.calibration import kept, rounds as rounds_lib, similar, workloads
from anp_jax.training import build, run_spec

FILE = 'rows.json'


def with_measured_rows(
  opened: experiment.Experiment, workdir: str, processes: cluster.Processes
) -> tuple[experiment.Experiment, list[str]]:
  """Divides the batch by the devices' speeds.

  The speeds are measured once and kept in the workdir, where a run that is resumed
  with the same network on the same devices finds them. All processes call it.

  Args:
    opened: training whose config has strategy.rows='measured'.
    workdir: folder of the run.
    processes: processes of the run.

  Returns:
    The training with the rows of each device in its config, and lines for people.
  """
  spec = opened.spec
  devices = mesh_lib.batch_devices(spec.mesh)
  rows, lines = sync_strategy.EQUAL, ['rows     equal on a single device']
  if devices > 1:
    key = kept.key(spec, processes)
    saved = kept.load(workdir, FILE, key, processes)
    if saved is None:
      saved = _measure(spec, processes)._asdict()
      kept.save(workdir, FILE, key, saved, processes)
    costs = RowCosts(**{field: saved[field] for field in RowCosts._fields})
    multiple = _strategy(spec).row_multiple(spec.config, spec.batch_size)
    # Hosts may round differently: one of them decides.
    counts = processes.gather(costs.division(spec.batch_size, multiple))[0]
    rows, lines = ','.join(map(str, counts)), costs.messages(counts)
  return opened.with_config(config_lib.replaced(spec.config, {'strategy.rows': rows})), lines


class RowCosts(NamedTuple):
  """Predicted seconds of a step whose rows are divided over devices.

  Attributes:
    fixed: seconds of each device that do not depend on its rows.
    per_row: seconds of each device for a row.
    sum_seconds: seconds in which the devices sum their gradients.
  """

  fixed: list[float]
  per_row: list[float]
  sum_seconds: float

  def division(self, batch_size: int, multiple: int) -> tuple[int, ...]:
    """Returns each device's rows, with which all are ready nearly together.

    Args:
      batch_size: rows in all.
      multiple: divisor of each device's rows, and the least that each has.
    """
    counts = np.full(len(self.fixed), multiple)
    for _ in range(batch_size // multiple - len(counts)):
      # To the device that would be ready first with them.
      counts[np.argmin(self._seconds(counts + multiple))] += multiple
    return tuple(counts.tolist())

  def step_seconds(self, counts: Any) -> float:
    """Returns the predicted seconds of a step, in which the slowest device counts."""
    return float(self._seconds(np.array(counts)).max()) + self.sum_seconds

  def messages(self, counts: tuple[int, ...]) -> list[str]:
    """Returns lines that describe a division and its predicted step time."""
    step = self.step_seconds(counts)
    equal = self.step_seconds(np.full(len(counts), sum(counts) / len(counts)))
    return [
      f'rows     {" + ".join(map(str, counts))} of the {sum(counts)} images of a step: predicted '
      f'step time {1e3 * step:.3g} ms, in equal parts {1e3 * equal:.3g} ms'
    ]

  def _seconds(self, counts):
    return np.array(self.fixed) + np.array(self.per_row) * counts


def _strategy(spec) -> sync_strategy.Sync:
  strategy = strategy_lib.find(spec.config)
  assert isinstance(strategy, sync_strategy.Sync)  # no other has the key
  return strategy


def _measure(spec, processes) -> RowCosts:
  """Times steps of two sizes on each device, and the sum of the gradients.

  Devices that are about equally fast have the same costs.
  """
  share = spec.batch_size // mesh_lib.batch_devices(spec.mesh)
  multiple = _strategy(spec).row_multiple(spec.config, spec.batch_size)
  small = max(share // multiple // 2, 1) * multiple
  rounds = rounds_lib.Rounds(processes)
  programs = [rounds.add(_steps(spec, rows, processes)) for rows in sorted({small, share})]
  processes.gather('compiled')  # Gloo waits half a minute for the slowest
  rounds.add_collective(_gradient_sum(spec))
  rounds.run()
  local = [rounds.median(program).tolist() for program in programs]
  ids = [device.id for device in spec.mesh.local_devices]
  seconds = dict(sum(processes.gather([*zip(ids, zip(*local, strict=True))]), []))
  # Devices along 'model' compute the same rows.
  parts = spec.mesh.devices.reshape(-1, spec.mesh.shape[mesh_lib.MODEL])
  times = np.array([np.max([seconds[d.id] for d in part], 0) for part in parts])
  times = np.array(similar.averaging(times[:, -1].tolist())(times.tolist()))
  fixed = np.zeros(len(times))
  if small < share:
    # A line through both times; noise must not make it fall or end below 0.
    per_row = (times[:, 1] - times[:, 0]) / (share - small)
    fixed = np.clip(times[:, 1] - share * per_row, 0.0, times[:, 1] / 2)
  per_row = (times[:, -1] - fixed) / share
  seconds_of_sum = float(rounds.collective_medians()[0])
  return RowCosts(fixed.tolist(), per_row.tolist(), seconds_of_sum)


def _steps(spec: run_spec.RunSpec, rows: int, processes) -> list[Callable]:
  """Returns steps of so many rows on each device of this process by itself."""
  runs = []
  for device in spec.mesh.local_devices:
    processes.heartbeat('compiling')
    changes = _strategy(spec).single_device(spec.config, spec.batch_size, rows)
    config = config_lib.replaced(spec.config, changes | {'mesh.data': 1, 'mesh.model': 1})
    single = dataclasses.replace(spec, config=config, mesh=mesh_lib.create(config, [device]))
    with jax.default_device(device):
      runs.append(workloads.step(build.create(single), single, rows))
      runs[-1]()
  return runs


def _gradient_sum(spec) -> Callable:
  """Returns the sum over the devices of as many bytes as the gradients have."""
  params = build.create(spec).abstract_replica.params
  parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
  size = workloads.gradient_bytes(spec.config) * parameters
  _, run = workloads.collective('total', spec.mesh, mesh_lib.DATA, size)
  run()
  return run
