"""The flag --plan of a study: what `anp_jax.tools.plan` predicts for each run.

Where computing is a sleep, its seconds are those of config.emulate; otherwise
`anp_jax.tools.plan --measure` first times steps on the cores of this machine, on as
many at once as a run uses.
"""

from collections.abc import Mapping, Sequence
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys

from anp_jax import config as config_lib
from anp_jax.config import emulation_keys
from anp_jax.costs import collectives, device_step, hardware, steps
from anp_jax.tools.plan import plan_tables, points as points_lib, sizes, workload as workload_lib
from anp_jax.tools.study import grid, study_results, study_runner

_DEVICE = 'cpu'
# Nothing but what is slept for and sent; a network that computes is measured.
_SLEEPING = device_step.Efficiency(1.0, 1.0, 0.0, 1.0, overlap=1.0)
_COMPUTING = device_step.Efficiency(1.0, 1.0, 0.0, 1.0, overlap=0.0)
_LATENCY = 50e-6  # of a step of a ring over TCP; Ethernet's in links.toml
_UNLIMITED = 1e15  # bytes/s of a link that is not slowed down
_NO_TIME = 1e-9  # seconds of a pass without a sleep


def check(study: study_runner.Study, cells: Sequence[grid.Cell], text: str | None, slurm) -> None:
  """Refuses a flag --plan that says too little or too much.

  Args:
    study: the study.
    cells: of it.
    text: of --plan; None: nothing is planned.
    slurm: of --slurm; None: the nodes are processes of this machine.

  Raises:
    ConfigError: naming the flag and what was expected.
  """
  if text is None:
    return
  paced = study.emulated and study.config(cells[0]).emulate.bandwidth
  try:
    emulation_keys.bytes_per_second(text)
  except ValueError:
    raise config_lib.ConfigError(f'--plan={text!r}: expected a bandwidth such as 1gbit') from None
  if text and paced:
    raise config_lib.ConfigError(
      f'--plan={text}: --emulate sets bandwidth={paced}; expected one of them'
    )
  if study.sleeps:
    return
  if slurm is not None:
    raise config_lib.ConfigError(
      '--plan with --slurm: expected --emulate with it; steps are timed on '
      'this machine, not on those of the jobs'
    )
  if not (text or paced) and max(cell.nodes for cell in cells) > 1:
    raise config_lib.ConfigError(
      "--plan: expected the bandwidth of the nodes' links, such as --plan=1gbit"
    )


def rates(
  study: study_runner.Study, cells: Sequence[grid.Cell], text: str
) -> dict[grid.Cell, float]:
  """The predicted images/s of cells, without those that cannot be planned.

  Args:
    study: the study.
    cells: of it.
    text: of --plan.

  Raises:
    ConfigError: if a strategy has no plan, or the steps cannot be timed.
  """
  configs = {}
  for cell in cells:
    # What is wrong with a config stands in the table when it is run.
    with contextlib.suppress(config_lib.ConfigError):
      configs[cell] = study.config(cell)
  if not configs:
    return {}
  time = _slept if study.sleeps else _Timer(study, configs)
  workloads = {c.strategy: workload_lib.count(configs[c]) for c in configs}
  result = {}
  for cell, config in configs.items():
    cluster = _cluster(cell, text or _bandwidth(config))
    setting = time(cell, config, cluster, workloads[cell.strategy])
    request = points_lib.Request('strong')
    (point,) = points_lib.plan(cell.strategy, [setting], request)
    if point.runs:
      result[cell] = point.rate
  return result


def summary(runs: Mapping[grid.Cell, study_results.Run]) -> dict:
  """Plain numbers: each planned run, the mean error and the worst."""
  rows = [
    {
      'strategy': cell.strategy,
      'nodes': cell.nodes,
      'devices': cell.workers,
      'weak': cell.weak,
      'seed': cell.seed,
      'images_per_second': round(run.images_per_second, 2),
      'planned': round(run.planned, 2),
      'error': round(run.planned / run.images_per_second - 1, 4),
    }
    for cell, run in runs.items()
    if run.planned
  ]
  errors = [abs(row['error']) for row in rows]
  return {
    'rows': rows,
    'mean_error': round(statistics.fmean(errors), 4) if errors else None,
    'worst_error': max(errors, default=None),
  }


def _bandwidth(config) -> str:
  return config.emulate.bandwidth if config.emulate.enabled else ''


def _cluster(cell, text) -> collectives.Cluster:
  device_tables = plan_tables.load()
  speed = emulation_keys.bytes_per_second(text) or _UNLIMITED
  return collectives.Cluster(
    cell.nodes,
    cell.devices,
    device_tables.link('--node_link', device_tables.device(_DEVICE).node_link),
    hardware.Link('nodes', speed, _LATENCY),
  )


