"""Images a second of the demo, against the same run fed from memory.

  python scripts/bench/demo_input.py

Both run the demo's compiled step in turn, the one on JPEG files through the
whole pipeline, the other on batches that were decoded before.
"""

import itertools
import time

import _common
import jax

from anp_jax.config import command_line
from anp_jax.data import sources
from anp_jax.data.input import batch_plan, feed as feed_lib, stream as stream_lib
from anp_jax.parallel import mesh as mesh_lib, state as state_lib
from anp_jax.training import build, objective as objective_lib, run_spec

_STEPS = 40
_ROUNDS = 7


def main():
  """Times the demo on files and on memory, in turn."""
  config = command_line.load('configs/resnet_anp.py:demo', {})
  mesh = mesh_lib.create(config)
  source = sources.open_source(config, training=True)
  size = config.batch_size
  objective = objective_lib.create(source.vocabulary, config)
  program = build.create(run_spec.RunSpec(config, mesh, objective, size, len(source)))
  state = state_lib.create(program.init_fn, program.abstract_state)
  step = program.train_step
  sharding = mesh_lib.batch_sharding(mesh)
  files = stream_lib.Stream(config, sharding).train(source, size, 0)
  decoded = [jax.device_get(next(files)) for _ in range(_STEPS)]
  for batch in decoded:
    batch.pop('vote')
  rows = feed_lib.local_rows(sharding, size)
  plan = batch_plan.BatchPlan(config, len(source), size, rows, training=True)
  memory = feed_lib.Feed(
    feed_lib.on_device(itertools.cycle(decoded), plan, sharding), config.data.prefetch
  )

  def rate(feed, state):
    start = time.perf_counter()
    for _ in range(_STEPS):
      state, values = step(state, next(feed))
    jax.block_until_ready(values)
    return _STEPS * size / (time.perf_counter() - start), state

  _, state = rate(memory, state)
  rates = {'from files': [], 'from memory': []}
  for _ in range(_ROUNDS):
    for name, feed in (('from files', files), ('from memory', memory)):
      value, state = rate(feed, state)
      rates[name].append(value)
  files.close()
  memory.close()
  ratios = [a / b for a, b in zip(*rates.values())]
  table = [('input', 'median images/s', 'ratio')]
  table += [
    (
      name,
      f'{_common.median(r):.0f}',
      f'{_common.median(ratios):.3f}' if name == 'from files' else '1',
    )
    for name, r in rates.items()
  ]
  _common.show(
    'demo: ResNet-18, 48 px',
    table,
    {'files_over_memory': _common.median(ratios), 'files_over_memory_min': min(ratios)},
  )


if __name__ == '__main__':
  main()
