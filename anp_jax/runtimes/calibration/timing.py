"""Timing of a network's convolutions, steps and collectives on a run's devices."""

import functools
import math
import platform

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from anp_jax import cluster, config as config_lib
from anp_jax.parallel import mesh as mesh_lib
from anp_jax.parallel.channel_split import convolutions, split as split_lib
from anp_jax.runtimes.calibration import (
  costs as costs_lib,
  rounds as rounds_lib,
  similar,
  workloads,
)
from anp_jax.runtimes.offload import device as device_lib
from anp_jax.system import memory, stopwatch
from anp_jax.training import build, run_spec

# Fractions of a layer's features that are timed.
_FRACTIONS = (0.25, 0.5, 1.0)
# Bytes of collectives; the last size only if the one before is quick.
_SIZES = (4 * 2**10, 4 * 2**20, 32 * 2**20)
_QUICK = 0.05  # seconds
_STEP = ''  # in place of a layer's path


class Timing:
  """Convolutions, the whole step and collectives, timed in rounds."""

  def __init__(self, spec: run_spec.RunSpec, processes: cluster.Processes):
    """Compiles all programs; all processes call it.

    Args:
      spec: spec of the run; its offload devices are timed with their transfers,
        in place of collectives.
      processes: processes of the run.

    Raises:
      ConfigError: if no convolution may be split.
    """
    self._spec, self._processes = spec, processes
    self._rounds = rounds_lib.Rounds(processes)
    self._devices = spec.mesh.local_devices
    rows = spec.batch_size // mesh_lib.batch_devices(spec.mesh)
    specs = [workloads.unsplit(spec, d) for d in self._devices]
    singles = [build.create(s) for s in specs]
    config = spec.config
    self._gradient_bytes = workloads.gradient_bytes(config)
    leaves = jax.tree.leaves(singles[0].abstract_replica.params)
    self._parameters = sum(leaf.size for leaf in leaves)
    # Its index is 0.
    self._compile(
      functools.partial(workloads.step, single, s, rows)
      for single, s in zip(singles, specs, strict=True)
    )
    # By layer, its calls and the programs of each.
    self._layers = self._compile_layers(calls(singles[0], config, rows))
    processes.gather('compiled')  # Gloo waits half a minute for the slowest
    # (name, bytes) of gathers and sums over the axis 'model'.
    self._collectives = [] if spec.offload_devices else self._add_collectives()

  def costs(self) -> costs_lib.Costs:
    """Times in rounds; returns costs from the medians, the same on all processes."""
    self._rounds.run()
    mesh, times = self._spec.mesh, self._gather_times()

    def slowest(column, name):
      return np.max([times[device][name] for device in column], 0).tolist()

    all_columns = columns(self._spec)
    in_mesh = all_columns[: mesh.shape[mesh_lib.MODEL]]
    unsplit = [slowest(column, _STEP) for column in in_mesh]
    layers = {
      path: self._layer([call for call, _ in uses], [slowest(c, path) for c in all_columns])
      for path, uses in self._layers.items()
    }
    kernels = sum(layer.kernel for layer in layers.values())
    kind = costs_lib.OffloadCosts if self._spec.offload_devices else costs_lib.Costs
    costs = kind(
      names=self._names(),
      unsplit=unsplit,
      layers=layers,
      other_bytes=self._gradient_bytes * self._parameters - kernels,
      link=self._link(),
      multiple=costs_lib.MULTIPLES.get(mesh_lib.platform(mesh), 1),
    )
    if self._spec.offload_devices:
      return costs
    return costs.mapped(similar.averaging(unsplit))

  def _names(self):
    """Returns the names of the devices, for people."""
    names = [f'{kind} ({host})' for kind, host in devices(self._spec.mesh, self._processes)[0]]
    return names + [device.name for device in self._spec.offload_devices]

  def _compile(self, builders) -> int:
    """Adds a program, built and run once on each device; returns its index.

    Args:
      builders: builders for this process's devices, then for offload devices,
        which JAX does not place here.
    """
    self._processes.heartbeat('compiling')
    runs = []
    for i, builder in enumerate(builders):
      device = self._devices[i] if i < len(self._devices) else None
      with jax.default_device(device):
        runs.append(builder())
        runs[-1]()
    return self._rounds.add(runs)

  def _compile_layers(self, network_calls):
    """Returns (call, indices of its programs) by layer that may be split."""
    config = self._spec.config
    shares = split_lib.Shares((), config.strategy.split_layers)
    layers, indices = {}, {}
    for call in network_calls:
      if shares.counts(call.layer, call.features, 2) is None:
        continue
      # Calls that compute the same are timed once.
      traced = str(jax.make_jaxpr(call.convolve)(call.x, call.kernel))
      key = (traced, call.reads_images)
      if key not in indices:
        indices[key] = self._compile_call(call)
      layers.setdefault(call.layer, []).append((call, indices[key]))
    if not layers:
      raise config_lib.ConfigError(
        f'config.strategy.split_layers={config.strategy.split_layers!r}: no '
        'convolution has such a path'
      )
    return layers

  def _compile_call(self, call) -> list[int]:
    """Compiles a convolution: not split, then each count of its features."""
    arrays = []  # each device's operands, for all of its programs
    for device in self._devices:
      with jax.default_device(device):
        arrays.append(workloads.operands(call))

    def builders(count, split):
      for operands in arrays:
        yield functools.partial(workloads.convolution, call, count, split, operands)
      # A layer that is not split is the training device's alone.
      for device in self._spec.offload_devices if split else ():
        yield functools.partial(workloads.offloaded_convolution, call, count, device)

    ways = [(call.features, False)]
    ways += [(count, True) for count in _counts(call.features)]
    return [self._compile(builders(*way)) for way in ways]

  def _gather_times(self) -> dict:
    """Returns the median seconds of the step and of each layer's ways, by device."""
    steps = self._rounds.median(0)
    layers = {
      path: self._spec.config.accumulate * sum(self._call_seconds(indices) for _, indices in uses)
      for path, uses in self._layers.items()
    }
    rows = []
    for i, device in enumerate(device_ids(self._spec)):
      times = {path: ways[:, i].tolist() for path, ways in layers.items()}
      if i < len(steps):
        times[_STEP] = float(steps[i])
      rows.append([device, times])
    return dict(sum(self._processes.gather(rows), []))

  def _call_seconds(self, indices) -> np.ndarray:
    """Returns (ways, devices) seconds of a convolution: not split, and by count."""
    ways = [self._rounds.median(i) for i in indices]
    # For all features an offload device needs the time of the last count.
    ways[0] = np.concatenate([ways[0], ways[-1][len(ways[0]) :]])
    return np.array(ways)

  def _layer(self, calls, seconds) -> costs_lib.Layer:
    """Returns a layer from its calls and its (devices, ways) seconds."""
    first, times = calls[0], self._spec.config.accumulate
    return costs_lib.Layer(
      features=first.features,
      alone=[ways[0] for ways in seconds],
      counts=_counts(first.features),
      seconds=[ways[1:] for ways in seconds],
      output=times * sum(memory.of_array(call.gathered) for call in calls),
      input=times * sum(memory.of_array(c.x) for c in calls if not c.reads_images),
      kernel=self._gradient_bytes * math.prod(first.kernel.shape),
      uses=times * len(calls),
      reads=first.reads,
    )

  def _add_collectives(self):
    """Adds gathers and sums over the axis 'model'; returns name and bytes of each."""
    links = []
    for name in ('gather', 'total'):
      for size in _SIZES:
        self._processes.heartbeat('compiling')
        size_sent, run = workloads.collective(name, self._spec.mesh, mesh_lib.MODEL, size)
        run()
        self._rounds.add_collective(run)
        links.append((name, size_sent))
        if size > _SIZES[0] and (max(self._processes.gather(stopwatch.timed(run))) > _QUICK):
          break
    return links

  def _link(self) -> costs_lib.CollectiveCost:
    """Returns latency and seconds per byte, from the smallest and largest size."""
    if not self._collectives:
      return costs_lib.NO_COLLECTIVES
    medians, lines = self._rounds.collective_medians(), {}
    for name in ('gather', 'total'):
      points = [
        (size, seconds) for (kind, size), seconds in zip(self._collectives, medians) if kind == name
      ]
      (small, quick), (large, slow) = points[0], points[-1]
      slope = max(slow - quick, 0.0) / (large - small)
      lines[name] = (max(quick - small * slope, 0.0), float(slope))
    return costs_lib.CollectiveCost(**lines)


