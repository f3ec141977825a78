"""Four processes whose computing is a sleep: step times in closed form."""

import jax
import numpy as np
import pytest

from anp_jax import config as config_lib
from anp_jax.config import command_line
from anp_jax.reporting import telemetry
from anp_jax.runtimes.parameter_server import log as log_lib
from anp_jax.system import emulation
from tests import launching

pytestmark = pytest.mark.multiprocess

_PROCESSES, _SECONDS = 4, 0.3
_KEYS = {
  'emulate.enabled': 'True',
  'emulate.step_seconds': str(_SECONDS),
  'emulate.megabytes': '2',
  'batch_size': '16',
  'duration': '24 steps',
  'log.every': '4 steps',
  'eval.every': '1000 steps',
  'checkpoint.every': '1000 steps',
  'checkpoint.keep_best': '0',
  'eval.examples': 'False',
}


def _step_seconds(folder, **keys):
  """A step's mean, without the log's first two intervals and its last.

  A step's numbers are read when the next one has been made, but those of the
  last at once: its interval is a step shorter.
  """
  # With XLA's optimizations: without, sums of 2 MB take a third of a step.
  environment = {'OMP_NUM_THREADS': '1', 'JAX_DISABLE_MOST_OPTIMIZATIONS': '0', 'XLA_FLAGS': ''}
  arguments = launching.arguments(folder / 'run', **{**_KEYS, **keys})
  launching.run(folder, _PROCESSES, arguments, environment=environment)
  lines = telemetry.of_kind(folder / 'run', 'train')
  late = [r for r in lines if r['step'] > 8][:-1]
  return sum(r['seconds'] for r in late) / (late[-1]['step'] - 8)


def _assert_takes(seconds, expected, early=0.0):
  """What is not a sleep takes less than a third of a step's."""
  assert expected - early <= seconds < expected + _SECONDS / 3


def test_sync_waits_for_the_slowest_of_each_step(tmp_path):
  """The mean of the largest of four draws, and a step's fixed cost."""
  seconds = _step_seconds(tmp_path, **{'emulate.spread': '0.5'})
  # What the largest draw of a step is, from the definition: a lognormal of
  # mean 1 of the key of the step and of the first row of each process.
  sigma = np.sqrt(np.log1p(0.5**2))
  largest = []
  for step in range(9, 21):
    key = jax.random.fold_in(jax.random.key(0), step)
    _, dropout = jax.random.split(key)
    draws = []
    for row in range(0, 16, 4):
      words = jax.random.key_data(jax.random.fold_in(dropout, row))
      normal = np.random.default_rng(np.asarray(words)).standard_normal()
      draws.append(np.exp(sigma * normal - sigma**2 / 2))
    largest.append(max(draws))
  _assert_takes(seconds, _SECONDS * np.mean(largest))


@pytest.mark.soak
def test_a_straggler_stops_sync_and_not_the_servers_workers(tmp_path):
  """One of four is three times as slow.

  A step of `sync` takes three times as long. Updates of `parameter_server` come at the
  rate of all workers together: (3 + 1 / 3) in the time of one gradient.
  """
  slow = {'emulate.slow': '((3, 3.0),)'}
  sync = _step_seconds(tmp_path / 'sync', **slow)
  _assert_takes(sync, 3 * _SECONDS)
  server = _step_seconds(
    tmp_path / 'server',
    **slow,
    **{'strategy.name': 'parameter_server', 'duration': '80 steps', 'optimizer.momentum': '0'},
  )
  ideal = _SECONDS / (3 + 1 / 3)
  assert ideal * 0.9 < server < ideal * 1.35
  updates = log_lib.read(str(tmp_path / 'server/run'))
  workers = [u['parts'][0]['worker'][0] for u in updates if 'order' in u]
  # The slow one made about a tenth of the updates.
  assert 3 <= workers.count('3') <= 13


@pytest.mark.soak  # CI compares a run with its plan
@pytest.mark.parametrize('pieces, end', [(1, 0.9 + 0.6), (4, 1.0875)])
def test_links_are_as_slow_as_they_say(tmp_path, pieces, end):
  """2 MB over a ring of four at 40 Mbit/s: 2 x 3 / 4 x 2 MB / 5 MB/s = 0.6 s.

  After the pass of 0.9 s, or with it: its pieces are there after 0.45, 0.6,
  0.75 and 0.9 s. The 16 arrays leave in buckets of 3, 4, 4, 4 and 1, which take
  0.0375 s an array; the first needs one piece, each other one more.
  """
  seconds = _step_seconds(
    tmp_path,
    duration='16 steps',
    **{
      'emulate.bandwidth': '40mbit',
      'emulate.step_seconds': '0.9',
      'emulate.pieces': str(pieces),
      'strategy.bucket_megabytes': '0.5',
    },
  )
  # After a pause Linux sends up to two segments at once; on loopback they have 64 KB.
  _assert_takes(seconds, end, early=2 * 2**16 / 5e6)


def test_a_recipe_is_emulated_as_it_is():
  """The keys of its network stay: they are what the gradients are made of."""
  config = command_line.load(
    'configs/resnet_anp.py:modern', {'emulate.enabled': 'True', 'data.source': 'synthetic'}
  )
  assert config.model.name == 'resnet50'
  assert config_lib.flat(config)['emulate.pieces'] == 4
  assert emulation.describe(config.emulate) == 'a pass is a sleep of 0.1 s'
