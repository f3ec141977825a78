"""The baselines of a ring: models stay where they are.

  python -m anp_jax.tools.study.model_ring_baselines --way=parts --config=...
    --workdir=... --num_processes=2 --process_id=0 --coordinator=HOST:PORT

Process j trains the models j, j + n, ... of config.strategy.models, one after
another, on its own devices:

  parts        after each turn it sends the part of the data set that it has to
               the next process
  independent  it has the whole set in memory, once it was read
  disk         it reads the whole set from its files in every epoch

`python -m anp_jax.tools.study model_ring` starts it.
"""

import argparse
import contextlib
import io
import queue
import secrets
import sys

import jax
import numpy as np

from anp_jax import cluster, config as config_lib
from anp_jax.config import command_line
from anp_jax.data import sources
from anp_jax.data.input import augment, tensorflow_cpu
from anp_jax.data.sources import cache
from anp_jax.parallel import mesh as mesh_lib
from anp_jax.runtimes import transport
from anp_jax.runtimes.model_ring import (
  candidates as candidates_lib,
  compiled as programs_lib,
  messages,
  ring_runner as runner_lib,
  schedule as schedule_lib,
  spans as spans_lib,
)
from anp_jax.system import compile_cache, xla_flags


class TravellingShard:
  """A shard of a data set, as bytes that can be sent; a `sources.Source`."""

  def __init__(self, source, number: int, size: int):
    """Starts without examples.

    Args:
      source: of all examples.
      number: of the shard.
      size: examples of the shard.
    """
    self.kind, self.vocabulary = source.kind, source.vocabulary
    self.name = f'{source.name}, part {number}'
    self._size = size
    self._images = self._labels = None

  def __len__(self):
    return self._size

  def read(self, indices):
    """Reads examples, like `sources.Source.read`."""
    return [self._images[i] for i in indices], self._labels[indices]

  def labels(self):
    """Returns all labels, like `sources.Source.labels`."""
    return self._labels

  def example_name(self, index):
    """Names an example for messages, like `sources.Source.example_name`."""
    return f'{self.name}, example {index}'

  def fill(self, images, labels) -> None:
    """Sets the examples."""
    self._images, self._labels = list(images), np.asarray(labels)

  def pack(self) -> np.ndarray:
    """Returns all examples as (n,) uint8."""
    file = io.BytesIO()
    if self.kind == 'encoded':
      lengths = np.array([len(x) for x in self._images])
      joined = np.frombuffer(b''.join(self._images), np.uint8)
      np.savez(file, lengths=lengths, joined=joined, labels=self._labels)
    else:
      np.savez(file, images=np.stack(self._images), labels=self._labels)
    return np.frombuffer(file.getvalue(), np.uint8)

  def unpack(self, data: np.ndarray) -> None:
    """Sets the examples that another process's `pack` returned."""
    with np.load(io.BytesIO(data.tobytes())) as arrays:
      if 'images' in arrays:
        self.fill(arrays['images'], arrays['labels'])
        return
      ends = np.cumsum(arrays['lengths'])
      joined = arrays['joined'].tobytes()
      images = [joined[a:b] for a, b in zip([0, *ends[:-1]], ends)]
      self.fill(images, arrays['labels'])


class CachedShard:
  """A shard behind the cache of config.data.cache, which can be emptied."""

  def __init__(self, shard: TravellingShard, config):
    """Starts with an empty cache."""
    self.shard, self._config = shard, config
    self.clear()

  def clear(self) -> None:
    """Forgets what was cached of the examples before."""
    self._source = cache.wrap(self.shard, self._config)

  def __getattr__(self, name):
    return getattr(self._source, name)

  def __len__(self):
    return len(self.shard)


class Exchange:
  """Sends shards to the next process, and takes those of the one before."""

  def __init__(self, config, processes, stack):
    """Opens this process's port; all processes do so at once."""
    self._timeout = config.cluster.rendezvous_timeout
    self._arrivals = queue.Queue()
    session = '' if processes.index else secrets.token_hex(8)
    token = transport.session_token(processes.secret, processes.gather(session)[0])
    receiver = messages.Receiver(
      config,
      processes.env,
      token,
      lambda request, data: self._arrivals.put((request['part'], data)),
    )
    stack.callback(receiver.shutdown)
    addresses = processes.gather(receiver.address)
    following = addresses[(processes.index + 1) % processes.count]
    self._client = transport.connect(config, following, token, 600.0)
    stack.callback(self._client.close)

  def send(self, number: int, data: np.ndarray) -> tuple[int, np.ndarray]:
    """Sends a shard's bytes; returns the number and bytes of the next one."""
    self._client.put({'part': number}, [data])
    return self._arrivals.get(timeout=self._timeout)


