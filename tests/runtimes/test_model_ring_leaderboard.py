"""Which models stay in a ring, and what their scores show."""

import pytest

from anp_jax.runtimes.model_ring import controller, leaderboard as leaderboard_lib
from tests import model_rings


def test_models_enter_in_their_order_while_there_is_room():
  policy = controller.AdmissionPolicy(range(4), max_in_ring=2)
  assert policy.first_models() == [0, 1]
  assert [policy.next_model() for _ in range(3)] == [0, 1, None]
  policy.inside.remove(0)
  assert [policy.next_model() for _ in range(2)] == [2, None]
  policy.inside.clear()
  assert [policy.next_model() for _ in range(2)] == [3, None]


def test_a_model_that_saved_nothing_enters_a_resumed_ring_before_its_turn():
  policy = controller.AdmissionPolicy([1, 3], max_in_ring=2)
  policy.inside |= {0, 2}  # they were restored, and 2 may wait for 1
  assert policy.next_model() == 1
  assert policy.next_model() is None


def _board(tmp_path, halving, laps, scores, models=6):
  config = model_rings.config(
    tuple(f'seed={i}' for i in range(models)), **{'strategy.halving': halving}
  )
  board = model_rings.leaderboard(tmp_path, config, laps)
  for (model, k), value in scores.items():
    board.add(model, k, 10 * k, {'anp_top1': value})
  return board


@pytest.mark.parametrize('halving, survivors', [(2, [1, 1, 2, 2, 3]), (3, [1, 1, 1, 2, 2])])
def test_halving_rounds_up(tmp_path, halving, survivors):
  """The best 1/h of one model, two, three ... go on (docs/strategies.md)."""
  for count, most in enumerate(survivors, 1):
    for place in range(count):  # of the last model among all, from the best
      scores = {(m, 1): -float(m + (m >= place)) for m in range(count - 1)}
      scores[count - 1, 1] = -float(place)
      folder = tmp_path / f'{count} {place}'
      folder.mkdir()
      board = _board(folder, halving, halving**2, scores)
      want = leaderboard_lib.GO_ON if place < most else leaderboard_lib.RETIRED
      assert board.decide(count - 1, 1) == want, (count, place)


def test_halving_is_a_function_of_the_record(tmp_path):
  board = _board(tmp_path, 2, 8, {(0, 1): 0.5, (1, 1): 0.4, (2, 1): 0.6})
  assert [k for k in range(9) if board._rungs.is_rung(k)] == [1, 2, 4]
  # Of one the best half is one, of two one, of three two.
  assert [board.decide(m, 1) for m in (0, 1, 2)] == [
    leaderboard_lib.GO_ON,
    leaderboard_lib.RETIRED,
    leaderboard_lib.GO_ON,
  ]
  assert board.decide(4, 1) == leaderboard_lib.WAIT  # for 3 and its own score
  board.add(4, 1, 10, {'anp_top1': 0.1})
  assert board.decide(4, 1) == leaderboard_lib.WAIT
  board.fail(3, 5, 'is not finite')
  assert board.decide(4, 1) == leaderboard_lib.RETIRED
  assert board.decide(3, 1) == leaderboard_lib.FAILED
  # What a later one brings changes nothing: its order is its number.
  board.add(5, 1, 10, {'anp_top1': 0.9})
  assert board.decide(2, 1) == leaderboard_lib.GO_ON
  # At the second rung those that left are not waited for.
  board.add(2, 2, 20, {'anp_top1': 0.7})
  assert board.decide(2, 2) == leaderboard_lib.WAIT
  board.add(0, 2, 20, {'anp_top1': 0.8})
  assert board.decide(2, 2) == leaderboard_lib.RETIRED
  assert board.status(2, 8) == leaderboard_lib.RETIRED
  assert board.decide(0, 3) == leaderboard_lib.GO_ON
  # Read again, a torn line left out, it decides alike.
  with open(tmp_path / 'model_ring.jsonl', 'a') as f:
    f.write('{"model": 0, "la')
  again = _board(tmp_path, 2, 8, {(0, 4): 0.9})
  again = _board(tmp_path, 2, 8, {})
  assert again.decide(2, 2) == leaderboard_lib.RETIRED
  assert again.last_scores(0)['laps'] == 4
