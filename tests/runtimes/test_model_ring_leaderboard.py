"""The record of a ring's scores, and the ranking that it gives."""

import math
import types
from unittest import mock

from anp_jax.runtimes.model_ring import (
  candidates as candidates_lib,
  controller as controller_lib,
  leaderboard as leaderboard_lib,
  ring as ring_lib,
)
from tests import model_rings


def _board(tmp_path, scores, models=4, metric='anp_top1'):
  config = model_rings.config(
    tuple(f'seed={i}' for i in range(models)), **{'checkpoint.best_metric': metric}
  )
  board = model_rings.leaderboard(tmp_path, config, 3)
  name = 'loss' if metric == 'loss' else 'anp_top1'
  for (model, k), value in scores.items():
    board.add(model, k, 10 * k, {name: value})
  return board


def _order(board):
  """The names of the models, the best first."""
  rows = board.table().splitlines()[2:]
  return [row.split('|')[2].strip() for row in rows]


def test_the_last_scores_rank_the_models(tmp_path):
  board = _board(tmp_path, {(0, 1): 0.9, (0, 2): 0.5, (1, 1): 0.6, (2, 1): math.nan})
  assert _order(board) == ['001', '000', '002', '003']  # 003 has no score yet
  assert board.best()['anp_top1'] == 0.6
  board.fail(1, 15, 'is not finite')
  assert _order(board) == ['000', '002', '003', '001']
  assert 'failed: is not finite' in board.table()


def test_a_loss_ranks_from_below(tmp_path):
  board = _board(tmp_path, {(0, 1): 2.0, (1, 1): 1.0, (2, 1): 3.0}, models=3, metric='loss')
  assert _order(board) == ['001', '000', '002']


def test_what_becomes_of_a_model(tmp_path):
  board = _board(tmp_path, {})
  assert [board.status(0, k) for k in (0, 1, 2, 3)] == 3 * ['goes on'] + ['finished']
  board.fail(0, 5, 'is not finite')
  assert board.status(0, 3) == leaderboard_lib.FAILED


def test_the_record_is_read_again_without_a_torn_line(tmp_path):
  board = _board(tmp_path, {(0, 1): 0.5, (0, 3): 0.7})
  board.fail(1, 5, 'is not finite')
  assert not board.add(0, 1, 10, {'anp_top1': 0.1})  # recorded already
  with open(tmp_path / 'model_ring.jsonl', 'a') as f:
    f.write('{"model": 0, "la')
  again = _board(tmp_path, {})
  assert again.missing_scores(0, 3) == [2]
  assert again.last_scores(0)['anp_top1'] == 0.7
  assert again.status(1, 1) == leaderboard_lib.FAILED
  assert again.table() == board.table()


def test_a_model_that_failed_before_its_first_save_does_not_begin_again(tmp_path):
  config = model_rings.config(('seed=0',))
  model_rings.leaderboard(tmp_path, config, 3).fail(0, 5, 'is not finite')
  (tmp_path / 'metrics.jsonl').write_text('{"kind": "train", "step": 5, "loss": 1.0}\n')
  events = []
  ring = types.SimpleNamespace(
    workdir=str(tmp_path),
    config=config,
    candidates=candidates_lib.create(config, 1),
    laps=ring_lib.Laps(3, 1),
    folder=lambda model: str(tmp_path),
  )
  runners, store = mock.MagicMock(ring=ring), mock.MagicMock()
  store.checkpoints(0).restore.return_value = None
  controller = controller_lib.RingController(runners, store, lambda *event: events.append(event))
  controller._enter(0)
  assert events == [] and (tmp_path / 'metrics.jsonl').read_text()
