"""What one slow worker of four costs `sync`, and each mode of `parameter_server`.

  python scripts/bench/stragglers.py

`sync`: four processes of one run, whose gradients are summed over gloo.
`parameter_server`: four workers and a server, threads of one process, over real sockets.
Computing is emulated by a sleep, since four workers would fight for the cores:
0.2 s a gradient, and 0.6 s on the slow one. Each worker has equally many images
at a time in all modes. In `parameter_server` an update's gradient is real, and always the
same one; in `sync` each is computed too, which takes milliseconds.
"""

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time

import _common

_COMPUTE, _SLOWER, _WORKERS, _IMAGES = 0.2, 3, 4, 8
_ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), '..', '..'))
_SYNC = 'sync'
_SYNC_STEPS = 24
_KEYS = {
  'model.name': 'lenet',
  'optimizer.learning_rate': '0.001',
  'data.image_size': '28',
  'schedule.warmup': '0 steps',
  'log.tensorboard': 'False',
  'log.every': '1 steps',
  'eval.every': '100000 steps',
  'checkpoint.every': '100000 steps',
}
_MODES = {
  'synchronous': ({'strategy.mode': 'synchronous'}, 4, 24),
  'synchronous, 1 backup': (
    {'strategy.mode': 'synchronous', 'strategy.backup_workers': '1'},
    3,
    48,
  ),
  'bounded, 8': ({'strategy.mode': 'bounded', 'strategy.max_staleness': '8'}, 1, 160),
  'async': ({'strategy.mode': 'async'}, 1, 160),
}


def main():
  """Prints the table."""
  os.environ.setdefault('JAX_PLATFORMS', 'cpu')
  flags = _flags()
  if flags.workdir:
    _train_in_step(flags)
    return
  with tempfile.TemporaryDirectory() as folder:
    rates = {_SYNC: _in_step(folder)}
  rows = [
    ('mode', 'images/s', 'of the first', 'staleness, mean', 'most'),
    (_SYNC, f'{rates[_SYNC]:.0f}', '1.00', '0.0', '0'),
  ]
  for name, (keys, shards, updates) in _MODES.items():
    with tempfile.TemporaryDirectory() as folder:
      rate, stale = _run(keys, shards, updates, folder)
    rates[name] = rate
    first = rates[_SYNC]
    mean = sum(s * n for s, n in stale.items()) / stale.total()
    rows.append((name, f'{rate:.0f}', f'{rate / first:.2f}', f'{mean:.1f}', str(max(stale))))
  first = rates[_SYNC]
  _common.show(
    f'{_WORKERS} workers, one {_SLOWER} times slower',
    rows,
    {
      'async_over_sync': rates['async'] / first,
      'bounded_over_sync': rates['bounded, 8'] / first,
      'backup_over_sync': rates['synchronous, 1 backup'] / first,
      'synchronous_over_sync': rates['synchronous'] / first,
    },
  )


def _flags():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  # Given to the processes of `sync`.
  for name in ('--workdir', '--coordinator'):
    parser.add_argument(name, help=argparse.SUPPRESS)
  parser.add_argument('--process_id', type=int, help=argparse.SUPPRESS)
  return parser.parse_args()


def _in_step(folder):
  """Images a second of four processes with `sync`."""
  with socket.socket() as s:
    s.bind(('127.0.0.1', 0))
    port = s.getsockname()[1]
  processes = [
    subprocess.Popen(
      [
        sys.executable,
        __file__,
        f'--workdir={folder}',
        f'--process_id={i}',
        f'--coordinator=127.0.0.1:{port}',
      ],
      cwd=_ROOT,
      stdout=subprocess.DEVNULL,
    )
    for i in range(_WORKERS)
  ]
  if any([p.wait() for p in processes]):
    sys.exit(1)
  return _rate(folder, _SYNC_STEPS, _IMAGES * _WORKERS)


def _train_in_step(flags):
  """One of these processes."""
  from anp_jax import cluster, train
  from anp_jax.training import train_step as step_lib

  seconds = _COMPUTE * (_SLOWER if flags.process_id == _WORKERS - 1 else 1)
  jitted = step_lib.TrainStep.jitted
  step_lib.TrainStep.jitted = lambda step: _Slowed(jitted(step), seconds)
  config = _config({'strategy.name': 'sync'}, _SYNC_STEPS, _WORKERS)
  place = cluster.detect(flags.coordinator, _WORKERS, flags.process_id)
  with cluster.start(config, place, workdir=flags.workdir) as processes:
    train.run(config, flags.workdir, processes=processes)


class _Slowed:
  """A step that sleeps before it computes."""

  def __init__(self, step, seconds):
    self._step, self._seconds = step, seconds

  def lower(self, *arguments):
    return _Slowed(self._step.lower(*arguments), self._seconds)

  def compile(self):
    return _Slowed(self._step.compile(), self._seconds)

  def __call__(self, *arguments):
    time.sleep(self._seconds)
    return self._step(*arguments)


def _config(keys, updates, shards):
  from anp_jax.config import command_line

  return command_line.load(
    os.path.join(_ROOT, 'configs', 'resnet_anp.py:tiny'),
    {**_KEYS, **keys, 'duration': f'{updates} steps', 'batch_size': str(_IMAGES * shards)},
  )


def _rate(workdir, updates, images):
  """Images a second, without the first third."""
  from anp_jax.reporting import telemetry

  lines = [r for r in telemetry.read(workdir) if r['kind'] == 'train']
  late = [r for r in lines if r['step'] > updates // 3]
  return len(late) * images / sum(r['seconds'] for r in late)


def _run(keys, shards, updates, workdir):
  """Images a second, without the first third, and the staleness."""
  from anp_jax import cluster
  from anp_jax.cluster import cluster_env
  from anp_jax.runtimes.parameter_server import gradient_worker, log, parameter_server_run

  results = {}

  def compute(self, pull, step, batch):
    """The first gradient is computed; all others are slept for."""
    pulled = pull()
    if pulled is None:
      return None
    if self.name not in results:
      results[self.name] = self._program(*pulled[1:], step, batch)
    slow = self.name.startswith(f'{_WORKERS - 1}.')
    time.sleep(_COMPUTE * (_SLOWER if slow else 1))
    self.progress += 1
    gradient, stats_delta, values = results[self.name]
    return pulled, (gradient, stats_delta, dict(values))

  gradient_worker.Worker.compute = compute
  keys = {**keys, 'strategy.name': 'parameter_server', 'strategy.in_flight': '1'}

  def run_process(index):
    config = _config(keys, updates, shards)
    env = cluster_env.ClusterEnv('bench', index, _WORKERS, num_hosts=1)
    with cluster.Processes(config, env) as processes:
      parameter_server_run.run(config, workdir, processes)

  threads = [
    threading.Thread(target=run_process, args=(i,), daemon=True) for i in range(1, _WORKERS)
  ]
  for thread in threads:
    thread.start()
  run_process(0)
  for thread in threads:
    thread.join(20)
  rate = _rate(workdir, updates, _IMAGES * shards)
  return rate, log.staleness(log.read(workdir))


if __name__ == '__main__':
  main()
