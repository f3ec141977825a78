"""Processes of one run, against those that know of no other and against one.

  python -m scripts.bench.scaling [--processes=2] [--model=resnet18]
    [--batch=256] [--size=64] [--strategies=sync,sync:measured,invariant]
    [--rounds=8] [--steps=1] [--shards=4] [--quotas=100,50]

Strong scaling: any number of processes divide a batch of 2 x --batch images
(the nearest number that they divide). Each has a core to itself, as long as
there are cores; more processes share them, which tells what they cost, and
nothing of as many cores. They compile the step that trains: for their own
device alone, which sends nothing, and by each strategy for all devices, where
gradients are summed at each step (gloo over loopback). In every round take
turns, for a few steps each:

  one       the first process with the batch of all; the others wait
  apart     each with its part by itself, at the same time
  STRATEGY  all in one step; with ':measured' they divide the batch by their speeds

--quotas gives each process so many percent of its core, by a cgroup, for which it
takes root. `sync:measured_over_apart` then is the share of the processes' own
speeds together that is reached, and `sync:measured_predicted` the predicted time of
its step over the measured one.

What connecting costs is `apart` against a strategy, of the same round; what
more cores give the same training, `one` against it: the speed-up that is
published as strong scaling. `lockstep` is computed from `apart`, as if each
step of all took as long as the slowest of them: what nobody who is synchronous
can beat on cores whose speed varies. With several numbers of processes
(--processes=1,2,4,8,12,16), one after another, a name in the JSON line begins
with the number: '4_sync_over_one'; quartiles of the rounds are '..._low' and
'..._high'.
"""

import argparse
import contextlib
import json
import math
import os
import re
import secrets
import subprocess
import sys
import tempfile

from anp_jax import cluster, config as config_lib
from anp_jax.cluster import secret
from anp_jax.config import strategy as strategy_lib
from anp_jax.system import compile_cache, stopwatch, xla_flags
from scripts.bench import _common, _contest, _quota

_PREDICTED = '_predicted'  # ending of the speed that a division by measured speeds predicts


def _flags():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--processes', type=_common.counts, default=(2,))
  parser.add_argument('--model', default='resnet18')
  parser.add_argument('--batch', type=int, default=256, help='half the batch of all processes')
  parser.add_argument('--size', type=int, default=64, help='image side in pixels')
  parser.add_argument('--strategies', default='sync')
  parser.add_argument('--rounds', type=int, default=8)
  parser.add_argument('--steps', type=int, default=1, help='steps per round')
  parser.add_argument('--shards', type=int, default=4, help='logical shards, or a few more')
  parser.add_argument('--quotas', type=_common.counts, default=(), help='percent of a core')
  # Given to the processes that this one starts.
  for name, kind in ('coordinator', str), ('results', str), ('process_id', int):
    parser.add_argument(f'--{name}', type=kind, help=argparse.SUPPRESS)
  flags = parser.parse_args()
  if flags.quotas and flags.processes != (len(flags.quotas),):
    parser.error('--quotas: expected one for each process, of one number of processes')
  for name in ('batch', 'rounds', 'steps', 'shards'):
    if getattr(flags, name) < 1:
      parser.error(f'--{name}={getattr(flags, name)}: expected 1 or more')
  try:
    for name in flags.strategies.split(','):
      config = _config(flags, 2, name)
      strategy = strategy_lib.find(config)
      if not strategy.joins_jax(config, 'train'):
        parser.error(f'--strategies={name}: expected one with a common step')
  except config_lib.ConfigError as e:
    parser.error(str(e))
  return flags


