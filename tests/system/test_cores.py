"""How threads share cores."""

import os

import pytest

from tests import launching

pytestmark = pytest.mark.skipif(not hasattr(os, 'SCHED_BATCH'), reason='Linux alone has the policy')

_PROGRAM = """
import os, threading
from anp_jax.system import cores

policies = []
may_go = threading.Event()

def note():
  may_go.wait()
  policies.append(os.sched_getscheduler(0))

def run_thread():
  thread = threading.Thread(target=note)
  thread.start()
  return thread

if {chosen} is not None:
  os.sched_setscheduler(0, {chosen}, os.sched_param(0))
earlier = run_thread()
cores.wait_for_turn()
later = run_thread()
may_go.set()
earlier.join()
later.join()
print(os.sched_getscheduler(0), sorted(policies))
"""


@pytest.mark.parametrize('chosen', ['None', 'os.SCHED_IDLE'])
def test_new_threads_wait_for_their_turn_unless_a_policy_was_chosen(chosen):
  program = _PROGRAM.replace('{chosen}', chosen)
  text = launching.python('-c', program).stdout
  before, after = os.SCHED_OTHER, os.SCHED_BATCH
  if chosen != 'None':
    before = after = os.SCHED_IDLE
  assert text == f'{after} {sorted([before, after])}\n'


_JOINED = """
import os, sys
from anp_jax import cluster
from anp_jax.config import command_line

config = command_line.load('configs/resnet_anp.py:tiny', {})
place = cluster.detect(sys.argv[1], 2, int(sys.argv[2]))
with cluster.start(config, place, {}):
  import jax
  jax.devices()
  threads = [int(t) for t in os.listdir('/proc/self/task')]
  policies = [os.sched_getscheduler(t) for t in threads]
  print(os.sched_getscheduler(0), policies.count(os.SCHED_BATCH) > 4)
"""


@pytest.mark.multiprocess
def test_processes_that_sum_over_gloo_wait_for_their_turn():
  address = f'127.0.0.1:{launching.free_port()}'
  processes = [
    launching.start('-c', _JOINED, address, rank, JAX_PLATFORMS='cpu', ANP_RUN_SECRET='ab' * 32)
    for rank in range(2)
  ]
  for process in processes:
    printed, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert f'{os.SCHED_BATCH} True' in printed
