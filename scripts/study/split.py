"""Measures split convolutions, beside what the cost model says of them.

  srun --ntasks-per-node=1 python -m scripts.study.split
    --config=configs/kernel_split_cifar10.py --workdir=runs/split
    --batch_sizes=32,64

or with --coordinator, --num_processes and --process_id as main.py takes them;
`python -m scripts.study kernel_split` starts it on this machine. For each batch
size it times layers and links as training would, makes the plan, and then times
whole steps: of one device alone, the others idle; with the plan; and with
shares that nobody planned. What the predictions are made of is timed in the
same rounds, so that all meet the same machine; a run does that once, at its
start. All of it goes to measured.json in the workdir.
"""

import dataclasses
import json
import os
import statistics
import sys

import jax
import numpy as np

from anp_jax import cluster
from anp_jax import config as config_lib
from anp_jax.config import command_line
from anp_jax.data import sources
from anp_jax.parallel import apportionment as shares_lib
from anp_jax.parallel import division
from anp_jax.parallel import mesh as mesh_lib
from anp_jax.parallel import state as state_lib
from anp_jax.runtimes.calibration import calibrate
from anp_jax.runtimes.calibration import timing as timing_lib
from anp_jax.runtimes.offload import pool as pool_lib
from anp_jax.system import xla_flags
from anp_jax.training import build
from anp_jax.training import objective as objective_lib
from anp_jax.training import run_spec
from scripts.study import grid

FILE = 'measured.json'
ALONE = 'alone'
PLAN = 'plan'
EQUAL = 'equal shares'
ROUNDS = 9


def ways(costs) -> dict[str, dict]:
  """What is timed: the plan, and others, by name."""
  devices = len(costs.names)

  def shared(shares, layers):
    return {
      path: shares_lib.apportion(costs.layers[path].features, shares)
      for path in layers
    }

  layers = list(costs.layers)
  heavy = max(layers, key=lambda path: max(costs.layers[path].alone))
  ones = (1,) * (devices - 1)
  equal, twice, thrice = (1, *ones), (2, *ones), (3, *ones)
  return {
    PLAN: costs.best(),
    EQUAL: shared(equal, layers),
    'first 2, others 1': shared(twice, layers),
    'first 3, others 1': shared(thrice, layers),
    'last 2, others 1': shared(twice[::-1], layers),
    f'{heavy} alone, equal': shared(equal, [heavy]),
    f'{heavy} alone, first 3': shared(thrice, [heavy]),
  }


