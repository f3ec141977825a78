"""Measures steps with split convolutions, and what the cost model predicts.

  srun --ntasks-per-node=1 python -m anp_jax.tools.study.channel_split_process
    --config=configs/channel_split_cifar10.py --workdir=runs/split
    --batch_sizes=32,64

or with --coordinator, --num_processes and --process_id as main.py takes them;
`python -m anp_jax.tools.study channel_split` starts it on this machine. For each
batch size it times layers and collectives as training would, makes the plan,
and then times whole steps: of one device alone, the others idle; with the plan;
and with other shares. The times that predictions are made of come from the same
rounds, so that all are of the same machine; a run measures them once, at its
start. Everything is written to measured.json in the workdir.
"""

import dataclasses
import itertools
import json
import os
import statistics
import sys

import numpy as np

from anp_jax import cluster, config as config_lib
from anp_jax.config import argument_parser, command_line
from anp_jax.data import sources
from anp_jax.parallel import apportionment, division, mesh as mesh_lib
from anp_jax.runtimes.calibration import (
  calibrate,
  costs as costs_lib,
  planner,
  timing as timing_lib,
  workloads,
)
from anp_jax.runtimes.offload import pool as pool_lib
from anp_jax.system import files, stopwatch, xla_flags
from anp_jax.tools.study import grid
from anp_jax.training import build, objective as objective_lib, run_spec

FILE = 'measured.json'
ALONE = 'alone'
PLAN = 'plan'
EQUAL = 'equal shares'
BY_CHANNEL = 'by channel alone'
BY_BATCH = 'equal parts of the batch'
_BRIEF = (PLAN, EQUAL, BY_CHANNEL, BY_BATCH)
ROUNDS = 9


def divisions(costs) -> dict[str, dict]:
  """The divisions of the layers that are timed, by name."""
  devices = len(costs.names)

  def shared(shares, layers):
    return {path: apportionment.apportion(costs.layers[path].features, shares) for path in layers}

  layers = list(costs.layers)
  heavy = max(layers, key=lambda path: max(costs.layers[path].alone))
  ones = (1,) * (devices - 1)
  equal, twice, thrice = (1, *ones), (2, *ones), (3, *ones)
  best = planner.best_plan(costs)
  references = {}  # that the best one is to be compared with
  if costs.boundaries or costs.fixed:
    by_channel = dataclasses.replace(costs, boundaries=(), fixed=())
    references[BY_CHANNEL] = planner.best_plan(by_channel)
  if costs.fixed:
    rows = apportionment.apportion(costs.rows, equal, costs.row_multiple)
    references[BY_BATCH] = {costs_lib.ROWS: rows}
  return {
    PLAN: best,
    EQUAL: shared(equal, layers),
    **{name: plan for name, plan in references.items() if plan != best},
    'first 2, others 1': shared(twice, layers),
    'first 3, others 1': shared(thrice, layers),
    'last 2, others 1': shared(twice[::-1], layers),
    f'{heavy} alone, equal': shared(equal, [heavy]),
    f'{heavy} alone, first 3': shared(thrice, [heavy]),
  }


def measure(config, processes, rounds: int = ROUNDS, brief: bool = False, pool=None) -> dict:
  """Times one batch size.

  Args:
    config: of the run, with its batch size.
    processes: `cluster.Processes`; all call it.
    rounds: in which each division makes a step.
    brief: whether other shares than equal ones are left out.
    pool: `pool.DevicePool` of a run with offload devices; None: a mesh splits.

  Returns:
    batch_size; offload: whether with offload devices; costs, as JSON; steps, a
    list of name, plan, predicted and measured seconds, speed_up over one device
    alone.
  """
  spec = _spec(config, processes, pool)
  timing = timing_lib.Timing(spec, processes)
  calibrate.run_rounds(timing, processes)
  costs = timing.costs()
  # Unlike hosts may round otherwise: one of them decides.
  plans, baseline = processes.gather([divisions(costs), costs.baseline])[0]
  if brief:
    plans = {name: plan for name, plan in plans.items() if name in _BRIEF}
  texts = {name: calibrate.plan_text(costs, p) for name, p in plans.items()}
  steps = _compile(spec, texts, processes)
  alone = lambda: None  # of the processes that wait meanwhile  # noqa: E731
  device = spec.mesh.devices.flat[baseline]
  if device.process_index == processes.index:
    alone = workloads.unsplit_step(spec, device)
    alone()
  seconds = _time({ALONE: alone, **steps}, timing, rounds, processes)
  costs = timing.costs()
  return {
    'batch_size': spec.batch_size,
    'offload': bool(spec.offload_devices),
    'costs': costs.to_json(),
    'steps': [
      {
        'name': name,
        'plan': texts[name],
        'predicted': costs.step_seconds(plan),
        'measured': statistics.median(seconds[name]),
        'speed_up': statistics.median(np.divide(seconds[ALONE], seconds[name]).tolist()),
      }
      for name, plan in plans.items()
    ],
  }


