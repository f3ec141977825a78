"""main.py that signals itself in a named phase, and writes down that it did.

ANP_KILL='RANK PHASE COUNT SIGNAL', for example '1 saving 2 TERM': rank 1 sends
itself SIGTERM while it saves for the second time, or a later one where that was
over too soon. Of several, with a semicolon between, each start does the first
that was not done yet: ANP_KILL_LOG names the file that gets a line once the
signal is sent.

ANP_KILL_CALL='RANK CALL COUNT', of the strategy `parameter_server`: that rank is gone
(SIGKILL) in its COUNT-th call of those in _CALLS, counted from the kill before;
of several the next is for whichever process is there, also one started earlier.
Until the last a gradient takes _PAUSE longer, or the run would be over first.

ANP_BATCHES='FOLDER': there each process writes, before it makes a step, the step, its
generation, and the rows and numbers of the images of tests.user_source:Numbered.

ANP_PAUSE='SECONDS': each step takes so much longer.

ANP_STALL='RANK STEP': that rank's input never gives the batch of that step.

ANP_BAD_READ='RANK STEP': that rank's disk cannot read that step's checkpoint.

ANP_ROUND='SECONDS': so long is a round of --mode=benchmark.

ANP_TROUBLE='FILE': while that file says 'RANK disk', that rank's disk reads slowly; 'RANK
loader', it never gives a file; 'RANK save', what it writes of a checkpoint gets to no disk.

ANP_HOSTS='PREFIX': each rank is on a host of its own, whose network `ip netns add` has made.

ANP_STUCK='RANK WHERE': that rank never gets further than 'import', of JAX, or
'devices', which it has opened.
"""

import ctypes
import importlib
import os
import pathlib
import runpy
import signal
import socket
import sys
import threading
import time

import numpy as np
from PIL import Image

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_SERVER = 'anp_jax.runtimes.parameter_server.'
_TRANSPORT = 'anp_jax.runtimes.transport'
# Module, class, method, and whether it has done its work when the end comes.
_CALLS = {
  'pull': (_TRANSPORT, 'Client', 'get', True),  # of one server's slice
  'compute': (_SERVER + 'gradient_worker', 'Worker', 'compute', False),
  'push': (_TRANSPORT, 'Client', 'put', True),  # to one server of two
  'apply': (_SERVER + 'slice_optimizer', 'SliceOptimizer', 'apply', False),
  'save': ('anp_jax.checkpoint.manager', 'Checkpoints', 'save', True),
}
_PAUSE = 0.3  # seconds
_SLOW = 0.4  # seconds, a slow disk reads a file


def _kill_in_phase():
  from anp_jax import cluster

  log = pathlib.Path(os.environ['ANP_KILL_LOG'])
  done = log.read_text().count('\n') if log.exists() else 0
  kills = os.environ['ANP_KILL'].split(';')[done:]
  if not kills:
    return
  rank, phase, count, name = kills[0].split()
  left = int(count)
  real = cluster.Processes.heartbeat

  def heartbeat(self, now, step=0):
    nonlocal left
    real(self, now, step)
    if now != phase or self.index != int(rank):
      return
    left -= 1
    if left == 0:
      # A little later, to be in the middle of it.
      timer = threading.Timer(0.02, strike, (self,))
      timer.daemon = True
      timer.start()
      if phase in ('step', 'joining'):
        timer.join()  # so short that it would be over first

  def strike(self):
    nonlocal left
    if self._watchdog.state()['phase'] != phase:
      left = 1  # it is over already: the next one
      return
    with log.open('a') as f:
      f.write(f'{rank} {phase} {count} {name}\n')
    os.kill(os.getpid(), getattr(signal, f'SIG{name}'))

  cluster.Processes.heartbeat = heartbeat


def _kill_in_call():
  rank = _rank()
  log = pathlib.Path(os.environ['ANP_KILL_LOG'])
  kills = os.environ['ANP_KILL_CALL'].split(';')
  lock, counted = threading.Lock(), {}

  def strike(name):
    with lock:
      done = log.read_text().count('\n') if log.exists() else 0
      if done == len(kills):
        return False
      which, call, count = kills[done].split()
      if (which, call) == (rank, name):
        counted[done] = counted.get(done, 0) + 1
      if counted.get(done) == int(count):
        with log.open('a') as f:
          f.write(f'{kills[done]}\n')
        os.kill(os.getpid(), signal.SIGKILL)
      return True

  def wrapped(name, real, late):
    def call(*args, **kwargs):
      if not late and strike(name) and name == 'compute':
        time.sleep(_PAUSE)
      result = real(*args, **kwargs)
      if late:
        strike(name)
      return result

    return call

  for name, (module, owner, method, late) in _CALLS.items():
    owner = getattr(importlib.import_module(module), owner)
    setattr(owner, method, wrapped(name, getattr(owner, method), late))


def _stall():
  from anp_jax.data.input import feed

  rank, step = map(int, os.environ['ANP_STALL'].split())
  real = feed.Feed.__next__
  reads = 0

  def stall_here(self):
    import jax

    nonlocal reads
    reads += 1
    if jax.process_index() == rank and reads == step:
      threading.Event().wait()
    return real(self)

  feed.Feed.__next__ = stall_here


