"""The machines of a plan: devices, their clusters, and what they reach."""

import argparse
from collections.abc import Mapping, Sequence
import dataclasses
import functools
from typing import TYPE_CHECKING

import ml_collections

from anp_jax import config as config_lib
from anp_jax.config import emulation_keys, strategy as strategy_lib
from anp_jax.costs import collectives, device_step, hardware, steps, work
from anp_jax.tools import flag_values
from anp_jax.tools.plan import (
  fit as fit_lib,
  intervals,
  plan_tables,
  points as points_lib,
  published_rates as published,
)

if TYPE_CHECKING:
  from anp_jax.tools.plan import device_calibration


@dataclasses.dataclass(frozen=True)
class Machine:
  """A kind of device on several numbers of nodes.

  Attributes:
    device: device that computes.
    clusters: clusters, one per size, the smallest first.
    efficiency: what the device and its links reach.
    jitter: deviation of its step over the mean.
    published: published rates of its kind.
    mode: what its predictions are from, one of `intervals.MODES`.
    measurement: its steps, if they were timed.
  """

  device: hardware.Device
  clusters: Sequence[collectives.Cluster]
  efficiency: device_step.Efficiency
  jitter: float
  published: Sequence[published.Row]
  mode: str
  measurement: 'device_calibration.Measurement | None' = None

  def settings(
    self, config: ml_collections.ConfigDict, workload: work.Workload
  ) -> list[steps.Setting]:
    """Returns what a config's steps are predicted for, one setting per size."""
    m = self.measurement
    measured, handling = ((m.fixed, m.per_image), m.handling) if m else (None, None)
    setting = functools.partial(
      steps.Setting,
      config,
      workload,
      self.device,
      efficiency=self.efficiency,
      jitter=self.jitter,
      measured=measured,
      handling=handling,
    )
    return [with_given_times(setting(cluster=cluster)) for cluster in self.clusters]

  def with_intervals(
    self, points: Sequence[points_lib.Point], settings: Sequence[steps.Setting]
  ) -> list[points_lib.Point]:
    """Returns points with their intervals, where published rates are like them.

    All published rates are of ResNet-50, with sums of gradients in each step and no waiting for
    input.
    """
    fitted = [row.cluster.nodes for row in self.published if self.mode == 'few']
    most, errors = max(fitted, default=1), intervals.published()
    result = []
    for p, s in zip(points, settings, strict=True):
      strategy = strategy_lib.find(s.config)
      is_sum = strategy.steps_together and strategy.state == 'single' and not s.is_sharded
      is_like = is_sum and s.config.mesh.model == 1 and is_published(s.workload)
      is_like &= p.runs and not p.seconds['input'] and not emulation_keys.sleeps(s.config)
      if is_like:
        units = fit_lib.units(self.device, s.workload.dtype)
        interval = intervals.find(errors, self.mode, units, p.cluster.nodes > most)
        p = dataclasses.replace(p, interval=interval)
      result.append(p)
    return result


def with_given_times(setting: steps.Setting) -> steps.Setting:
  """Returns the setting with the times of config.emulate, where sleeps take the place of computing.

  The cluster has the emulated bandwidth, and a sleep hides all that is sent meanwhile.
  """
  times, cluster = setting.config.emulate, setting.cluster
  if not emulation_keys.sleeps(setting.config):
    return setting
  if not (times.step_seconds or times.image_seconds):
    raise config_lib.ConfigError(
      'config.emulate.step_seconds=0: expected seconds of a pass, or of an image, to plan with'
    )
  if times.bandwidth:
    bandwidth = emulation_keys.bytes_per_second(times.bandwidth)
    link = dataclasses.replace(cluster.link, bandwidth=bandwidth)
    cluster = dataclasses.replace(cluster, link=link)
  return dataclasses.replace(
    setting,
    cluster=cluster,
    efficiency=device_step.Efficiency(1.0, 1.0, 0.0, wire=1.0, overlap=1.0),
    jitter=times.spread,
    slow=tuple(factor for process, factor in times.slow if process < cluster.nodes),
  )


