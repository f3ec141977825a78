"""The baseline of a ring: each model stays on one process, which has the whole set.

  python -m anp_jax.tools.study.model_ring_independent --config=...
    --workdir=... --num_processes=2 --process_id=0 --coordinator=HOST:PORT

Process j trains the models j, j + n, ... of config.strategy.models, one after
another, on its own devices. The set is in memory, once it was read.
`python -m anp_jax.tools.study model_ring` starts it.
"""

import argparse
import sys

import jax

from anp_jax import cluster, config as config_lib
from anp_jax.config import command_line
from anp_jax.data import sources
from anp_jax.data.input import augment, tensorflow_cpu
from anp_jax.parallel import mesh as mesh_lib
from anp_jax.runtimes.model_ring import (
  candidates as candidates_lib,
  compiled as programs_lib,
  ring_runner as runner_lib,
  schedule as schedule_lib,
  spans as spans_lib,
)
from anp_jax.system import compile_cache, xla_flags


class Independent:
  """One process, whose models stay, with the whole set."""

  def __init__(self, config, workdir: str, processes):
    """Opens the data; nothing is trained yet.

    Args:
      config: the run's config.
      workdir: folder of the run.
      processes: `cluster.Processes`; all make theirs at once.
    """
    self._processes, self._index = processes, processes.index
    self._validation = sources.open_source(config, training=False)
    self._laps = candidates_lib.laps('duration', config.duration)
    self._source = sources.open_source(config, training=True)
    if self._source.kind == 'encoded' and config.data.decode not in augment.RESAMPLED:
      tensorflow_cpu.load()  # seconds; not in the middle of a turn
    self._mesh = mesh_lib.create(config, jax.local_devices())
    self._candidates = candidates_lib.create(config, self._mesh.size)
    self._programs = programs_lib.Programs()
    self._spans = spans_lib.Spans(workdir, self._index)

  def run(self) -> None:
    """Trains this process's models, one after another."""
    for model in range(self._index, len(self._candidates), self._processes.count):
      runner, state = self._prepared(model)
      step = 0
      for lap in range(self._laps):
        self._processes.heartbeat('training', step)
        state, step = self._train(runner, state, step, lap, model)
        with self._spans.record(self._index, 'score', model, lap + 1):
          runner.score(state.evaluated(), self._validation)
      runner.close()
    self._processes.gather('done')

  def _prepared(self, model):
    """Returns a model's runner, and its new state."""
    candidate = self._candidates[model]
    schedule = schedule_lib.RingSchedule(
      (len(self._source),), candidate.config.batch_size, self._laps
    )
    station = schedule_lib.Station(0, self._mesh, self._source)
    runner = runner_lib.Runner(candidate, schedule, station, self._programs)
    with self._spans.record(self._index, 'prepare', model, None):
      runner.compile(len(self._validation))
      return runner, runner.new_state('')

  def _train(self, runner, state, step, lap, model):
    """Makes the steps of one lap."""
    segment = runner.schedule.segment(lap, 0)
    runner.prepare(segment.first)
    with self._spans.record(self._index, 'train', model, lap) as span:
      for metrics, current in runner.train(state, step, segment.steps):
        if current is not None:
          state, step = current, metrics.step
      jax.block_until_ready(state)
      span['steps'] = segment.steps
    return state, step


def main(arguments: list[str]) -> int:
  """Returns the process's exit status."""
  parser = argparse.ArgumentParser()
  for name in ('config', 'workdir', 'coordinator'):
    parser.add_argument(f'--{name}')
  for name in ('num_processes', 'process_id'):
    parser.add_argument(f'--{name}', type=int)
  overrides, rest = command_line.split_overrides(arguments)
  flags = parser.parse_args(rest)
  try:
    env = cluster.detect(flags.coordinator, flags.num_processes, flags.process_id)
    config = command_line.load(flags.config, overrides)
    if config.data.cache == 'none':
      config = config_lib.replaced(config, {'data.cache': 'encoded'})
    # Like main.py, with which it is compared.
    xla_flags.enable()
    with cluster.start(config, env, workdir=flags.workdir) as processes:
      compile_cache.enable(config)
      processes.check_shared(flags.workdir)
      Independent(config, flags.workdir, processes).run()
  except cluster.EXPECTED as e:
    code, text = cluster.exit_status(e)
    print(f'error: {text}', file=sys.stderr)
    return code
  return 0


if __name__ == '__main__':
  xla_flags.use_huge_pages()
  sys.exit(main(sys.argv[1:]))
