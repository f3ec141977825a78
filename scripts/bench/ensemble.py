"""Trainings an hour of an ensemble, over the same trainings one after another.

  python -m scripts.bench.ensemble [--config=FILE[:VARIANT]] [--members=8] [--steps=300]
    [--rounds=3] [--profile=DIR] [--config.KEY=VALUE ...]

trains on noise of the recipe's size. `trainings an hour` counts whole commands, starts
included; a single one is timed once a round. `images/s` is what their metrics.jsonl
say of the steps alone, the median, summed over members; below it they are over one run whose
batch has the images of all members, which fills the device (goal 0.8). A step of simulated workers,
eight of them, is timed against one of `sync` in one process, in turns of ten.
--profile=DIR times nothing: it records a trace of the members' steps there, and prints
their top operations.
"""

import argparse
import contextlib
import os
import statistics
import tempfile

import numpy as np

from anp_jax.config import command_line
from anp_jax.reporting import telemetry
from anp_jax.system import stopwatch
from scripts.bench import _common, _step_worker

_EXAMPLES, _CLASSES = 4096, 10
_TURN = 10  # steps
_KEYS = {
  'data.source': 'arrays',
  'data.augment': 'none',
  'eval.every': '1000000 steps',
  'eval.examples': 'False',
  'log.tensorboard': 'False',
  'schedule.warmup': '0 steps',
}


def _write_noise(path, side):
  """Writes images of a size."""
  random, arrays = np.random.default_rng(0), {}
  for split in ('train', 'validation', 'test'):
    arrays[f'{split}_images'] = random.integers(0, 256, (_EXAMPLES, side, side, 3), np.uint8)
    arrays[f'{split}_labels'] = np.arange(_EXAMPLES) % _CLASSES
  np.savez(path, **arrays)


def _simulated_steps(config, typed, rounds):
  """Pairs of milliseconds of a step of `sync` and of simulated workers, by look-ahead."""
  from anp_jax import experiment
  from anp_jax.config import strategy as strategy_lib
  from anp_jax.data.input import stream
  from anp_jax.parallel import mesh as mesh_lib
  from anp_jax.runtimes.calibration import workloads

  def contestant(folder, **strategy):
    # At a larger rate stale gradients diverge.
    overrides = typed | {'optimizer.learning_rate': '0.001'}
    overrides |= {f'strategy.{key}': value for key, value in strategy.items()}
    opened = experiment.open(command_line.load(config, overrides))
    simulation = strategy_lib.find(opened.config).simulation(opened.spec, folder, 0)
    batches = stream.Stream(opened.config, mesh_lib.batch_sharding(opened.mesh))
    feed = batches.train(opened.source, opened.spec.batch_size, 0, simulation)
    feeds.enter_context(contextlib.closing(feed))
    run = workloads.step(opened.program, opened.spec, opened.spec.array_rows, feed)
    return lambda: 1e3 * stopwatch.timed(lambda: run(_TURN)) / _TURN

  with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as feeds:
    workers = {'name': 'parameter_server', 'simulate.workers': '8'}
    sync = contestant(folder, name='sync')
    turns = {}
    for look_ahead in ('none', 'dana'):
      turns[look_ahead] = contestant(tempfile.mkdtemp(dir=folder), **workers, look_ahead=look_ahead)
    times = [{name: (sync(), turn()) for name, turn in turns.items()} for _ in range(1 + rounds)]
  return {f'async, look_ahead={name}: ms a step': [t[name] for t in times] for name in turns}


def _show_profile(config, typed, members, folder):
  """Traces the training of members in this process."""
  # A profile cannot name the kernels of a CUDA graph.
  os.environ['XLA_FLAGS'] = os.environ.get('XLA_FLAGS', '') + ' --xla_gpu_enable_command_buffer='
  import jax

  from anp_jax import cluster
  from anp_jax.ensemble import ensemble_run

  seeds = [typed | {'seed': str(seed)} for seed in range(members)]
  with tempfile.TemporaryDirectory() as top:
    runs = {f'{top}/{s["seed"]}': command_line.load(config, s) for s in seeds}
    with cluster.Processes(command_line.load(config, typed)) as processes:
      train = ensemble_run.Ensemble(runs, processes, jax.local_devices()).train
      for operation, share in _step_worker.profile(train, folder):
        print(f'  {100 * share:5.1f}%  {operation}')


def _rate(workdir):
  """The median images/s of a run."""
  rates = [line['images_per_second'] for line in telemetry.of_kind(workdir, 'train')]
  return statistics.median(rates[1:] or rates)


def main():
  """Times both, in turn."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
  parser.add_argument('--config', default='configs/lenet.py', help='FILE[:VARIANT]')
  parser.add_argument('--members', type=int, default=8)
  parser.add_argument('--steps', type=int, default=300)
  parser.add_argument('--rounds', type=int, default=3)
  parser.add_argument('--profile', default='', metavar='DIR')
  flags, keys = parser.parse_known_args()
  overrides, _ = command_line.split_overrides(keys)
  config = command_line.load(flags.config, overrides)
  hours, rates, filling = [], [], []
  with tempfile.TemporaryDirectory() as folder:
    _write_noise(f'{folder}/noise.npz', config.data.image_size)
    lengths = {'duration': f'{flags.steps} steps', 'log.every': f'{flags.steps // 3} steps'}
    typed = _KEYS | lengths | overrides | {'data.path': f'{folder}/noise.npz'}
    if flags.profile:
      return _show_profile(flags.config, typed, flags.members, flags.profile)

    def run(name, *more):
      arguments = *command_line.typed(typed), *more, f'--workdir={folder}/{name}'
      return stopwatch.timed(lambda: _common.train(f'--config={flags.config}', *arguments))

    for i in range(1 + flags.rounds):
      single = run(f'single{i}')
      together = run(f'together{i}', f'--config.ensemble.seeds=0:{flags.members}')
      hours.append((3600 / single, 3600 * flags.members / together))
      members = [_rate(f'{folder}/together{i}/seed{m}') for m in range(flags.members)]
      rates.append((_rate(f'{folder}/single{i}'), sum(members)))
      run(f'filling{i}', f'--config.batch_size={flags.members * config.batch_size}')
      filling.append((_rate(f'{folder}/filling{i}'), sum(members)))
    simulated = _simulated_steps(flags.config, typed, 10 * flags.rounds)
  rows = [('', 'single', 'together, or simulated', 'ratio (quartiles)')]
  ratios = {}
  speeds = {'images/s': rates, 'images/s over a filling batch': filling}
  for name, pairs in {'trainings an hour': hours, **speeds, **simulated}.items():
    pairs = pairs[1:]  # the first round fills the compilation cache
    low, median, high = stopwatch.quartiles([b / a for a, b in pairs])
    medians = [statistics.median(column) for column in zip(*pairs)]
    rows.append((name, *(f'{m:,.0f}' for m in medians), f'{median:.2f} ({low:.2f} to {high:.2f})'))
    key = name.partition(':')[0].replace('/', '_').replace(' ', '_')
    ratios[f'ensemble_{key}'] = median
  _common.show(f'{flags.members} trainings of {flags.steps} steps, {flags.config}', rows, ratios)


if __name__ == '__main__':
  main()
