"""The baseline of a ring: models stay, and the parts of the data set travel.

  python -m scripts.study.migrate --config=... --workdir=... --num_processes=2
    --process_id=0 --coordinator=HOST:PORT

Process j trains the models j, j + n, ... of config.strategy.models, one after
another, on its own devices; after each turn it sends the part that it holds to
the next process. `python -m scripts.study relay` starts it.
"""

import argparse
import contextlib
import io
import queue
import secrets
import sys

import jax
import numpy as np

from anp_jax import cluster
from anp_jax import config as config_lib
from anp_jax.config import command_line
from anp_jax.data import sources
from anp_jax.data.sources import cache
from anp_jax.parallel import mesh as mesh_lib
from anp_jax.runtimes import transport
from anp_jax.runtimes.relay import candidates as candidates_lib
from anp_jax.runtimes.relay import messages as post_lib
from anp_jax.runtimes.relay import programs as programs_lib
from anp_jax.runtimes.relay import runner as runner_lib
from anp_jax.runtimes.relay import schedule as itinerary_lib
from anp_jax.runtimes.relay import spans as spans_lib
from anp_jax.system import compile_cache
from anp_jax.system import xla_flags


class Held:
  """A part of a data set, as bytes that can be sent; a `sources.Source`."""

  def __init__(self, like, number: int, size: int):
    """Makes it, without examples yet.

    Args:
      like: the source of which it is a part.
      number: of the part.
      size: its examples.
    """
    self.kind, self.vocabulary = like.kind, like.vocabulary
    self.name = f'{like.name}, part {number}'
    self._size = size
    self._images = self._labels = None

  def __len__(self):
    return self._size

  def read(self, indices):
    """See `sources.Source.read`."""
    return [self._images[i] for i in indices], self._labels[indices]

  def labels(self):
    """See `sources.Source.labels`."""
    return self._labels

  def example_name(self, index):
    """See `sources.Source.example_name`."""
    return f'{self.name}, example {index}'

  def fill(self, images, labels) -> None:
    """Puts the examples in."""
    self._images, self._labels = list(images), np.asarray(labels)

  def pack(self) -> np.ndarray:
    """All examples as (n,) uint8."""
    file = io.BytesIO()
    if self.kind == 'encoded':
      lengths = np.array([len(x) for x in self._images])
      joined = np.frombuffer(b''.join(self._images), np.uint8)
      np.savez(file, lengths=lengths, joined=joined, labels=self._labels)
    else:
      np.savez(file, images=np.stack(self._images), labels=self._labels)
    return np.frombuffer(file.getvalue(), np.uint8)

  def unpack(self, data: np.ndarray) -> None:
    """Puts in what another process's `pack` gave."""
    with np.load(io.BytesIO(data.tobytes())) as found:
      if 'images' in found:
        self.fill(found['images'], found['labels'])
        return
      ends = np.cumsum(found['lengths'])
      joined = found['joined'].tobytes()
      starts = [0, *ends[:-1]]
      images = [joined[a:b] for a, b in zip(starts, ends)]
      self.fill(images, found['labels'])


class Current:
  """A source that is what it was last set to: what is cached leaves, too."""

  def __init__(self, part, config):
    """Wraps a `Held` as config.data.cache says."""
    self._part, self._config = part, config
    self.renew()

  def renew(self) -> None:
    """Forgets what was cached of the examples before."""
    self._now = cache.wrap(self._part, self._config)

  def __getattr__(self, name):
    return getattr(self._now, name)

  def __len__(self):
    return len(self._part)


def run(config, workdir: str, processes: cluster.Processes) -> None:
  """Trains this process's models; all processes call it."""
  compile_cache.enable(config)
  processes.check_shared(workdir)
  index, count = processes.index, processes.count
  whole = config.copy_and_resolve_references()
  whole.data.cache = 'none'  # files travel, not what is made of them
  source = sources.open_source(whole, training=True)
  if source.kind == 'synthetic':
    raise config_lib.ConfigError(
      'config.data.source=synthetic has no examples that could travel'
    )
  validation = sources.open_source(config, training=False)
  laps = candidates_lib.epochs('duration', config.duration)
  sizes = itinerary_lib.sizes(config, len(source), count)
  parts = [Held(source, p, n) for p, n in enumerate(sizes)]
  own = itinerary_lib.parts(config, source, count)[index]
  parts[index].fill(*own.read(np.arange(len(own))))
  wrapped = [Current(part, config) for part in parts]
  mesh = mesh_lib.create(config, jax.local_devices())
  candidates = candidates_lib.create(config, mesh.size)
  programs = programs_lib.Programs()
  with contextlib.ExitStack() as stack:
    spans = spans_lib.Spans(workdir, index)
    stack.callback(spans.close)
    came, client = queue.Queue(), None
    if count > 1:
      token = processes.gather(secrets.token_hex(32) if not index else '')[0]
      box = post_lib.Post(
        config, processes.env, token,
        lambda request, data: came.put((request['part'], data)),
        lambda name, request: None,
      )  # fmt: skip
      stack.callback(box.shutdown)
      addresses = processes.gather(box.address)
      client = transport.connect(
        config, addresses[(index + 1) % count], token, 600.0
      )
      stack.callback(client.close)
    rounds = range(0, len(candidates), count)
    for first in rounds:
      mine = first + index
      runners, state, step = [], None, 0
      if mine < len(candidates):
        runners = [
          runner_lib.Runner(
            candidates[mine], mesh, part, p, sizes, laps, programs
          )
          for p, part in enumerate(wrapped)
        ]
        with spans.during(index, 'prepare', mine, None):
          runners[index].compile(len(validation), begins=True)
          state = runners[index].new('')
      for lap in range(laps):
        for turn in range(count):
          held = (index - turn) % count
          processes.heartbeat('training', step)
          if runners:
            size, batch = sizes[held], runners[held].config.batch_size
            begin, end = lap * size // batch, (lap + 1) * size // batch
            if lap == laps - 1:
              end = -(-laps * size // batch)
            runners[held].prepare(begin)
            with spans.during(index, 'train', mine, lap) as span:
              state, step = runners[held].train(
                state, step, end - begin, lambda: False, lambda *_: None
              )
              jax.block_until_ready(state)
              span['steps'] = end - begin
          if client:
            with spans.during(index, 'send', mine, lap) as span:
              data = parts[held].pack()
              span['bytes'] = data.nbytes
              client.put({'part': held}, [data])
              number, data = came.get(timeout=config.cluster.rendezvous_timeout)
              parts[number].unpack(data)
              wrapped[number].renew()
        if runners:
          with spans.during(index, 'score', mine, lap + 1):
            runners[index].score(state.evaluated(), validation)
      for runner in runners:
        runner.close()
    processes.gather('done')


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
    place = cluster.detect(
      flags.coordinator, flags.num_processes, flags.process_id
    )
    config = command_line.load(flags.config, overrides)
    # As main.py, beside which it is timed.
    xla_flags.enable()
    with cluster.start(config, place) as processes:
      run(config, flags.workdir, processes)
  except cluster.EXPECTED as e:
    code, text = cluster.exit_status(e)
    print(f'error: {text}', file=sys.stderr)
    return code
  return 0


if __name__ == '__main__':
  xla_flags.use_huge_pages()
  sys.exit(main(sys.argv[1:]))