def devices(mesh: jax.sharding.Mesh, processes: cluster.Processes) -> list[list[tuple[str, str]]]:
  """Returns processor and host of each device, by its place on data and model."""
  hosts = processes.gather(f'{platform.node()}, rank {processes.index}')
  cpus = processes.gather(device_lib.processor())
  return [
    [
      (cpus[d.process_index] if d.platform == 'cpu' else d.device_kind, hosts[d.process_index])
      for d in row
    ]
    for row in mesh.devices.reshape(-1, mesh.shape[mesh_lib.MODEL])
  ]


def device_ids(spec: run_spec.RunSpec) -> list[int]:
  """Returns a number for each device of this process, then for offload devices."""
  ids = [device.id for device in spec.mesh.local_devices]
  # The numbers of the mesh's devices are 0 and above.
  return ids + [-1 - i for i in range(len(spec.offload_devices))]


def columns(spec: run_spec.RunSpec) -> list[list[int]]:
  """Returns the numbers of the devices along data, by device of a plan."""
  model = spec.mesh.shape[mesh_lib.MODEL]
  in_mesh = spec.mesh.devices.reshape(-1, model).T
  result = [[device.id for device in column] for column in in_mesh]
  return result + [[-1 - i] for i in range(len(spec.offload_devices))]


def calls(
  network: build.ModelAndSteps, config: ml_collections.ConfigDict, rows: int
) -> list[convolutions.Call]:
  """Returns the network's convolutions of a micro-batch.

  Args:
    network: model and steps.
    config: config of the run.
    rows: images of a device's batch.
  """
  single = network.abstract_replica
  variables = {'params': single.params, **single.stats}
  shape, _ = config_lib.example(config)
  size, dtype = rows // config.accumulate, jnp.dtype(config.model.dtype)
  images = jax.ShapeDtypeStruct((size, *shape), dtype)
  return convolutions.find(network.model, variables, images)


def _counts(features) -> tuple[int, ...]:
  """Returns the numbers of features that are timed."""
  return tuple(sorted({max(round(features * f), 1) for f in _FRACTIONS}))
