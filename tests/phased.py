"""main.py that signals itself in a named phase, and writes down that it did.

ANP_KILL='RANK PHASE COUNT SIGNAL', for example '1 saving 2 TERM': rank 1 sends
itself SIGTERM when it begins to save for the second time. Of several, with a
semicolon between, each start does the first that was not done yet: ANP_KILL_LOG
names the file that gets a line once the signal is sent.

ANP_STALL='RANK STEP': that rank's input never gives the batch of that step.
"""

import os
import pathlib
import runpy
import signal
import sys
import threading

_ROOT = pathlib.Path(__file__).resolve().parents[1]


def _kill_in_phase(cluster):
  log = pathlib.Path(os.environ['ANP_KILL_LOG'])
  done = log.read_text().count('\n') if log.exists() else 0
  wanted = os.environ['ANP_KILL'].split(';')[done:]
  if not wanted:
    return
  rank, phase, count, name = wanted[0].split()
  left = int(count)
  real = cluster.Processes.beat

  def beat(self, now, step=0):
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

  def strike(self):
    # The phase that it is in, not the one that was asked for.
    found = self._watch.state()['phase']
    with log.open('a') as f:
      f.write(f'{rank} {found} {count} {name}\n')
    os.kill(os.getpid(), getattr(signal, f'SIG{name}'))

  cluster.Processes.beat = beat


def _stall():
  from anp_jax.data import feed

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


if __name__ == '__main__':
  sys.path.insert(0, str(_ROOT))
  if os.environ.get('ANP_KILL'):
    from anp_jax import cluster

    _kill_in_phase(cluster)
  if os.environ.get('ANP_STALL'):
    _stall()
  sys.argv = sys.argv[1:]
  runpy.run_path(sys.argv[0], run_name='__main__')
