"""Two processes of one run, against two that know of no other and against one.

  python scripts/bench/scaling.py [--model=resnet18] [--batch=256] [--size=64]
    [--strategies=sync,invariant] [--rounds=8] [--steps=1]

Two processes, each with a core to itself, compile the step that trains: for
their own device alone, which sends nothing, and by each strategy for both
devices, where gradients are summed at each step (gloo over loopback). In every
round take turns, for a few steps each:

  one       the first process with the batch of both; the other waits
  apart     each with its half by itself, at the same time
  STRATEGY  both in one step

What connecting costs is `apart` against a strategy, of the same round; what a
second core gives the same training, `one` against it: the speed-up that is
published as strong scaling. `lockstep` is computed from `apart`, as if each
step of both took as long as the slower of the two: what nobody who is
synchronous can beat on cores whose speed varies.
"""

import argparse
import math
import os
import socket
import subprocess
import sys
import time

import _common

from anp_jax import cluster
from anp_jax.config import command_line
from anp_jax.system import xla_flags

_ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), '..', '..'))


def _flags():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--model', default='resnet18')
  parser.add_argument('--batch', type=int, default=256, help='a process')
  parser.add_argument('--size', type=int, default=64, help='pixels')
  parser.add_argument('--strategies', default='sync')
  parser.add_argument('--rounds', type=int, default=8)
  parser.add_argument('--steps', type=int, default=1, help='a turn')
  # Given to the two processes that this one starts.
  parser.add_argument('--coordinator', help=argparse.SUPPRESS)
  parser.add_argument('--process_id', type=int, help=argparse.SUPPRESS)
  return parser.parse_args()


def _config(flags, strategy='sync'):
  keys = {
    'batch_size': str(flags.batch),
    'model.norm_group': str(math.gcd(32, flags.batch // 2)),
    'strategy.name': strategy,
    # The fewest that two devices may have.
    'strategy.logical_shards': '4',
    'cluster.stall_timeout': '0',
    'data.image_size': str(flags.size),
    'data.resize': str(flags.size),
    'data.source': 'synthetic',
    'duration': '1000 steps',
    'model.name': flags.model,
    'schedule.warmup': '0 steps',
  }
  # Some belong to one strategy, or to ResNets, alone.
  return command_line.load(
    'configs/resnet_anp.py',
    command_line.applying('configs/resnet_anp.py', keys),
  )


def _stepper(config, mesh, batch_size):
  """A function that takes `count` steps of a new run on the mesh."""
  import jax
  import numpy as np

  from anp_jax.data import sources
  from anp_jax.parallel import state as state_lib
  from anp_jax.training import build
  from anp_jax.training import objective as objective_lib
  from anp_jax.training import run_spec

  source = sources.open_source(config, training=True)
  objective = objective_lib.create(source.vocabulary, config)
  parts = build.create(
    run_spec.RunSpec(config, mesh, objective, batch_size, len(source))
  )
  random = np.random.default_rng(0)

  def fill(spec):
    values = random.integers(0, 10, spec.shape).astype(spec.dtype)
    if spec.dtype == np.float32:  # weights
      values[:] = 1
    return jax.make_array_from_callback(
      spec.shape, spec.sharding, lambda index: values[index]
    )

  batch = build.abstract_batch(config, mesh, batch_size)
  batch = {name: fill(spec) for name, spec in batch.items()}
  state = state_lib.create(parts.init_fn, parts.abstract_state)
  step = parts.train_step.lower(state, batch).compile()

  def run(count):
    nonlocal state
    for _ in range(count):
      state, values = step(state, batch)
    jax.block_until_ready((state, values))

  run(2)  # the first ones take longer
  return run


def _measure(flags):
  """One of the two processes; the first returns each way's rates by round."""
  xla_flags.enable()
  config, strategies = _config(flags), flags.strategies.split(',')
  place = cluster.detect(flags.coordinator, 2, flags.process_id)
  ways = ['one', 'apart', *strategies]
  measured = {way: [] for way in ways}
  with cluster.start(config, place, {}) as processes:
    import jax

    from anp_jax.parallel import mesh as mesh_lib

    local_mesh = mesh_lib.create(config, jax.local_devices())
    global_mesh = mesh_lib.create(config, hosts=processes.hosts)
    run = {
      name: _stepper(_config(flags, name), global_mesh, 2 * flags.batch)
      for name in strategies
    }
    run['apart'] = _stepper(config, local_mesh, flags.batch)
    if place.index == 0:
      run['one'] = _stepper(config, local_mesh, 2 * flags.batch)

    def timed(way, count):
      start = time.perf_counter()
      if way in run:
        run[way](count)
      return time.perf_counter() - start

    measured['lockstep'] = []
    for i in range(flags.rounds):
      # Each way is first as often as another.
      first = i % len(ways)
      for way in ways[first:] + ways[:first]:
        processes.gather(None)
        images = flags.steps * flags.batch
        if way == 'apart':
          local_times = [timed(way, 1) for _ in range(flags.steps)]
          times = processes.gather(local_times)
          measured[way].append(sum(images / sum(t) for t in times))
          slower = sum(map(max, *times))
          measured['lockstep'].append(2 * images / slower)
        else:
          seconds = max(processes.gather(timed(way, flags.steps)))
          measured[way].append(2 * images / seconds)
  return measured


def _start(coordinator, rank):
  more = [f'--coordinator={coordinator}', f'--process_id={rank}']
  return subprocess.Popen(
    ['taskset', '-c', str(rank), sys.executable, *sys.argv, *more], cwd=_ROOT
  )


def main():
  """Starts the two processes, or is one of them."""
  flags = _flags()
  if flags.coordinator is None:
    if len(os.sched_getaffinity(0)) < 2:
      raise SystemExit('error: needs two cores')
    with socket.socket() as s:
      s.bind(('127.0.0.1', 0))
      coordinator = f'127.0.0.1:{s.getsockname()[1]}'
    sys.argv[0] = os.path.abspath(sys.argv[0])
    ranks = [_start(coordinator, rank) for rank in (0, 1)]
    if any([rank.wait() for rank in ranks]):
      raise SystemExit('error: a process failed, see above')
    return
  output = _common.unmarked()
  measured = _measure(flags)
  if flags.process_id:
    return
  rows = [('two processes', 'over', 'ours', 'lowest', 'goal', '')]
  ratios = {}
  for strategy in flags.strategies.split(','):
    for way, label, goal in (
      ('apart', 'two by themselves', 0.95),
      ('lockstep', 'the slower of them at each step', None),
      ('one', 'one on one core', None),
    ):
      over = [t / o for t, o in zip(measured[strategy], measured[way])]
      ratio = _common.median(over)
      rows.append(
        (strategy, label, f'{ratio:.3f}', f'{min(over):.3f}',
         f'>= {goal}' if goal else '',
         ('met' if ratio >= goal else 'missed') if goal else '')
      )  # fmt: skip
      ratios[f'{strategy}_over_{way}'] = ratio
  _common.show(
    f'{flags.model}, {flags.size} px: two cores, {flags.batch} images for each',
    rows,
    ratios,
    output,
  )
  output.close()


if __name__ == '__main__':
  xla_flags.use_huge_pages()
  main()