def _slept(cell, config, cluster, workload) -> steps.Setting:
  """What is planned for a cell whose computing is a sleep."""
  emulate = config.emulate
  images = sizes.images_per_device(config, cluster, 'strong')
  seconds = _passes(config, cluster) * emulate.step_seconds
  seconds += images * emulate.image_seconds
  return steps.Setting(
    config,
    workload,
    plan_tables.load().device(_DEVICE),
    cluster,
    _SLEEPING,
    emulate.spread,
    # Gradients come within the whole pass, which has no fixed part.
    measured=(0.0, max(seconds, _NO_TIME) / images),
    slow=tuple(f for process, f in emulate.slow if process < cell.nodes),
  )


class _Timer:
  """What is planned for cells that compute, each device on a core."""

  def __init__(self, study, configs):
    """Times steps of the smallest and the largest batch of a device.

    As many devices as a cell has take their steps at the same time, each on a
    core of its own: those of one machine share its memory.
    """
    self._cores = sorted(os.sched_getaffinity(0))
    counts = {
      sizes.images_per_device(config, _cluster(cell, ''), 'strong')
      for cell, config in configs.items()
    }
    few, many = min(counts), max(counts)
    batches = few, many if many > few else 2 * few
    serves = any(cell.strategy == 'parameter_server' for cell in configs)
    self._measured = {
      count: _measured(study, batches, self._cores[:count], serves)
      for count in sorted({self._busy(cell) for cell in configs})
    }

  def __call__(self, cell, config, cluster, workload) -> steps.Setting:
    measured = self._measured[self._busy(cell)]
    handling = None
    if 'at_worker' in measured:
      handling = measured['at_worker'], measured['at_server']
    return steps.Setting(
      config,
      workload,
      plan_tables.load().device(_DEVICE),
      cluster,
      _COMPUTING,
      measured['jitter'],
      (measured['fixed'], measured['per_image']),
      sharing=max(1, cell.workers / len(self._cores)),
      handling=handling,
    )

  def _busy(self, cell):
    """Cores that compute at the same time."""
    return min(cell.workers, len(self._cores))


def _measured(study, batches, cores, serves) -> dict:
  """What `anp_jax.tools.plan --measure` says of two batches.

  Args:
    study: the study.
    batches: images of the two.
    cores: of the processes that measure, all of them at once.
    serves: whether a gradient's way through `parameter_server` is timed, too.

  Returns:
    The median over processes of `fixed`, `per_image`, `jitter` and, if it
    serves, `at_worker` and `at_server`. The line goes through both batches,
    even where that makes `fixed` negative: only these are planned, and what
    lies between.
  """
  cell = grid.Cell('sync', 1, 1, 0)
  command = [
    sys.executable,
    '-m',
    'anp_jax.tools.plan',
    f'--config={study.spec}',
    *study.overridden(cell),
    '--measure',
    '--nodes=1',
    '--devices_per_node=1',
    f'--measure_batches={",".join(map(str, batches))}',
    f'--images_per_device={batches[0]}',
    f'--strategies=sync{",server" if serves else ""}',
  ]
  processes = []
  for core in cores:
    bound = ['taskset', '-c', str(core)] if shutil.which('taskset') else []
    processes.append(
      subprocess.Popen(
        [*bound, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=study_runner.environment(cell) | {'JAX_PLATFORMS': 'cpu'},
        text=True,
      )
    )
  outputs = [process.communicate() for process in processes]
  measurements = []
  for process, (output, errors) in zip(processes, outputs):
    if process.returncode:
      lines = errors.strip().splitlines()
      raise config_lib.ConfigError(f'--plan: {(lines or ["anp_jax.tools.plan failed"])[-1]}')
    measurements.append(json.loads(output.splitlines()[-1])['measured'])
  times = [dict(map(tuple, m.pop('batches'))) for m in measurements]
  result = {name: statistics.median(m[name] for m in measurements) for name in measurements[0]}
  low, high = (statistics.median(t[images] for t in times) for images in batches)
  if high > low:
    per_image = (high - low) / (batches[1] - batches[0])
    result['per_image'] = per_image
    result['fixed'] = low - per_image * batches[0]
  return result


def _passes(config, cluster) -> int:
  """Passes of a device in a step, one after another."""
  groups = getattr(config.strategy, 'groups', 1)
  shards = getattr(config.strategy, 'logical_shards', 1)
  return config.accumulate * max(1, groups // cluster.size, shards // cluster.size)
