"""Processor time that a config's input takes for an image, on the files at hand."""

from collections.abc import Callable
import itertools
import time
from typing import NamedTuple

import ml_collections
import numpy as np

from anp_jax import config as config_lib
from anp_jax.data import sources
from anp_jax.data.input import batch_sampler, pipeline

_ROWS = 64  # of a batch
# Seconds in which a process without work uses less than a tenth of a core, and until
# it is taken for one that always does other work.
_IDLE, _MOST_WAITING = 0.1, 2.0


class InputCost(NamedTuple):
  """Seconds of a core for an image.

  Attributes:
    read: seconds to read what the source has.
    decode: seconds to decode, cut and resize it, and to assemble batches.
  """

  read: float
  decode: float

  def text(self) -> str:
    """For people: '1.17 ms of a core an image (read 0.02, decode 1.15)'."""
    stages = ', '.join(f'{name} {1e3 * value:.2g}' for name, value in self._asdict().items())
    return f'{1e3 * sum(self):.3g} ms of a core an image ({stages})'


def measure(
  config: ml_collections.ConfigDict, source: sources.Source, seconds: float = 2.0
) -> InputCost:
  """Times the training input of a config, in one thread.

  Args:
    config: resolved config.
    source: training examples; not synthetic ones.
    seconds: seconds that the measurement takes, without pauses.
  """
  config = config_lib.replaced(config, {'data.threads': 1})
  sampler = batch_sampler.BatchSampler(config, len(source), _ROWS, np.arange(_ROWS), True)
  batches = pipeline.batches(source, sampler)
  total = processor_time(lambda: next(batches), seconds / 2) / _ROWS
  batches.close()
  counts = itertools.count()
  read = processor_time(lambda: source.read(sampler.indices(next(counts))[1]), seconds / 4) / _ROWS
  return InputCost(read, max(total - read, 0.0))


def processor_time(call: Callable[[], object], seconds: float) -> float:
  """Returns the process's seconds of a core for a call.

  Args:
    call: function that may leave work to other threads, as much as the call before.
    seconds: seconds in which it is called again and again.
  """
  call()
  _await_idleness()
  begin, end, count = time.process_time(), time.perf_counter() + seconds, 0
  while not count or time.perf_counter() < end:
    call()
    count += 1
  _await_idleness()  # what was taken is read ahead again
  return (time.process_time() - begin) / count


def _await_idleness():
  deadline = time.perf_counter() + _MOST_WAITING
  before = -1.0
  while time.process_time() - before > _IDLE / 10 and time.perf_counter() < deadline:
    before = time.process_time()
    time.sleep(_IDLE)
