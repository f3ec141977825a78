"""What one slow worker of four costs each mode of the strategy `server`.

  python scripts/bench/stragglers.py

Four workers and a server, threads of one process, over real sockets. Computing
is emulated by a sleep, since four workers would fight for the cores: 0.2 s a
gradient, and 0.6 s on the slow one. Each worker has equally many images at a
time in all modes; synchronous without backup workers is what `sync` does: all
wait for the slowest. An update's gradient is real, and always the same one.
"""

import os
import tempfile
import threading
import time

import _common

_COMPUTE, _SLOWER, _WORKERS, _IMAGES = 0.2, 3, 4, 8
_KEYS = {
  'strategy.name': 'server',
  'model.name': 'lenet',
  'data.image_size': '28',
  'schedule.warmup': '0 steps',
  'log.tensorboard': 'False',
  'log.every': '1 steps',
  'eval.every': '100000 steps',
  'checkpoint.every': '100000 steps',
}
_MODES = {
  'synchronous (as sync)': ({'strategy.mode': 'synchronous'}, 4, 24),
  'synchronous, 1 backup': (
    {'strategy.mode': 'synchronous', 'strategy.backup_workers': '1'}, 3, 48,
  ),
  'bounded, 8': (
    {'strategy.mode': 'bounded', 'strategy.max_staleness': '8'}, 1, 160,
  ),
  'async': ({'strategy.mode': 'async'}, 1, 160),
}  # fmt: skip


def main():
  """Prints the table."""
  os.environ.setdefault('JAX_PLATFORMS', 'cpu')
  rows = [('mode', 'images/s', 'of the first', 'staleness, mean', 'most')]
  rates = {}
  for name, (keys, shards, updates) in _MODES.items():
    with tempfile.TemporaryDirectory() as folder:
      rate, stale = _run(keys, shards, updates, folder)
    rates[name] = rate
    first = rates['synchronous (as sync)']
    mean = sum(s * n for s, n in stale.items()) / stale.total()
    rows.append((
      name, f'{rate:.0f}', f'{rate / first:.2f}', f'{mean:.1f}',
      str(max(stale)),
    ))  # fmt: skip
  first = rates['synchronous (as sync)']
  _common.show(
    f'{_WORKERS} workers, one {_SLOWER} times slower',
    rows,
    {
      'async_over_synchronous': rates['async'] / first,
      'bounded_over_synchronous': rates['bounded, 8'] / first,
      'backup_over_synchronous': rates['synchronous, 1 backup'] / first,
    },
  )


def _run(keys, shards, updates, workdir):
  """Images a second, without the first third, and the staleness."""
  from anp_jax import cluster
  from anp_jax import command_line
  from anp_jax import telemetry
  from anp_jax.cluster import places
  from anp_jax.strategies.server import log
  from anp_jax.strategies.server import run
  from anp_jax.strategies.server import worker

  made = {}

  def compute(self, weights, stats, step, batch):
    """The first gradient is computed; all others are slept for."""
    if self.name not in made:
      made[self.name] = self._program(weights, stats, step, batch)
    slow = self.name.startswith(f'{_WORKERS - 1}.')
    time.sleep(_COMPUTE * (_SLOWER if slow else 1))
    self.done += 1
    gradient, term, values = made[self.name]
    return gradient, term, dict(values)

  worker.Worker.compute = compute
  root = os.path.join(os.path.dirname(__file__), '..', '..')
  keys = {
    **_KEYS, **keys, 'duration': f'{updates} steps',
    'batch_size': str(_IMAGES * shards),
    'strategy.lanes': '1',
  }  # fmt: skip

  def one(index):
    config = command_line.load(
      os.path.join(root, 'configs', 'resnet_anp.py:tiny'), keys
    )
    place = places.Place('bench', index, _WORKERS, hosts=1)
    with cluster.Processes(config, place) as processes:
      run.run(config, workdir, processes)

  others = [
    threading.Thread(target=one, args=(i,), daemon=True)
    for i in range(1, _WORKERS)
  ]
  for thread in others:
    thread.start()
  one(0)
  for thread in others:
    thread.join(20)
  lines = [r for r in telemetry.read(workdir) if r['kind'] == 'train']
  kept = [r for r in lines if r['step'] > updates // 3]
  seconds = sum(r['seconds'] for r in kept)
  rate = len(kept) * _IMAGES * shards / seconds
  return rate, log.staleness(log.read(workdir))


if __name__ == '__main__':
  main()
