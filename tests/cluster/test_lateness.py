"""Which process is late, and by what: from the sums that each sends."""

import socket
import types

import pytest

from anp_jax.cluster import activity, lateness
from tests import coordinating


def _row(rank, **values):
  kinds = ('input', 'computing')
  name = f'rank {rank} on node{rank}'
  row = lateness.Row(name, 'step', 100, 0.01, 0.5, 1.0, 99.0, cpu=0.5, compared=kinds)
  return row._replace(**values)


def _rows(*changed, count=4):
  """Rows of processes that all are alike, but for those given."""
  rows = {row.name: row for row in map(_row, range(count))}
  return [*(rows | {row.name: row for row in changed}).values()]


@pytest.mark.parametrize(
  'changed, text',
  [
    ([], 'no process is late'),
    ([_row(2, silence=5)], 'rank 2 on node2 has been silent for 5 s'),
    ([_row(2, silence=2.5)], 'no process is late'),
    # The others wait for the first two in a sum.
    (
      [
        _row(0, phase='input', seconds=7),
        _row(1, phase='input', seconds=9),
        _row(2, seconds=9),
        _row(3, seconds=9),
      ],
      'rank 0 on node0, rank 1 on node1 have been waiting for input for 9 s',
    ),
    ([_row(3, phase='saving', seconds=6)], 'rank 3 on node3 has been saving for 6 s'),
    # Steps, or evaluations, that are long.
    (
      [_row(rank, seconds=6 + rank) for rank in range(4)],
      'no process is late; all have been in one step for 6 s',
    ),
    # The others wait for one that compiles.
    (
      [_row(0, phase='compiling', seconds=9), *(_row(rank, seconds=9) for rank in (1, 2, 3))],
      'no process is late',
    ),
    ([_row(3, phase='compiling', seconds=60)], 'no process is late'),
    ([_row(3, phase='spare', silence=60)], 'no process is late'),
    # Of 100 ms, 12 ms more than the others are late, and 9 ms are not.
    (
      [_row(1, input=13, rest=87)],
      'rank 1 on node1 is late in input: 13 ms a step, the others 1 ms',
    ),
    ([_row(1, input=10, rest=90)], 'no process is late'),
    # 0.5 of a core over 100 ms are 50 ms, and 62 ms are 1.24 times as much.
    (
      [_row(1, cpu=0.2, delay=0.5)],
      'rank 1 on node1 is late in computing: 70 ms a step, the others 50 ms',
    ),
    ([_row(1, cpu=0.5, delay=0.12)], 'no process is late'),
    # It writes the log, and waits for the others in half of each step.
    (
      [_row(rank, cpu=0.4 if rank == 0 else 0.2) for rank in range(4)],
      'no process is late; all wait for the network for 59% of a step',
    ),
    ([_row(1, cpu=0.2, delay=0.5, compared=['input'])], 'no process is late'),
    ([_row(1, cpu=0.2, delay=0.5, pauses=(0, 25, 0))], 'no process is late'),
    # Nearly all of the window is an evaluation, or nothing was spent on steps.
    (
      [_row(i, input=1 + 2 * i, rest=0, pauses=(9000, 0, 0)) for i in range(4)],
      'no process is late',
    ),
    ([_row(i, input=0, rest=0) for i in range(4)], 'no process is late'),
    # Each makes steps of its own: only one that is stuck is named.
    ([_row(rank, input=30 * rank, compared=()) for rank in range(4)], 'no process is late'),
    (
      [
        _row(rank, phase='saving' if rank == 2 else 'step', seconds=6, compared=())
        for rank in range(4)
      ],
      'rank 2 on node2 has been saving for 6 s',
    ),
    # Another number of its steps fell into the window.
    ([_row(1, rest=132)], 'no process is late'),
    (
      [_row(rank, cpu=0.1) for rank in range(4)],
      'no process is late; all wait for the network for 89% of a step',
    ),
    (
      [_row(rank, cpu=0.1, round_trip=20 if rank == 2 else 0.1) for rank in range(4)],
      'rank 2 on node2 is late in the network: 20 ms there and back, the others 0 ms',
    ),
    # The others wait for one that has not written its part of a checkpoint.
    (
      [_row(rank, phase='saving' if rank == 1 else 'committing', seconds=9) for rank in range(4)],
      'rank 1 on node1 has been saving for 9 s',
    ),
  ],
)
def test_verdicts(changed, text):
  assert lateness.verdict(_rows(*changed)) == text


def test_what_exceeds_the_median_of_the_others():
  """Steps take 100 ms, with input of 1, 1, 13 and 4 ms, of cores 50, 50, 50 and 70 ms."""
  table = _rows(_row(2, input=13, rest=87), _row(3, input=4, cpu=0.6, delay=0.1, rest=96))
  names = [row.name for row in table]
  assert lateness.excess(table) == pytest.approx(dict(zip(names, (0, 0, 12, 20), strict=True)))
  on_gpus = [row._replace(compared=['input']) for row in table]
  assert lateness.excess(on_gpus) == dict(zip(names, (0, 0, 12, 3), strict=True))
  alone = [row._replace(compared=()) for row in table[1:]]
  assert lateness.excess([table[0], *alone]) == {}


