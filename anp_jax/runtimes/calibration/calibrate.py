"""Measures a run's devices once, plans its channel split, and keeps both."""

from anp_jax import cluster
from anp_jax.parallel.channel_split import split as split_lib
from anp_jax.runtimes.calibration import costs as costs_lib, kept, planner, timing as timing_lib
from anp_jax.training import run_spec

FILE = 'channel_split.json'


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
  costs, plan = saved or _measure_and_plan(spec, workdir, processes)
  text = str(split_lib.Split(plan))
  messages = planner.messages(costs, plan)
  return text, [*messages, f'plan     config.strategy.plan={text!r}']


def load(
  spec: run_spec.RunSpec, workdir: str, processes: cluster.Processes
) -> tuple[costs_lib.Costs, costs_lib.Split] | None:
  """Reads what `choose_plan` has kept of the same network and devices.

  Args:
    spec: spec of the run.
    workdir: folder of the run.
    processes: processes of the run.

  Returns:
    The measured costs and the plan; None where none were kept.
  """
  saved = kept.load(workdir, FILE, _key(spec, processes), processes)
  if saved is None:
    return None
  kind = costs_lib.OffloadCosts if spec.offload_devices else costs_lib.Costs
  return kind.from_json(saved['costs']), saved['plan']


def _measure_and_plan(spec, workdir, processes):
  key = _key(spec, processes)
  costs = timing_lib.Timing(spec, processes).costs()
  # Hosts may round differently: one of them decides.
  plan = processes.gather(planner.best_plan(costs))[0]
  # If a device was lost meanwhile, its substitute was timed.
  if not any(d.is_lost for d in spec.offload_devices):
    kept.save(workdir, FILE, key, {'costs': costs.to_json(), 'plan': plan}, processes)
  return costs, plan


def _key(spec, processes):
  """Returns what measurements depend on, as JSON; another key needs new ones."""
  return kept.key(spec, processes) | {
    'helpers': [device.name for device in spec.offload_devices],
    'layers': spec.config.strategy.split_layers,
  }
