"""Timing of one convolution of a running channel split, on all of its devices."""

from concurrent import futures

import jax
import numpy as np

from anp_jax import cluster
from anp_jax.parallel import mesh as mesh_lib
from anp_jax.runtimes.calibration import costs as costs_lib, timing, workloads
from anp_jax.system import stopwatch
from anp_jax.training import build, run_spec

_ROUNDS = 3


class Probe:
  """A part of one layer, of equal width on all devices, timed now and then.

  Its times over those of the calibration show how the devices' speeds have
  changed.
  """

  def __init__(
    self,
    spec: run_spec.RunSpec,
    processes: cluster.Processes,
    costs: costs_lib.Costs,
    plan: costs_lib.Plan,
  ):
    """Compiles the part; all processes call it.

    Args:
      spec: spec of the run.
      processes: processes of the run.
      costs: costs from the calibration.
      plan: plan of the layers.
    """
    self._spec, self._processes = spec, processes
    divided = [path for path in plan if path in costs.layers] or costs.layers
    path = max(divided, key=lambda path: max(costs.layers[path].alone))
    layer = costs.layers[path]
    equal = layer.features / len(costs.names)
    index = int(np.argmin(np.abs(np.array(layer.counts) - equal)))
    self._expected = np.array([seconds[index] for seconds in layer.seconds])
    self._devices = timing.local_devices(spec.mesh)
    network = build.create(workloads.unsplit(spec, self._devices[0]))
    rows = spec.batch_size // mesh_lib.batch_devices(spec.mesh)
    calls = timing.calls(network, spec.config, rows)
    self._repeats = spec.config.accumulate * sum(c.layer == path for c in calls)
    call = next(c for c in calls if c.layer == path)
    self._runs = [_part(call, layer.counts[index], device) for device in self._devices]
    self._runs += [
      workloads.offloaded_convolution(call, layer.counts[index], device)
      for device in spec.offload_devices
    ]
    for run in self._runs:
      run()

  def slowdown(self) -> np.ndarray:
    """Returns each device's seconds over those of the calibration.

    All processes call it, while their devices compute nothing else.
    """
    processes, rounds = self._processes, []
    with futures.ThreadPoolExecutor(len(self._runs)) as pool:
      for _ in range(_ROUNDS):
        processes.gather('ready')
        rounds.append(list(pool.map(stopwatch.timed, self._runs)))
    medians = np.median(rounds, 0)
    ids = timing.device_ids(self._spec)
    times = dict(sum(processes.gather(list(zip(ids, medians.tolist()))), []))
    columns = timing.columns(self._spec)
    slowest = [max(times[device] for device in column) for column in columns]
    return self._repeats * np.array(slowest) / self._expected


def _part(call, count, device):
  with jax.default_device(device):
    return workloads.convolution(call, count, True, workloads.operands(call))
