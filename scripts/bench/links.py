"""What a step sends over the network with each strategy, and how long it takes.

  srun --ntasks-per-node=1 python -m scripts.bench.links
    [--rate=100mbit] [--strategies=sync,local_sgd] [--period=16]
    [--model=resnet18] [--batch=32] [--size=32] [--steps=5]

or with --coordinator, --num_processes and --process_id as main.py takes them.
All processes need the same ANP_RUN_SECRET (openssl rand -hex 32). The steps are
those that train; `local_sgd` has a group for each process, and is timed over whole
periods. Of the bytes that a process sends in a step:

  bound      2 (N - 1) / N x the parameters' bytes: no sum over N processes that
             leaves all of it with each sends less (a ring reaches it)
  program    what the compiled program sends, in rings: batch statistics
             and metrics travel with the gradients
  interface  what this host's interfaces counted, headers and all

The bytes of one device a process and one process a host are meant. --rate is of
the link, in tc's words (1gbit, 100mbit); with it, the step's time over that which the
bound takes there is printed, too.
"""

import argparse
import contextlib
import math
import time

from anp_jax import cluster
from anp_jax.config import emulation_keys
from anp_jax.tools.portability import compiled_collectives
from scripts.bench import _common


def _flags():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  rate = emulation_keys.bytes_per_second
  parser.add_argument('--rate', type=rate, help='link bandwidth, such as 100mbit')
  parser.add_argument('--strategies', default='sync')
  parser.add_argument('--period', type=int, default=16, help='steps between exchanges of local_sgd')
  parser.add_argument('--model', default='resnet18')
  parser.add_argument('--batch', type=int, default=32, help='batch size per process')
  parser.add_argument('--size', type=int, default=32, help='image side in pixels')
  parser.add_argument('--steps', type=int, default=5)
  parser.add_argument('--coordinator')
  parser.add_argument('--num_processes', type=int)
  parser.add_argument('--process_id', type=int)
  return parser.parse_args()


def sent(text: str) -> int:
  """Bytes that the interfaces but loopback sent, from /proc/net/dev's text."""
  interfaces = (line.split(':') for line in text.splitlines()[2:])
  return sum(int(counts.split()[8]) for name, counts in interfaces if name.strip() != 'lo')


def _interfaces():
  with open('/proc/net/dev') as f:
    return sent(f.read())


def _load(flags, strategy, processes):
  # As many as invariant needs, with whole groups of images in each.
  shards = max(2, processes)
  batch = flags.batch * processes
  images = batch // shards
  keys = _common.synthetic(flags.model, flags.size, batch) | {
    'cluster.stall_timeout': '0',
    'duration': '1000 steps',
    'model.norm_group': str(math.gcd(32, images)),
    'strategy.logical_shards': str(shards),
    'strategy.name': strategy,
    'strategy.groups': str(processes),
    'strategy.period': str(flags.period),
  }
  return _common.load(keys)


def _measure(flags, strategy, processes, count):
  """MB of a process and step, and seconds of a step.

  Returns:
    `bound`, `program`, `interface` (of the process that sent most), `seconds`.
  """
  # Heavy, and only once the processes have met.
  import jax

  from anp_jax import experiment

  opened = experiment.open(_load(flags, strategy, count), hosts=processes.hosts)
  program = opened.program
  state, _ = opened.new_state(gather=processes.gather)
  with contextlib.closing(opened.batches()) as feed:
    batch = next(feed)
  compiled = program.train_step.lower(state, batch).compile()
  rows = compiled_collectives.totals(compiled_collectives.compiled(compiled.as_text()))
  period = flags.period if strategy == 'local_sgd' else 1
  groups = count if strategy == 'local_sgd' else 1
  sent_bytes = compiled_collectives.sent(rows, count, groups, 1 / period) / count
  steps = period * math.ceil(flags.steps / period)
  # The first takes longer, and the count of steps begins a period.
  for _ in range(max(period, 2)):
    state, values = compiled(state, batch)
    jax.block_until_ready(values)
  processes.gather(None)
  before, start = _interfaces(), time.perf_counter()
  for step in range(steps):
    processes.heartbeat('step', step)
    state, values = compiled(state, batch)
    jax.block_until_ready(values)
  seconds = time.perf_counter() - start
  moved = processes.gather(_interfaces() - before)
  params = sum(s.size * s.dtype.itemsize for s in jax.tree.leaves(program.abstract_state.params))
  return {
    'bound': 2 * (count - 1) / count * (params // groups) / 1e6,
    'program': sent_bytes,
    'interface': max(moved) / steps / 1e6,
    'seconds': max(processes.gather(seconds)) / steps,
  }


def main():
  """Measures, and shows it on process 0."""
  flags = _flags()
  place = cluster.detect(flags.coordinator, flags.num_processes, flags.process_id)
  if place.count < 2:
    print('skipped: it measures a network, between processes; see --help')
    return
  output = _common.unmarked()
  names = flags.strategies.split(',')
  config = _load(flags, names[0], place.count)
  with cluster.start(config, place, {}) as processes:
    results = {name: _measure(flags, name, processes, place.count) for name in names}
  if place.index:
    return
  rows = [
    ('a process and step', 'MB, program', 'MB, interface', 'over the bound', 'images/s', 'seconds')
  ]
  ratios, images = {}, flags.batch * place.count
  bound = results[names[0]]['bound']
  for name, result in results.items():
    over = result['interface'] / bound
    rate = images / result['seconds']
    cells = result['program'], result['interface'], over, rate, result['seconds']
    rows.append((name, *(f'{cell:.3f}' for cell in cells)))
    prefix = '' if name == 'sync' else f'{name}_'
    ratios[f'{prefix}program_over_bound'] = result['program'] / bound
    ratios[f'{prefix}interface_over_bound'] = over
    if name != 'sync' and 'sync' in results:
      ratios[f'{name}_rate_over_sync'] = results['sync']['seconds'] / result['seconds']
    if flags.rate:
      ratios[f'{prefix}step_over_bound'] = result['seconds'] * flags.rate / bound / 1e6
  title = f'{flags.model}, {place.count} processes; the bound: {bound:.1f} MB'
  _common.show(title, rows, ratios, output)
  output.close()


if __name__ == '__main__':
  main()
