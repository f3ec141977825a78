"""Measures a run's devices once, plans its channel split, and keeps both."""

import json
import os
import time

import jax

from anp_jax import cluster, models
from anp_jax.parallel import mesh as mesh_lib
from anp_jax.parallel.channel_split import split as plan_lib
from anp_jax.runtimes.calibration import costs as costs_lib, planner, timing as timing_lib
from anp_jax.system import files, onednn
from anp_jax.training import run_spec

FILE = 'channel_split.json'
# Rounds at least and at most, seconds after which no further round begins, and the
# relative width of an interval of the devices' speeds that is narrow enough.
_ROUNDS, _SECONDS, _INTERVAL = (3, 30), 20.0, 0.05
_FORMAT = 5  # version of the file


def choose_plan(
  spec: run_spec.RunSpec, workdir: str, processes: cluster.Processes
) -> tuple[str, list[str]]:
  """Decides which layers are split, and how; all processes call it.

  The measurements are kept in the workdir, where a run that is resumed with the
  same network on the same devices finds them.

  Args:
    spec: spec of the run.
    workdir: folder of the run.
    processes: processes of the run.

  Returns:
    The text for config.strategy.plan, and messages for people.
  """
  saved = load(spec, workdir, processes)
  costs, plan = saved or measure_and_plan(spec, workdir, processes)
  text = plan_text(costs, plan)
  messages = planner.messages(costs, plan)
  return text, [*messages, f'plan     config.strategy.plan={text!r}']


def load(
  spec: run_spec.RunSpec, workdir: str, processes: cluster.Processes
) -> tuple[costs_lib.Costs, costs_lib.Plan] | None:
  """Reads what `measure_and_plan` has kept of the same network and devices.

  Args:
    spec: spec of the run.
    workdir: folder of the run.
    processes: processes of the run.

  Returns:
    The measured costs and the plan; None where none were kept.
  """
  path, saved = os.path.join(workdir, FILE), None
  if not processes.index and os.path.exists(path):
    with open(path) as f:
      saved = json.load(f)
  saved = processes.gather(saved)[0]
  if not saved or saved['key'] != _key(spec, processes):
    return None
  kind = costs_lib.OffloadCosts if spec.offload_devices else costs_lib.Costs
  return kind.from_json(saved['costs']), saved['plan']


def measure_and_plan(
  spec: run_spec.RunSpec, workdir: str, processes: cluster.Processes
) -> tuple[costs_lib.Costs, costs_lib.Plan]:
  """Times the network on the run's devices, plans, and keeps both.

  Args:
    spec: spec of the run.
    workdir: folder of the run.
    processes: processes of the run.

  Returns:
    The measured costs and the plan.
  """
  key = _key(spec, processes)
  costs = measure(spec, processes)
  # Hosts may round differently: one of them decides.
  plan = processes.gather(planner.best_plan(costs))[0]
  # If a device was lost meanwhile, its substitute was timed.
  if not processes.index and not any(d.is_lost for d in spec.offload_devices):
    # A trial's workdir may not be there yet.
    os.makedirs(workdir, exist_ok=True)
    files.write_json(
      os.path.join(workdir, FILE), {'key': key, 'costs': costs.to_json(), 'plan': plan}
    )
  return costs, plan


def plan_text(costs: costs_lib.Costs, plan: costs_lib.Plan) -> str:
  """Returns the text for config.strategy.plan of a plan of these devices."""
  if not plan and costs.alike:
    return plan_lib.APART
  return str(plan_lib.Plan(plan))


def measure(spec: run_spec.RunSpec, processes: cluster.Processes) -> costs_lib.Costs:
  """Times the network on the run's devices; all processes call it."""
  timing = timing_lib.Timing(spec, processes)
  run_rounds(timing, processes)
  return timing.costs()


def run_rounds(timing: timing_lib.Timing, processes: cluster.Processes) -> None:
  """Times until the devices' speeds are known; all processes call it."""
  seconds, rounds = 0.0, 0
  while rounds < _ROUNDS[0] or (
    seconds < _SECONDS and rounds < _ROUNDS[1] and timing.interval() > _INTERVAL
  ):
    start = time.perf_counter()
    timing.round()
    rounds += 1
    # All processes must run equally many rounds.
    seconds += max(processes.gather(time.perf_counter() - start))


def _key(spec, processes):
  """Returns what measurements depend on, as JSON; another key needs new ones."""
  config, mesh = spec.config, spec.mesh
  rows = spec.batch_size // mesh_lib.batch_devices(mesh)
  devices = timing_lib.devices(mesh, processes)
  model = json.loads(config.model.to_json())
  # The key has the library that is opened, rather than its setting.
  del model['cpu_library']
  target = models.target(config, mesh_lib.platform(mesh), jax.local_device_count())
  opened = onednn.opened() if target == onednn.PLATFORM else None
  return {
    'library': opened.describe() if opened else '',
    'format': _FORMAT,
    'jax': jax.__version__,
    'devices': [list(device) for row in devices for device in row],
    'mesh': list(mesh.devices.shape),
    'helpers': [device.name for device in spec.offload_devices],
    'images': [rows, config.accumulate],
    'outputs': spec.objective.outputs,
    'reduce_dtype': config.strategy.reduce_dtype,
    'model': model,
    'image_size': config.data.image_size,
    'layers': config.strategy.split_layers,
    'batch_layers': config.strategy.batch_layers,
  }