class Independent:
  """One process, whose models stay, with the whole set."""

  def __init__(self, config, workdir: str, processes):
    """Opens the data; nothing is trained yet.

    Args:
      config: the run's config.
      workdir: of the run.
      processes: `cluster.Processes`; all make theirs at once.
    """
    self._processes, self._index = processes, processes.index
    self._validation = sources.open_source(config, training=False)
    self._laps = candidates_lib.laps('duration', config.duration)
    self._sizes, self._shards = self._open(config)
    if self._shards[0].kind == 'encoded' and config.data.decode not in augment.RESAMPLED:
      tensorflow_cpu.load()  # seconds; not in the middle of a turn
    self._mesh = mesh_lib.create(config, jax.local_devices())
    self._candidates = candidates_lib.create(config, self._mesh.size)
    self._programs = programs_lib.Programs()
    self._spans = spans_lib.Spans(workdir, self._index)

  def _open(self, config):
    """Returns the examples of each shard, and the shards."""
    source = sources.open_source(config, training=True)
    return (len(source),), [source]

  def run(self) -> None:
    """Trains this process's models, one after another."""
    count, shards = self._processes.count, len(self._shards)
    for first in range(0, len(self._candidates), count):
      model = first + self._index
      runners, state, step = [], None, 0
      if model < len(self._candidates):
        runners, state = self._prepared(model)
      for lap in range(self._laps):
        for turn in range(shards):
          number = (self._index - turn) % shards
          self._processes.heartbeat('training', step)
          if runners:
            state, step = self._train(runners[number], number, state, step, lap, model)
          self._end_turn(number, model, lap)
        if runners:
          with self._spans.record(self._index, 'score', model, lap + 1):
            runners[self._index % shards].score(state.evaluated(), self._validation)
      for runner in runners:
        runner.close()
    self._processes.gather('done')

  def _prepared(self, model):
    """Returns a model's runner for each shard, and its new state."""
    candidate = self._candidates[model]
    schedule = schedule_lib.RingSchedule(self._sizes, candidate.config.batch_size, self._laps)
    runners = [
      runner_lib.Runner(
        candidate, schedule, schedule_lib.Station(number, self._mesh, shard), self._programs
      )
      for number, shard in enumerate(self._shards)
    ]
    with self._spans.record(self._index, 'prepare', model, None):
      first = runners[self._index % len(runners)]
      first.compile(len(self._validation), begins=True)
      return runners, first.new_state('')

  def _train(self, runner, number, state, step, lap, model):
    """Makes the steps of one lap on the shard of this number."""
    segment = runner.schedule.segment(lap, number)
    runner.prepare(segment.first)
    with self._spans.record(self._index, 'train', model, lap) as span:
      for metrics, current in runner.train(state, step, segment.count):
        if current is not None:
          state, step = current, metrics.step
      jax.block_until_ready(state)
      span['steps'] = segment.count
    return state, step

  def _end_turn(self, number, model, lap):
    """Does what follows a turn on the shard of this number."""


class Migration(Independent):
  """One process, whose models stay while the shards travel."""

  def __init__(self, config, workdir: str, processes, stack):
    """Reads this process's shard, and opens its port; see `Independent`.

    Args:
      config: the run's config.
      workdir: of the run.
      processes: `cluster.Processes`; all make theirs at once.
      stack: contextlib.ExitStack that closes what is opened.

    Raises:
      ConfigError: for synthetic examples, which cannot travel.
    """
    super().__init__(config, workdir, processes)
    self._exchange = None
    if processes.count > 1:
      self._exchange = Exchange(config, processes, stack)

  def _open(self, config):
    # Files travel, not what is made of them.
    source_config = config_lib.replaced(config, {'data.cache': 'none'})
    source = sources.open_source(source_config, training=True)
    if source.kind == 'synthetic':
      raise config_lib.ConfigError('config.data.source=synthetic has no examples that could travel')
    sizes = schedule_lib.shard_sizes(config, len(source), self._processes.count)
    shards = [TravellingShard(source, *x) for x in enumerate(sizes)]
    local = schedule_lib.data_shards(source, sizes)[self._index]
    shards[self._index].fill(*local.read(np.arange(len(local))))
    return sizes, [CachedShard(shard, config) for shard in shards]

  def _end_turn(self, number, model, lap):
    """Sends the shard that was trained on; fills the one that arrives."""
    if not self._exchange:
      return
    with self._spans.record(self._index, 'send', model, lap) as span:
      data = self._shards[number].shard.pack()
      span['bytes'] = data.nbytes
      number, data = self._exchange.send(number, data)
      self._shards[number].shard.unpack(data)
      self._shards[number].clear()


def create(way, config, workdir, processes, stack):
  """Returns what trains the models of this process.

  Args:
    way: 'parts', 'independent' or 'disk'.
    config: the run's config.
    workdir: of the run.
    processes: `cluster.Processes`; all make theirs at once.
    stack: contextlib.ExitStack that closes what is opened.

  Raises:
    ConfigError: for examples that cannot travel.
  """
  if way == 'parts':
    return Migration(config, workdir, processes, stack)
  cache_key = 'none'
  if way == 'independent':
    is_cached = config.data.cache != 'none'
    cache_key = config.data.cache if is_cached else 'encoded'
  config = config_lib.replaced(config, {'data.cache': cache_key})
  return Independent(config, workdir, processes)


def main(arguments: list[str]) -> int:
  """Returns the process's exit status."""
  parser = argparse.ArgumentParser()
  for name in ('way', 'config', 'workdir', 'coordinator'):
    parser.add_argument(f'--{name}')
  for name in ('num_processes', 'process_id'):
    parser.add_argument(f'--{name}', type=int)
  overrides, rest = command_line.split_overrides(arguments)
  flags = parser.parse_args(rest)
  try:
    env = cluster.detect(flags.coordinator, flags.num_processes, flags.process_id)
    config = command_line.load(flags.config, overrides)
    # Like main.py, with which it is compared.
    xla_flags.enable()
    with (
      cluster.start(config, env, workdir=flags.workdir) as processes,
      contextlib.ExitStack() as stack,
    ):
      compile_cache.enable(config)
      processes.check_shared(flags.workdir)
      create(flags.way, config, flags.workdir, processes, stack).run()
  except cluster.EXPECTED as e:
    code, text = cluster.exit_status(e)
    print(f'error: {text}', file=sys.stderr)
    return code
  return 0


if __name__ == '__main__':
  xla_flags.use_huge_pages()
  sys.exit(main(sys.argv[1:]))