def from_flags(
  known_tables: plan_tables.Tables,
  flags: argparse.Namespace,
  configs: Mapping[str, ml_collections.ConfigDict],
  cost: work.Workload,
) -> list[Machine]:
  """Returns the machines of the flags, each with what it reaches.

  Args:
    known_tables: devices and links.
    flags: completed flags of the command.
    configs: configs of the strategies, by name; with --measure, a step of the first is timed.
    cost: workload of the first.

  Raises:
    ConfigError: for a device or link that is missing or unknown.
  """
  names = [n.strip() for n in flags.device.split(',') if n.strip()]
  if not names and not flags.measure:
    raise config_lib.ConfigError(
      f'--device is missing: one of {", ".join(known_tables.devices)}; or --measure'
    )
  devices = [known_tables.device(name) for name in names]
  for device in devices:
    device.peak(cost.dtype)
  clusters = [_clusters(known_tables, flags, device) for device in devices]
  rows = published.read()
  if flags.measure:
    return [_measured(known_tables, flags, configs, cost, rows)]
  machines = []
  for device, sized in zip(devices, clusters):
    same = [r for r in rows if r.device.name == device.name]
    used = [r for r in rows if r not in same] if flags.data_sheet else rows
    efficiency = fit_lib.fit_rows(used).efficiency(device, cost.dtype, flags.software)
    jitter = device_step.JITTER if flags.jitter is None else flags.jitter
    mode = 'few' if same and not flags.data_sheet else 'sheet'
    machines.append(Machine(device, sized, efficiency, jitter, same, mode))
  return machines


def _measured(known_tables, flags, configs, cost, rows) -> Machine:
  """The device at hand, whose step is timed."""
  from anp_jax.tools.plan import device_calibration  # opens the device

  typed = flags.measure_batches
  batches = flag_values.numbers('--measure_batches', typed) if typed else ()
  first = next(iter(configs.values()))
  serves = any(strategy_lib.find(c).serves_gradients for c in configs.values())
  measurement = device_calibration.measure(first, cost, batches, serves)
  device, is_known = device_calibration.entry(measurement, known_tables, flags.devices_per_node)
  times = ', '.join(
    f'{1e3 * seconds:.4g} ms for {images} images' for images, seconds in measurement.batches
  )
  print(
    f'measured on {measurement.device}: {times}; T(b) = '
    f'{1e3 * measurement.fixed:.3g} ms + {1e3 * measurement.per_image:.3g} ms '
    f'b, jitter {100 * measurement.jitter:.1f} %'
  )
  if measurement.handling:
    worker, server = (1e3 * seconds for seconds in measurement.handling)
    print(
      f"a gradient of 'parameter_server' takes its worker {worker:.3g} ms more than the "
      f'pass, and the servers {server:.3g} ms'
    )
  note = '' if is_known else ', as it has no entry of its own (--entries)'
  print(
    f'{device.gigabytes:.3g} GB a device; node link ({device.node_link}) and '
    f"host's cores ({device.host_cores:g} a device) are those of the entry "
    f'{device.name!r}{note}'
  )
  jitter = measurement.jitter if flags.jitter is None else flags.jitter
  clusters = _clusters(known_tables, flags, device)
  efficiency = fit_lib.fit_rows(rows).efficiency(device, cost.dtype)
  return Machine(device, clusters, efficiency, jitter, (), 'few', measurement)


def _clusters(known_tables, flags, device) -> list[collectives.Cluster]:
  """A cluster for each number of nodes."""
  counts = flag_values.numbers('--nodes', flags.nodes)
  node_link = known_tables.links[device.node_link]
  if not flags.link and max(counts) > 1 and node_link.topology != 'torus':
    raise config_lib.ConfigError(
      '--link=NAMExPORTS is missing: what joins the nodes, such as ib-ndr400x8'
    )
  link = known_tables.link('--link', flags.link or 'eth-10')
  return [collectives.Cluster(count, flags.devices_per_node, node_link, link) for count in counts]


def is_published(workload: work.Workload) -> bool:
  """Whether the network and its images are those of the published rates."""
  return workload.name == 'resnet50' and workload.image_flops > 2e10


def published_rates(
  machines: Sequence[Machine], workload: work.Workload, software: str
) -> list[tuple[str, int, float]]:
  """Returns (system, devices, images/s) of published rates of the devices and the network.

  Args:
    machines: machines of the plan.
    workload: workload of the plan; the dtype of a rate has its width and its peak.
    software: what trained, one of `published_rates.SOFTWARE`.
  """
  if not is_published(workload):
    return []

  def speed(device, dtype):
    return device_step.width(dtype), device.peak(dtype)

  return [
    (r.system, r.cluster.size, r.rate)
    for m in machines
    for r in m.published
    if r.software == software and speed(m.device, r.dtype) == speed(m.device, workload.dtype)
  ]
