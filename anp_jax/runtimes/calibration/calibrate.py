"""A plan for the devices at hand: measured once, and kept."""

import dataclasses
import json
import os
import platform
import time

import jax

from anp_jax.parallel import mesh as mesh_lib
from anp_jax.parallel.channel_split import plan as plan_lib
from anp_jax.runtimes.calibration import costs as costs_lib
from anp_jax.runtimes.calibration import timing as timing_lib
from anp_jax.runtimes.offload import device as device_lib
from anp_jax.runtimes.offload import timing

FILE = 'kernel_split.json'
# At least and at most; more than the least where seconds are left.
_ROUNDS, _SECONDS = (3, 30), 6.0
_FORMAT = 2  # of the file


def planned(spec, workdir, processes):
  """Times devices and links, and decides what is split; all processes call it.

  What was measured is kept in the workdir, and used again by a run that goes on
  with the same network on the same devices.

  Args:
    spec: `training.run_spec.RunSpec`.
    workdir: of the run.
    processes: `cluster.Processes`.

  Returns:
    The text for config.strategy.plan, and lines for people.
  """
  config, mesh, helpers = spec.config, spec.mesh, spec.offload_devices
  rows = spec.batch_size // mesh_lib.batch_devices(mesh)
  key = {
    'format': _FORMAT,
    'jax': jax.__version__,
    'devices': [list(d) for row in devices(mesh, processes) for d in row],
    'mesh': list(mesh.devices.shape),
    'helpers': [h.name for h in helpers],
    'images': [rows, config.accumulate],
    'outputs': spec.objective.outputs,
    'reduce_dtype': config.strategy.reduce_dtype,
    'model': json.loads(config.model.to_json()),
    'image_size': config.data.image_size,
    'layers': config.strategy.split_layers,
  }
  path = os.path.join(workdir, FILE)
  saved = None
  if not processes.index and os.path.exists(path):
    with open(path) as f:
      saved = json.load(f)
  saved = processes.gather(saved)[0]
  if saved and saved.get('key') == key:
    costs = from_json(saved['costs'], bool(helpers))
    plan = {k: tuple(v) for k, v in saved['plan'].items()}
  else:
    costs = measure(spec, processes)
    # Unlike hosts may round otherwise: one of them decides.
    plan = processes.gather(costs.best())[0]
    plan = {k: tuple(v) for k, v in plan.items()}
    if not processes.index:
      kept = {'key': key, 'costs': dataclasses.asdict(costs), 'plan': plan}
      with open(path + '.new', 'w') as f:
        json.dump(kept, f, indent=1)
      os.replace(path + '.new', path)
  chosen = text(costs, plan)
  return chosen, [
    *costs.table(plan), f'plan     config.strategy.plan={chosen!r}',
  ]  # fmt: skip


def text(costs: costs_lib.Costs, plan) -> str:
  """What config.strategy.plan is to be for a plan of these devices."""
  if not plan and costs.alike:
    return plan_lib.APART
  return str(plan_lib.Plan(plan))


def measure(spec, processes) -> costs_lib.Costs:
  """Times the network on the mesh's devices; see `timing.Timing`.

  Args:
    spec: `training.run_spec.RunSpec`.
    processes: `cluster.Processes`; all call it.
  """
  timing, kinds = begin(spec, processes)
  spent = made = 0
  while made < _ROUNDS[0] or (spent < _SECONDS and made < _ROUNDS[1]):
    start = time.perf_counter()
    timing.round()
    made += 1
    # All must make equally many.
    spent += max(processes.gather(time.perf_counter() - start))
  return timing.costs(*kinds)


def begin(spec, processes):
  """What times a network, and what its `costs` is to be told of the devices.

  Args:
    spec: `training.run_spec.RunSpec`.
    processes: `cluster.Processes`; all call it.
  """
  helpers = spec.offload_devices
  names, alike = kinds(spec.mesh, processes)
  if not helpers:
    return timing_lib.Timing(spec, processes), (names, alike)
  names += [h.name for h in helpers]
  return timing.Timing(spec, processes), (names, False)


def kinds(mesh, processes) -> tuple[list[str], bool]:
  """Names of the devices along mesh.model, and whether all are of one kind."""
  rows = devices(mesh, processes)
  names = [f'{kind} ({host})' for kind, host in rows[0]]
  return names, len({kind for row in rows for kind, _ in row}) == 1


def devices(mesh, processes) -> list[list[tuple[str, str]]]:
  """Processor and host of each device, by its place on data and model."""
  hosts = processes.gather(f'{platform.node()}, rank {processes.index}')
  cpus = processes.gather(device_lib.processor())
  return [
    [
      (cpus[d.process_index] if d.platform == 'cpu' else d.device_kind,
       hosts[d.process_index])
      for d in row
    ]
    for row in mesh.devices.reshape(-1, mesh.shape[mesh_lib.MODEL])
  ]  # fmt: skip


def from_json(found: dict, with_helpers: bool = False) -> costs_lib.Costs:
  """From what dataclasses.asdict gave, also by way of JSON."""
  kind = timing.Costs if with_helpers else costs_lib.Costs
  layers = {
    path: costs_lib.Layer(
      **{
        **x,
        'alone': tuple(x['alone']),
        'counts': tuple(x['counts']),
        'seconds': tuple(map(tuple, x['seconds'])),
      }
    )
    for path, x in found['layers'].items()
  }
  link = costs_lib.Link(**{k: tuple(v) for k, v in found['link'].items()})
  return kind(
    **{
      **found,
      'names': tuple(found['names']),
      'whole': tuple(found['whole']),
      'layers': layers,
      'link': link,
    }
  )