def check(config) -> None:
  """Refuses another strategy.

  Raises:
    ConfigError: if strategy.name is another one.
  """
  if 'split_layers' not in config.strategy:
    raise config_lib.ConfigError(
      f'config.strategy.name={config.strategy.name!r}: expected channel_split'
    )


def check_rounds(rounds: int) -> None:
  """Refuses a number of rounds in which nothing is timed.

  Raises:
    ConfigError: if it is less than 1.
  """
  if rounds < 1:
    raise config_lib.ConfigError(f'--rounds={rounds}: expected 1 or more')


def main(arguments: list[str]) -> int:
  """Returns the process's exit status."""
  try:
    overrides, rest = command_line.split_overrides(arguments)
    flags = _flags(rest)
    sizes = grid.numbers('--batch_sizes', flags.batch_sizes, 1)
    config = command_line.load(flags.config, overrides)
    xla_flags.enable_for(config)
    check(config)
    check_rounds(flags.rounds)
    place = cluster.detect(flags.coordinator, flags.num_processes, flags.process_id)
    offloads = bool(config.strategy.offload_to)
    command = {'--mode': 'benchmark'} if offloads else {}
    with cluster.start(config, place, command, flags.workdir) as processes:
      if not offloads:
        _measure_all(config, processes, sizes, flags)
      elif processes.index:
        pool_lib.serve(config, processes)
      else:
        with pool_lib.DevicePool(config, processes) as pool:
          _measure_all(config, pool.processes, sizes, flags, pool)
  except cluster.EXPECTED as e:
    code, text = cluster.exit_status(e)
    print(f'error: {text}', file=sys.stderr)
    return code
  return 0


def _measure_all(config, processes, sizes, flags, pool=None):
  """Measures all batch sizes, prints each, and writes the file."""
  results = []
  for size in sizes:
    sized = config_lib.replaced(config, {'batch_size': size})
    results.append(measure(sized, processes, flags.rounds, flags.brief, pool))
    if not processes.index:
      print(json.dumps(results[-1]), flush=True)
  if not processes.index:
    os.makedirs(flags.workdir, exist_ok=True)
    files.write_json(os.path.join(flags.workdir, FILE), results)


def _spec(config, processes, pool) -> run_spec.RunSpec:
  """The run that is measured; ConfigError if it splits nothing."""
  devices, offload_devices = None, ()
  if pool:
    devices, offload_devices = pool.mesh_devices, pool.devices()
  mesh = mesh_lib.create(config, devices, processes.hosts)
  is_split = offload_devices or mesh.shape[mesh_lib.MODEL] > 1
  if mesh.shape[mesh_lib.DATA] > 1 or not is_split:
    raise config_lib.ConfigError(
      f'config.mesh.data={config.mesh.data}: expected 1, and two devices or '
      'more along config.mesh.model'
    )
  division.check(config, config.batch_size, mesh)
  source = sources.open_source(config, training=True)
  objective = objective_lib.create(source.vocabulary, config)
  return run_spec.RunSpec(config, mesh, objective, config.batch_size, len(source), offload_devices)


def _compile(spec, texts, processes) -> dict:
  """Functions that make a step, by name, from the plans' texts by name."""
  batch = workloads.images(spec, spec.batch_size)
  steps = {}
  for name, text in texts.items():
    processes.heartbeat('compiling')
    config = config_lib.replaced(spec.config, {'strategy.plan': text})
    program = build.create(dataclasses.replace(spec, config=config))
    steps[name] = workloads.step(program, spec, spec.batch_size, itertools.repeat(batch))
  return steps


def _time(functions, timing, rounds, processes) -> dict[str, list[float]]:
  """Seconds of the slowest process, by function and round."""
  seconds = {name: [] for name in functions}
  for i in range(rounds + 1):
    processes.heartbeat('step', i)
    timing.round()
    for name, function in functions.items():
      processes.gather('ready')
      slowest = max(processes.gather(stopwatch.timed_again(function)))
      if i:  # the first one does not count
        seconds[name].append(slowest)
  return seconds


def _flags(arguments):
  parser = argument_parser.Parser(
    prog='python -m anp_jax.tools.study.channel_split_process', description=__doc__
  )
  parser.add_argument('--config', required=True, help='recipe, FILE[:VARIANT]')
  parser.add_argument('--workdir', required=True)
  parser.add_argument('--batch_sizes', required=True, help='batch sizes, such as 32,64')
  parser.add_argument('--rounds', type=int, default=ROUNDS)
  parser.add_argument('--brief', action='store_true')
  parser.add_argument('--coordinator')
  parser.add_argument('--num_processes', type=int)
  parser.add_argument('--process_id', type=int)
  return parser.parse(arguments)


if __name__ == '__main__':
  xla_flags.use_huge_pages()
  sys.exit(main(sys.argv[1:]))
