"""Whether a restart in place frees an accelerator, and how soon its next step is done.

  python -m scripts.bench.once.restart [--case=resnet50_gpu]

A process trains, and a thread replaces its program while steps compute, as in an elastic
run that loses a process. The next program goes on from the copy of the state in memory;
`left` is what it finds in use of the device before it opens it, beyond what the first one
found. nvidia-smi says what all programs use; on a CPU nothing does.
"""

import argparse
import contextlib
import json
import os
import threading
import time

from anp_jax.cluster import generation
from anp_jax.system import xla_flags
from scripts.bench import _cases, _common

_BEFORE = 'ANP_BEFORE_RESTART'  # MB in use before the first program and in it, and its end


def _megabytes():
  """What is in use of all GPUs."""
  text = xla_flags.nvidia_smi('--query-gpu=memory.used', '--format=csv,noheader,nounits')
  return sum(map(int, text.split()))


def _restart(base):
  time.sleep(2)
  os.environ[_BEFORE] = json.dumps([base, _megabytes(), time.time()])
  generation.restart(generation.FIRST._replace(number=1))


def _opened(case):
  """The compiled step, its state, a batch, and what copies a state to memory."""
  import jax

  from anp_jax import cluster, experiment
  from anp_jax.checkpoint import host_mirror
  from anp_jax.system import compile_cache

  config = _cases.config(case)
  compile_cache.enable(config)
  opened = experiment.open(config, jax.devices()[:1])
  processes, layout = cluster.Processes(config), opened.program.checkpoint_layout
  processes.generation = generation.current()
  mirror = host_mirror.HostMirror(layout.abstract, processes, 1)
  restored = mirror.restore(lambda step: True)
  assert bool(restored) == bool(processes.generation.number)
  state = layout.unpack(restored[0]) if restored else opened.new_state()[0]
  with contextlib.closing(opened.batches()) as feed:
    batch = next(feed)
  step = opened.program.train_step.lower(state, batch).compile()
  return step, state, batch, lambda state: mirror.keep(1, layout.pack(state)) or mirror.wait()


def main():
  """Trains, restarts and makes one more step."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--case', default='resnet50_gpu', choices=_cases.CASES)
  case = parser.parse_args().case
  base = _megabytes()
  xla_flags.enable()
  import jax

  step, state, batch, keep = _opened(_cases.CASES[case])
  state, _ = jax.block_until_ready(step(state, batch))
  if _BEFORE not in os.environ:
    keep(state)
    threading.Thread(target=_restart, args=(base,), daemon=True).start()
    while True:
      state, _ = jax.block_until_ready(step(state, batch))
  first, loaded, end = json.loads(os.environ[_BEFORE])
  ratios = {'mb_loaded': loaded, 'mb_left': base - first, 'over_30_s': (time.time() - end) / 30}
  seconds = f'{30 * ratios["over_30_s"]:.1f}'
  rows = [('MB in use', 'MB left', 'seconds to the next step'), (loaded, base - first, seconds)]
  _common.show(f'{case}, restarted in place', rows, ratios)


if __name__ == '__main__':
  xla_flags.use_huge_pages()
  main()
