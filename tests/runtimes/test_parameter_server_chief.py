"""What server 0 says when processes of a run with parameter servers are lost or come."""

import queue

from anp_jax.reporting import telemetry
from anp_jax.runtimes.parameter_server import parameter_server_run
from tests import serving

_GONE = 'has gone: its process was ended, or its host'


def test_losses_and_joins_are_told(tmp_path, config, monkeypatch, capsys):
  """Nobody waits for them, and nothing is computed again."""
  serving.on_devices(monkeypatch, 1)
  config = serving.config_of(config, **{**serving.FULL, 'duration': '3 steps'})
  boxes = [queue.SimpleQueue() for _ in range(4)]

  def come(rank):
    boxes[0].put((rank, {'endpoint': None, 'worker': [f'{rank}.a', 1, 'cpu']}, ''))

  come(1)  # no change: the run has begun with it
  boxes[0].put((1, None, f'rank 1 on b {_GONE}'))
  boxes[0].put((2, None, f'rank 2 on c {_GONE}'))  # before it said what it is
  boxes[0].put((3, {'endpoint': None, 'worker': ['3.a', 2, 'cpu']}, ''))  # is refused
  boxes[0].put((3, None, f'rank 3 on d {_GONE}'))
  come(3)  # the run has begun without it
  come(1)
  with serving.ThreadProcess(config, serving.place(0, 4), boxes) as processes:
    processes.hosts = ('a', 'b', 'c', '')
    parameter_server_run.run(config, str(tmp_path), processes)
  lost = [[f'rank 1 on b {_GONE}'], [f'rank 2 on c {_GONE}'], [], []]
  same = {'kind': 'restart', 'step': 0, 'seconds': 0.0, 'repeated': 0}
  assert telemetry.of_kind(str(tmp_path), 'restart') == [
    {**same, 'lost': why, 'processes': count} for why, count in zip(lost, (2, 1, 2, 3), strict=True)
  ]
  lines = [line for line in capsys.readouterr().out.splitlines() if 'going on' in line]
  end = 'from step 0; 0.0 s; 0 steps computed again'
  assert lines == [
    f'rank 1 on b {_GONE}: going on with 2 of 3 processes {end}',
    f'rank 2 on c {_GONE}: going on with 1 of 2 processes {end}',
    f'the processes have changed: going on with 2 processes {end}',
    f'the processes have changed: going on with 3 processes {end}',
  ]