def test_a_verdict_is_logged_once_it_has_lasted_and_when_it_changes():
  lines = []
  judge = lateness.Judge(lines.append)
  for second in range(20):
    late = _row(1, input=30 + second) if 5 <= second < 15 else _row(1)
    judge.look(_rows(late, *([_row(2, silence=4)] if second == 2 else [])), second)
  assert lines == [
    'rank 1 on node1 is late in input: 38 ms a step, the others 1 ms',
    'no process is late',
  ]


def _state(at, cpu, delay, **spent):
  state = {'phase': 'step', 'step': at, 'seconds': 0.2, 'spent': spent}
  return state | {'cpu': cpu, 'delay': delay, 'round_trip': 0.003}


def test_rows_are_differences_of_the_last_heartbeats():
  run = coordinating.members_of((0, 1), 2, at=10.0)
  member = run[1]
  member.receive(_state(40, 5.0, 1.0, input=1.0, step=8.0, saving=1.0))
  member.last_heard = 14.0
  member.receive(_state(60, 9.0, 1.5, input=1.2, step=10.8, saving=1.6, evaluating=0.4))
  first, second = lateness.rows(run, now=15.0)
  assert first == lateness.Row('rank 0 on node0', 'starting', 0, 0.0, 5.0)
  assert second[:2] == ('rank 1 on node1', 'step')
  want = 60, 0.2, 1.0, 10.0, 140.0
  assert second[2:7] == pytest.approx(want)  # 20 steps in 4 s
  assert second.pauses == pytest.approx([20.0, 30.0, 0.0])
  assert second[8:11] == pytest.approx((1.0, 0.125, 3.0))
  assert second.compared == ('input', 'computing')
  member.info['steps_together'] = False  # the steps of two workers have nothing in common
  none = {'input': 0.0, 'rest': 0.0, 'pauses': (), 'compared': ()}
  assert lateness.rows(run, now=15.0)[1] == second._replace(**none)
  run.ranks = [0]
  assert lateness.rows(run, now=15.0)[1].phase == 'spare'


def test_steps_of_the_run_before_are_none_of_this_one():
  """A run that is resumed comes to its first step without making one."""
  run = coordinating.members_of((0, 1), 2, at=10.0)
  for rank in range(2):
    run[rank].receive(_state(0, 1.0, 1.0) | {'phase': 'starting'})
    run[rank].last_heard = 14.0
    run[rank].receive(_state(400, 2.0, 1.0) | {'phase': 'compiling'})
  rows = lateness.rows(run, now=15.0)
  assert not any(row.compared for row in rows)
  assert lateness.verdict(rows) == lateness.NOBODY


def test_activity_adds_up_phases_and_what_threads_wait_for_a_core(tmp_path):
  now = types.SimpleNamespace(seconds=100.0)
  sums = activity.Activity(lambda: now.seconds, str(tmp_path))

  def wait(seconds, **threads):
    now.seconds += seconds
    for thread, ns in threads.items():
      (tmp_path / thread).mkdir(exist_ok=True)
      (tmp_path / thread / 'schedstat').write_text(f'7000 {ns} 3\n')

  wait(2, a=1 * 10**9, b=2 * 10**9)
  sums.begin('input')
  wait(1)
  assert sums.sample()['spent'] == {'starting': 2.0, 'input': 1.0}
  sums.begin('step')
  wait(3, a=4 * 10**9)
  (tmp_path / 'b' / 'schedstat').unlink()  # a thread has ended
  (tmp_path / 'b').rmdir()
  sums.begin('input')
  wait(0.5)
  sample = sums.sample()
  assert sample['spent'] == {'starting': 2.0, 'input': 1.5, 'step': 3.0}
  assert sample['delay'] == 6.0 and sample['cpu'] > 0


def test_a_round_trip_is_that_of_connections_to_other_addresses(monkeypatch):
  monkeypatch.setattr(activity, '_CONNECTIONS', 1000)  # other tests may leave some open
  pair = socket.socketpair()
  with (
    pair[0],
    pair[1],
    socket.create_server(('127.0.0.1', 0)) as listening,
    socket.create_connection(listening.getsockname(), source_address=('127.0.0.2', 0)) as first,
    listening.accept()[0] as second,
  ):
    first.sendall(b'question')
    second.recv(8)
    assert 0 < activity.round_trip() < 0.2
    to_itself = socket.create_connection(listening.getsockname())
    first.close()
    second.close()
    with to_itself, listening.accept()[0]:
      assert activity._round_trip(to_itself.fileno()) == 0