def measure(
  config, processes, rounds: int = ROUNDS, brief: bool = False, pool=None
) -> dict:
  """Times one batch size.

  Args:
    config: the run's, with its batch size.
    processes: `cluster.Processes`; all call it.
    rounds: in which each way makes a step.
    brief: whether only the plan and equal shares are timed.
    pool: `pool.DevicePool` of a run with offload devices; None: a mesh splits.

  Returns:
    batch_size; helped: whether with offload devices; costs, as JSON; alone;
    ways, a list of name, plan, predicted and measured seconds.
  """
  devices, helpers = None, ()
  if pool:
    devices, helpers = pool.mesh_devices, pool.offload_devices
  mesh = mesh_lib.create(config, devices, processes.hosts)
  is_split = helpers or mesh.shape[mesh_lib.MODEL] > 1
  if mesh.shape[mesh_lib.DATA] > 1 or not is_split:
    raise config_lib.ConfigError(
      f'config.mesh.data={config.mesh.data}: expected 1, and two devices or '
      'more along config.mesh.model'
    )
  division.check(config, config.batch_size, mesh)
  source = sources.open_source(config, training=True)
  objective = objective_lib.create(source.vocabulary, config)
  size = config.batch_size
  spec = run_spec.RunSpec(
    config, mesh, objective, size, len(source), tuple(helpers)
  )
  timing, kinds = calibrate.begin(spec, processes)
  batch = timing_lib.images(config, mesh, size)
  timing.round()
  timing.round()
  costs = timing.costs(*kinds)
  steps, state = {}, None
  # Unlike hosts may round otherwise: one of them decides.
  chosen, baseline = processes.gather([ways(costs), costs.baseline])[0]
  if brief:
    chosen = {name: chosen[name] for name in (PLAN, EQUAL)}
  for name, plan in chosen.items():
    processes.heartbeat('compiling')
    own = config.copy_and_resolve_references()
    own.strategy.plan = calibrate.text(costs, plan)
    parts = build.create(dataclasses.replace(spec, config=own))
    if state is None:
      state = state_lib.create(parts.init_fn, parts.abstract_state)
    steps[name] = parts.train_step.lower(state, batch).compile()
  device = mesh.devices.flat[baseline]
  alone = None
  if device.process_index == processes.index:
    alone = timing_lib.alone(spec, device)
    alone()
  found = {name: [] for name in (ALONE, *steps)}
  for turn in range(rounds + 1):
    processes.heartbeat('step', turn)
    timing.round()
    processes.gather('ready')
    seconds = timing_lib.timed(alone) if alone else 0.0
    processes.gather('ready')
    if turn:
      found[ALONE].append(max(processes.gather(seconds)))
    for name, step in steps.items():

      def run(step=step):
        nonlocal state
        state, values = step(state, batch)
        jax.block_until_ready(values)

      processes.gather('ready')
      seconds = timing_lib.timed(run)
      if turn:  # the first one does not count
        found[name].append(max(processes.gather(seconds)))
  costs = timing.costs(*kinds)
  return {
    'batch_size': size,
    'helped': bool(helpers),
    'costs': dataclasses.asdict(costs),
    'alone': statistics.median(found[ALONE]),
    'ways': [
      {
        'name': name,
        'plan': calibrate.text(costs, plan),
        'predicted': costs.step(plan),
        'measured': statistics.median(found[name]),
        'speed_up': statistics.median(
          np.divide(found[ALONE], found[name]).tolist()
        ),
      }
      for name, plan in chosen.items()
    ],
  }


def main(arguments: list[str]) -> int:
  """Returns the process's exit status."""
  try:
    overrides, rest = command_line.split_overrides(arguments)
    flags = _flags(rest)
    sizes = grid.numbers('--batch_sizes', flags.batch_sizes, 1)
    config = command_line.load(flags.config, overrides)
    xla_flags.enable_for(config)
    if config.strategy.name != 'kernel_split':
      raise config_lib.ConfigError(
        f'config.strategy.name={config.strategy.name!r}: expected kernel_split'
      )
    if flags.rounds < 1:
      raise config_lib.ConfigError(
        f'--rounds={flags.rounds}: expected 1 or more'
      )
    place = cluster.detect(
      flags.coordinator, flags.num_processes, flags.process_id
    )
    helps = bool(config.strategy.helpers)
    command = {'--mode': 'train'} if helps else {}
    with cluster.start(config, place, command) as processes:
      if not helps:
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
  found = []
  for size in sizes:
    own = config.copy_and_resolve_references()
    own.batch_size = size
    found.append(measure(own, processes, flags.rounds, flags.brief, pool))
    if not processes.index:
      print(json.dumps(found[-1]), flush=True)
  if not processes.index:
    os.makedirs(flags.workdir, exist_ok=True)
    with open(os.path.join(flags.workdir, FILE), 'w') as f:
      json.dump(found, f, indent=1)


def _flags(arguments):
  parser = command_line.Parser(
    prog='python -m scripts.study.split',
    description=__doc__,
  )
  parser.add_argument('--config', required=True, help='FILE[:VARIANT]')
  parser.add_argument('--workdir', required=True)
  parser.add_argument('--batch_sizes', required=True, help='as in 32,64')
  parser.add_argument('--rounds', type=int, default=ROUNDS)
  parser.add_argument('--brief', action='store_true')
  parser.add_argument('--coordinator')
  parser.add_argument('--num_processes', type=int)
  parser.add_argument('--process_id', type=int)
  return parser.parse(arguments)


if __name__ == '__main__':
  xla_flags.use_huge_pages()
  sys.exit(main(sys.argv[1:]))
