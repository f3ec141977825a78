"""What a synchronous step sends over the network, and how long that takes.

  srun --ntasks-per-node=1 python -m scripts.bench.links
    [--rate=1gbit] [--model=resnet18] [--batch=32] [--size=32] [--steps=5]

or with --coordinator, --num_processes and --process_id as main.py takes them.
The step is the one that trains. Of the bytes that a process sends in a step:

  bound      2 (N - 1) / N x the parameters' bytes: no sum over N processes that
             leaves all of it with each sends less (a ring reaches it)
  program    the same of all that the compiled program sums: batch statistics
             and metrics travel with the gradients
  interface  what this host's interfaces counted, headers and all

The bytes of one device a process and one process a host are meant. --rate is of
the link, in tc's words (1gbit, 100mbit); with it, the time that the bound takes
there stands beside the step's.
"""

import argparse
import re
import time

# With -m the repository's root is on the path, as a file this folder is.
if __package__:
  from scripts.bench import _common
else:
  import _common

from scripts.portability import collectives

_UNITS = {'kbit': 1e3, 'mbit': 1e6, 'gbit': 1e9}


def _flags():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--rate', type=_bits, help='of the link, as 100mbit')
  parser.add_argument('--model', default='resnet18')
  parser.add_argument('--batch', type=int, default=32, help='a process')
  parser.add_argument('--size', type=int, default=32, help='pixels')
  parser.add_argument('--steps', type=int, default=5)
  parser.add_argument('--coordinator')
  parser.add_argument('--num_processes', type=int)
  parser.add_argument('--process_id', type=int)
  return parser.parse_args()


def _bits(text):
  match = re.fullmatch(r'([\d.]+)(kbit|mbit|gbit)', text)
  if not match:
    raise argparse.ArgumentTypeError(f'{text!r}: expected such as 100mbit')
  return float(match[1]) * _UNITS[match[2]]


def sent(text: str) -> int:
  """Bytes that the interfaces but loopback sent, from /proc/net/dev's text."""
  total = 0
  for line in text.splitlines()[2:]:
    name, _, counts = line.partition(':')
    if name.strip() != 'lo':
      total += int(counts.split()[8])
  return total


def _interfaces():
  with open('/proc/net/dev') as f:
    return sent(f.read())


def _ring(size, count):
  return 2 * (count - 1) / count * size


def _measure(flags, config, processes):
  """Rank 0's: parameters' bytes, summed bytes, seconds and bytes a step."""
  # Heavy, and only once the processes have met.
  import jax

  from anp_jax import assembly
  from anp_jax import mesh as mesh_lib
  from anp_jax import objective as objective_lib
  from anp_jax import state as state_lib
  from anp_jax.data import sources
  from anp_jax.data import stream as stream_lib

  mesh = mesh_lib.create(config, hosts=processes.hosts)
  source = sources.open_source(config, training=True)
  parts = assembly.create(
    config,
    mesh,
    objective_lib.create(source.vocabulary, config.label_smoothing),
    config.batch_size,
    len(source),
  )
  state = state_lib.create(parts.init, parts.like)
  sharding = mesh_lib.batch_sharding(mesh)
  feed = stream_lib.Stream(config, sharding, processes.vote).train(
    source, config.batch_size, 0
  )
  batch = next(feed)
  feed.close()
  compiled = parts.train_step.lower(state, batch).compile()
  summed = collectives.totals(collectives.compiled(compiled.as_text()))
  for _ in range(2):
    state, values = compiled(state, batch)
    jax.block_until_ready(values)
  processes.gather(None)
  before, start = _interfaces(), time.perf_counter()
  for step in range(flags.steps):
    processes.beat('step', step)
    state, values = compiled(state, batch)
    jax.block_until_ready(values)
  seconds = time.perf_counter() - start
  moved = processes.gather(_interfaces() - before)
  params = sum(
    s.size * s.dtype.itemsize for s in jax.tree.leaves(parts.like.params)
  )
  total = sum(row['bytes'] for row in summed)
  return params, total, seconds / flags.steps, max(moved) / flags.steps


def main():
  """Measures, and shows it on process 0."""
  from anp_jax import cluster
  from anp_jax import command_line

  flags = _flags()
  place = cluster.find(flags.coordinator, flags.num_processes, flags.process_id)
  if place.count < 2:
    print('skipped: it measures a network, between processes; see --help')
    return
  config = command_line.load(
    'configs/resnet_anp.py',
    {
      'batch_size': str(flags.batch * place.count),
      'cluster.stall_timeout': '0',
      'data.image_size': str(flags.size),
      'data.resize': str(flags.size),
      'data.source': 'synthetic',
      'duration': '1000 steps',
      'model.name': flags.model,
      'schedule.warmup': '0 steps',
    },
  )
  output = _common.unmarked()
  with cluster.start(config, place, {}) as processes:
    params, total, seconds, moved = _measure(flags, config, processes)
  if place.index:
    return
  bound = _ring(params, place.count)
  ratios = {
    'program_over_bound': _ring(total, place.count) / bound,
    'interface_over_bound': moved / bound,
  }
  rows = [
    ('a process and step', 'MB sent', 'over the bound'),
    ('bound', f'{bound / 1e6:.1f}', ''),
    ('program', f'{_ring(total, place.count) / 1e6:.1f}',
     f'{ratios["program_over_bound"]:.4f}'),
    ('interface', f'{moved / 1e6:.1f}',
     f'{ratios["interface_over_bound"]:.4f}'),
  ]  # fmt: skip
  title = f'{flags.model}, {place.count} processes, {seconds:.3f} s a step'
  if flags.rate:
    needed = bound * 8 / flags.rate
    ratios['step_over_bound'] = seconds / needed
    title += f', the bound alone {needed:.3f} s'
  _common.show(title, rows, ratios, output)
  output.close()


if __name__ == '__main__':
  main()
