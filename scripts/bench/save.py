"""How long a save keeps the loop from going on.

  python scripts/bench/save.py

The states of ResNet-50 with momentum (about 200 MB), and with averaged weights
too (about 300 MB), are saved as the loop does it, and as a loop would that
waited for the disk.
"""

import tempfile
import time

import _common
import jax

from anp_jax import models
from anp_jax.checkpoint import manager
from anp_jax.config import command_line
from anp_jax.parallel import mesh as mesh_lib, state as state_lib
from anp_jax.training import optimizer as optimizer_lib

_SAVES = 7


def _times(ema):
  """Megabytes, and seconds that saves block and take, the first left out."""
  config = command_line.load('configs/resnet_anp.py', {'ema': ema, 'checkpoint.keep': '1'})
  mesh = mesh_lib.create(config)
  model = models.create(config, 1000, mesh_lib.platform(mesh))
  optimizer = optimizer_lib.create(config, 64, 9600, 10000)
  init = state_lib.Init(model, optimizer, config)
  abstract_state = state_lib.abstract(init, config, mesh)
  state = jax.block_until_ready(state_lib.create(init, abstract_state))
  size = sum(x.nbytes for x in jax.tree.leaves(state)) / 1e6
  blocked, complete = [], []
  with tempfile.TemporaryDirectory() as folder:
    saves = manager.Checkpoints(folder, config, {}, abstract_state)
    for i in range(_SAVES + 1):
      start = time.perf_counter()
      saves.save(i, state)
      returned = time.perf_counter()
      saves.wait()
      if i:  # the first one compiles the checksums
        blocked.append(returned - start)
        complete.append(time.perf_counter() - start)
    saves.close()
  return size, blocked, complete


def main():
  """Times saves as the loop makes them."""
  rows = [('state', 'blocked: median ms', 'max ms', 'whole save: median ms')]
  ratios = {}
  for name, ema in (('momentum', '0'), ('momentum, averages', '0.999')):
    size, blocked, complete = _times(ema)
    median = _common.median(blocked)
    rows.append(
      (
        f'{name}, {size:.0f} MB',
        f'{1e3 * median:.0f}',
        f'{1e3 * max(blocked):.0f}',
        f'{1e3 * _common.median(complete):.0f}',
      )
    )
    key = f'{size:.0f}_mb'
    ratios[f'{key}_blocked_over_whole'] = median / _common.median(complete)
    ratios[f'{key}_blocked_over_100_ms'] = median / 0.1
  _common.show('how long a save keeps the loop', rows, ratios)


if __name__ == '__main__':
  main()
