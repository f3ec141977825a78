"""The processor time of a config's input, with work of a known length."""

from concurrent import futures
import time

import numpy as np
import pytest

from anp_jax.data import sources, vocabulary
from anp_jax.tools import input_cost
from tests import builders, launching

# Other programs on the cores lengthen it by up to a half; the waits for idleness add none.
_ABOUT = 0.6


def _work(seconds):
  """Keeps a core busy for so long."""
  end = time.thread_time() + seconds
  while time.thread_time() < end:
    pass


def test_processor_time_counts_what_other_threads_do():
  with futures.ThreadPoolExecutor(1) as pool:
    seconds = input_cost.processor_time(lambda: pool.submit(_work, 0.004).result(), 0.2)
  assert seconds == pytest.approx(0.004, rel=_ABOUT)


def test_a_wait_takes_no_processor_time():
  """A process of its own has none of the threads that other tests have left."""
  call = 'input_cost.processor_time(lambda: time.sleep(0.01), 0.1)'
  code = f'import time; from anp_jax.tools import input_cost; print({call})'
  assert float(launching.python('-c', code, status=0).stdout) < 0.001


class _Slow(sources.Source):
  """Grey images that take 2 ms to read."""

  kind = 'pixels'
  name = 'slow'

  def __len__(self):
    return 640

  def read(self, indices):
    _work(0.002 * len(indices))
    return [np.full((40, 40, 3), 9, np.uint8)] * len(indices), np.zeros(len(indices), np.int32)


def test_the_time_is_that_of_its_stages():
  config = builders.config({'data.augment': 'crop', 'data.image_size': 32})
  source = _Slow()
  source.vocabulary = vocabulary.Vocabulary(('grey', 'white'))
  cost = input_cost.measure(config, source, seconds=0.4)
  assert cost.read == pytest.approx(0.002, rel=_ABOUT)
  assert 0 <= cost.decode < 0.001
  assert '2 ms of a core' in input_cost.InputCost(0.00125, 0.00075).text()