def batch_of(images: int, count: int, least: int = 4) -> tuple[int, int]:
  """The batch of all processes, and its logical shards.

  Args:
    images: that are asked for.
    count: number of processes.
    least: fewest shards.

  Returns:
    The images nearest to those that the shards divide; as few shards as `count`
    divides.
  """
  shards = count * -(-least // count)
  return shards * max(1, round(images / shards)), shards


def _config(flags, count, strategy='sync'):
  batch, shards = batch_of(2 * flags.batch, count, flags.shards)
  strategy, _, rows = strategy.partition(':')
  keys = _common.synthetic(flags.model, flags.size, batch) | {
    'model.norm_group': str(math.gcd(32, batch // shards)),
    'strategy.name': strategy,
    'strategy.logical_shards': str(shards),
    'strategy.threads': '1',  # a process has one core
    'strategy.rows': rows or 'equal',
    'cluster.stall_timeout': '0',
    'duration': '1000 steps',
  }
  return _common.load(keys)


def _stepper(config, devices, processes=None, measured=None):
  """A function that takes `count` steps of a new run.

  Args:
    config: the run's config.
    devices: devices of this process alone; None: all devices of all processes.
    processes: all of them, if they make the step together.
    measured: to which the predicted speed is added, in images a second.
  """
  from anp_jax import experiment
  from anp_jax.runtimes.calibration import row_speeds, workloads

  opened = experiment.open(config, devices, processes.hosts if processes else ('',))
  if config.strategy.get('rows') == 'measured':
    with tempfile.TemporaryDirectory() as folder:
      opened, lines = row_speeds.with_measured_rows(opened, folder, processes)
    print(*lines, sep='\n', file=sys.stderr)
    if seconds := re.search(r'predicted step time (\S+) ms', ' '.join(lines)):
      measured.append(1e3 * config.batch_size / float(seconds[1]))
  run = workloads.step(opened.program, opened.spec, opened.spec.array_rows)
  if processes:  # Gloo waits half a minute for the slowest, which share cores
    processes.gather('compiled')
  run(2)  # the first ones take longer
  return run


def _measure(flags):
  """One of the processes; gives each way's images a second by round."""
  xla_flags.enable()
  count, strategies = *flags.processes, flags.strategies.split(',')
  config = _config(flags, count)
  compile_cache.enable(config)
  place = cluster.detect(flags.coordinator, count, flags.process_id)
  ways = ['one', 'apart', *strategies]
  measured = {way: [] for way in (*ways, 'lockstep')}
  with cluster.start(config, place, {}) as processes:
    run = _steppers(flags, place, processes, measured)

    def timed(way, steps):
      return stopwatch.timed(lambda: run[way](steps)) if way in run else 0.0

    images = flags.steps * config.batch_size
    for i in range(flags.rounds):
      # Each way is first as often as another.
      first = i % len(ways)
      for way in ways[first:] + ways[:first]:
        processes.gather(None)
        if way == 'apart':
          local_times = [timed(way, 1) for _ in range(flags.steps)]
          times = processes.gather(local_times)
          measured[way].append(sum(images / count / sum(t) for t in times))
          measured['lockstep'].append(images / sum(map(max, zip(*times))))
        else:
          seconds = max(processes.gather(timed(way, flags.steps)))
          measured[way].append(images / seconds)
  return measured


def _steppers(flags, place, processes, measured):
  """What this process can run, by way; adds predicted speeds to those measured."""
  import jax

  config, local = _config(flags, place.count), jax.local_devices()
  run = {}
  for name in flags.strategies.split(','):
    predicted = []
    run[name] = _stepper(_config(flags, place.count, name), None, processes, predicted)
    if predicted:
      measured[f'{name}{_PREDICTED}'] = predicted * flags.rounds
  share = {'batch_size': config.batch_size // place.count}
  run['apart'] = _stepper(config_lib.replaced(config, share), local)
  if place.index == 0:
    run['one'] = _stepper(config, local)
  return run


def _start(flags, count):
  """Runs so many processes, a core each if there are enough.

  Returns:
    What `_measure` gave the first.
  """
  coordinator = f'127.0.0.1:{_common.free_port()}'
  environment = {**os.environ, secret.VARIABLE: secrets.token_hex(32)}
  cores = sorted(os.sched_getaffinity(0))
  with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as groups:
    limits = [groups.enter_context(_quota.limited(quota)) for quota in flags.quotas]
    path = os.path.join(folder, 'results.json')
    more = [f'--coordinator={coordinator}', f'--processes={count}', f'--results={path}']
    command = [sys.executable, '-m', 'scripts.bench.scaling', *sys.argv[1:], *more]

    def start(rank):
      core, limit = str(cores[rank % len(cores)]), limits[rank] if limits else ()
      pinned = [*limit, 'taskset', '-c', core, *command, f'--process_id={rank}']
      return subprocess.Popen(pinned, cwd=_common.ROOT, env=environment)

    ranks = [start(rank) for rank in range(count)]
    if any([rank.wait() for rank in ranks]):
      raise SystemExit('error: a process failed, see above')
    with open(path) as f:
      return json.load(f)


def compare(measured: dict[str, list[float]]) -> dict[str, _contest.Over]:
  """Each strategy's speed over each other way's, and that of `apart`.

  Args:
    measured: images a second by round, by way.

  Returns:
    'sync_over_one' and the like to the ratios of the rounds.
  """
  ways = ('one', 'apart', 'lockstep')
  seconds = {w: [1 / rate for rate in rates] for w, rates in measured.items()}
  ratios = {
    f'{name}_over_{way}': _contest.over(seconds[name], seconds[way])
    for name in measured
    if name not in ('one', 'lockstep') and not name.endswith(_PREDICTED)
    for way in (ways if name != 'apart' else ways[:1])
    if way in measured
  }
  predicted = [name for name in measured if name.endswith(_PREDICTED)]
  return ratios | {
    name: _contest.over(seconds[name.removesuffix(_PREDICTED)], seconds[name]) for name in predicted
  }


def show(flags, results):
  """Prints the table and the line of JSON, from what was measured by count."""
  cores = len(os.sched_getaffinity(0))
  rows = [('processes', 'cores', 'images', 'ratio', *_contest.HEADING)]
  ratios = {}
  for count, measured in results.items():
    prefix = f'{count}_' if len(results) > 1 else ''
    shared = min(count, cores)
    sharing = f'{shared}, shared' if shared < count else str(shared)
    for name, over in compare(measured).items():
      # The goal of strategies whose processes have a core each.
      has_goal = name.endswith('_over_apart') and 1 < count == shared
      label, *cells = _contest.row(name, over, 0.95 if has_goal else 0)
      images, _ = batch_of(2 * flags.batch, count)
      rows.append((count, sharing, images, label, *cells))
      ratios[prefix + name] = over.median
      for suffix, value in zip(('low', 'high'), over.quartiles):
        ratios[f'{prefix}{name}_{suffix}'] = value
  _common.show(f'{flags.model}, {flags.size} px', rows, ratios)


def main():
  """Starts the processes and compares what they say, or is one of them."""
  flags = _flags()
  if flags.coordinator is None:
    show(flags, {n: _start(flags, n) for n in flags.processes})
    return
  measured = _measure(flags)
  if flags.process_id == 0:
    with open(flags.results, 'w') as f:
      json.dump(measured, f)


if __name__ == '__main__':
  xla_flags.use_huge_pages()
  main()