def _record_batches():
  from anp_jax import run
  from anp_jax.system import files
  from tests import user_source

  path = pathlib.Path(os.environ['ANP_BATCHES']) / f'{time.time_ns()}.jsonl'
  path.parent.mkdir(exist_ok=True)
  real = run.Run.compile

  def local(array):
    return np.concatenate([np.asarray(shard.data) for shard in array.addressable_shards])

  def recorded(batches, step, generation):
    for batch in batches:
      step += 1
      numbers = user_source.numbers(local(batch['image']))
      rows = local(batch['row']).tolist()
      line = {'step': step, 'generation': generation, 'rows': rows, 'numbers': numbers}
      files.append_json_line(str(path), line)
      yield batch

  def compile_and_record(self, state):
    compiled, batches = real(self, state)
    step, generation = self.recorder.start_step, self._processes.generation.number
    return compiled, recorded(batches, step, generation)

  run.Run.compile = compile_and_record


def _pause_in_steps():
  from anp_jax import cluster

  real = cluster.Processes.heartbeat

  def heartbeat(self, now, step=0):
    real(self, now, step)
    if now == 'step':
      time.sleep(float(os.environ['ANP_PAUSE']))

  cluster.Processes.heartbeat = heartbeat


def _shorten_rounds():
  from anp_jax.tools.trials import benchmark

  benchmark._ROUND_SECONDS = float(os.environ['ANP_ROUND'])


def _get_stuck():
  rank, where = os.environ['ANP_STUCK'].split()
  if f'--process_id={rank}' not in sys.argv:
    return
  if where == 'import':
    sys.meta_path.insert(0, _Hangs())
    return
  import jax

  real = jax.local_devices
  jax.local_devices = lambda: real() and threading.Event().wait()


class _Hangs:
  """A file system that does not answer."""

  def find_spec(self, name, *_):
    if name == 'jax':
      threading.Event().wait()


def _fail_to_read():
  import orbax.checkpoint as ocp

  rank, step = os.environ['ANP_BAD_READ'].split()
  if f'--process_id={rank}' not in sys.argv:
    return
  real = ocp.StandardCheckpointHandler.restore

  def restore(self, directory, *args, **kwargs):
    if step in pathlib.Path(directory).parts:
      raise OSError('Input/output error')
    return real(self, directory, *args, **kwargs)

  ocp.StandardCheckpointHandler.restore = restore


def _suffer():
  import orbax.checkpoint as ocp

  from anp_jax.data.sources import stored_images

  path = pathlib.Path(os.environ['ANP_TROUBLE'])
  rank = _rank()
  read, save = stored_images.read_file, ocp.StandardCheckpointHandler.async_save

  def suffers(trouble):
    return path.read_text() == f'{rank} {trouble}'

  def read_file(*args):
    while suffers('loader'):
      time.sleep(0.05)
    time.sleep(_SLOW * suffers('disk'))
    return read(*args)

  class Flush:
    def result(self, timeout=None):
      while suffers('save'):
        time.sleep(0.05)

  async def async_save(*args, **kwargs):
    return [*await save(*args, **kwargs), Flush()]

  stored_images.read_file, ocp.StandardCheckpointHandler.async_save = read_file, async_save


def _move_to_node():
  # JAX listens at the address of the host's name.
  name = os.environ['ANP_HOSTS'] + _rank()
  libc = ctypes.CDLL(None, use_errno=True)
  new_mounts, new_name, private = 0x20000, 0x4000000, 1 << 18
  recursive, bind, network = 0x4000, 0x1000, 0x40000000
  with open(f'/run/netns/{name}') as f:
    calls = (
      libc.setns(f.fileno(), network),
      libc.unshare(new_mounts | new_name),
      libc.mount(None, b'/', None, recursive | private, None),
      libc.mount(f'/etc/netns/{name}/hosts'.encode(), b'/etc/hosts', None, bind, None),
    )
  assert not any(calls), os.strerror(ctypes.get_errno())
  socket.sethostname(name)


def _rank():
  return next(a.partition('=')[2] for a in sys.argv if a.startswith('--process_id='))


def _draw_no_curves():
  """The figure takes longer than all steps of a tiny run."""
  from anp_jax.reporting.run_page import curves

  curves.plot = lambda path, *_: Image.new('L', (1, 1)).save(path)


_FAULTS = {
  'ANP_HOSTS': _move_to_node,
  'ANP_KILL': _kill_in_phase,
  'ANP_BATCHES': _record_batches,
  'ANP_PAUSE': _pause_in_steps,
  'ANP_KILL_CALL': _kill_in_call,
  'ANP_STALL': _stall,
  'ANP_BAD_READ': _fail_to_read,
  'ANP_TROUBLE': _suffer,
  'ANP_ROUND': _shorten_rounds,
  'ANP_STUCK': _get_stuck,
}

if __name__ == '__main__':
  sys.path.insert(0, str(_ROOT))
  _draw_no_curves()
  for variable, install in _FAULTS.items():
    if os.environ.get(variable):
      install()
  sys.argv = sys.argv[1:]
  runpy.run_path(sys.argv[0], run_name='__main__')
