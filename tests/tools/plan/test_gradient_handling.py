"""What a gradient costs the cores of `parameter_server`, apart from its pass."""

import time

import pytest

from anp_jax.config import command_line
from anp_jax.runtimes import transport
from anp_jax.tools.plan import gradient_handling
from tests import launching

# Of LeNet with ten classes: two convolutions, two dense layers, with biases.
_PARAMETERS = 20 * 76 + 50 * 501 + 500 * 801 + 10 * 501


def test_all_weights_and_gradients_are_sent_and_updated(monkeypatch):
  config = command_line.load(
    'configs/lenet.py',
    {
      'strategy.name': 'parameter_server',
      'data.source': 'synthetic',
      'data.synthetic_classes': '10',
      'optimizer.momentum': '0',
    },
  )
  sizes, receive = [], transport.read_bytes

  def read_bytes(reader, size, local=False):
    sizes.append(size)
    return receive(reader, size, local)

  monkeypatch.setattr(transport, 'read_bytes', read_bytes)
  worked = []

  def work(function):
    function()
    worked.append(function)
    # Sent there and back 2 s each; joined 3 s; the step's update 1 s; served 5.
    return (2.0, 2.0, 3.0, 1.0, 5.0)[len(worked) - 1]

  monkeypatch.setattr(gradient_handling, '_work', work)
  at_worker, at_server = gradient_handling.seconds(config)
  assert sizes == [_PARAMETERS * 4] * 2
  # Half of what is sent is each end's.
  assert at_worker == 2.0 + 3.0 - 1.0
  assert at_server == 2.0 + 5.0


def test_work_counts_no_sleep():
  assert gradient_handling._work(lambda: time.sleep(0.01)) < 0.005
  end = []

  def spin():
    end.append(time.process_time() + 0.01)
    while time.process_time() < end[-1]:
      pass

  # A clock of the processor's time may tick in milliseconds.
  assert gradient_handling._work(spin) == pytest.approx(0.01, abs=0.005)


@pytest.mark.slow
@pytest.mark.parametrize('name', ['sync', 'parameter_server'])
def test_a_servers_update_does_not_wait_for_a_pass(name, monkeypatch):
  """On one core the pool has one thread, which a pass holds to its end."""
  for variable in ('NPROC', 'PJRT_NPROC'):
    monkeypatch.delenv(variable, raising=False)
  done = launching.python(
    '-c',
    f"""
import os, threading, time
os.sched_setaffinity(0, {{min(os.sched_getaffinity(0))}})
from anp_jax.config import command_line
from anp_jax.system import xla_flags
config = command_line.load(
  'configs/lenet.py', {{'strategy.name': '{name}', 'optimizer.momentum': '0'}}
)
xla_flags.enable_for(config)
import jax
import jax.numpy as jnp
step = lambda _, y: jnp.tanh(y @ x)
x = jnp.ones((600, 600))
work = jax.jit(lambda x: jax.lax.fori_loop(0, 200, step, x))
update = jax.jit(lambda x: 2 * x)
jax.block_until_ready((work(x), update(x)))
ends = {{}}

def end(name, function):
  function(x).block_until_ready()
  ends[name] = time.monotonic()

thread = threading.Thread(target=end, args=('work', work))
thread.start()
time.sleep(0.05)
end('update', update)
thread.join()
print('waited', ends['update'] >= ends['work'] - 0.05)
""",
  )
  assert done.returncode == 0, done.stderr
  assert f'waited {name == "sync"}' in done.stdout
