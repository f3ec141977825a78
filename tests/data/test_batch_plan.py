"""The rows, examples and crops of batches, over more than one epoch."""

import numpy as np
import pytest

from anp_jax.data.input import batch_plan


def _plan(config, rows, training, size=10, batch_size=4):
  return batch_plan.BatchPlan(config, size, batch_size, np.asarray(rows), training)


@pytest.mark.parametrize('rows', [[0, 1, 2, 3], [1, 3], [2]])
def test_weights_are_of_each_position(config, rows):
  """The last batch of 10 examples has rows 0 and 1; 2 and 3 are padding."""
  plan = _plan(config, rows, training=False)
  assert plan.steps == 3
  for step in range(3):
    positions, indices, weights = plan.indices(step)
    want = [step * 4 + row for row in rows]
    assert positions.tolist() == want
    assert weights.tolist() == [float(p < 10) for p in want]
    assert indices.tolist() == [min(p, 9) for p in want]


def test_crops_and_order_do_not_repeat_every_epoch(config):
  """Positions of 5 batches are 2 epochs; each cuts an example otherwise."""
  config.data.augment = 'crop'
  plan = _plan(config, range(4), training=True)
  positions, indices = (
    np.concatenate(parts) for parts in list(zip(*(plan.indices(step) for step in range(5))))[:2]
  )
  assert positions.tolist() == list(range(20))
  for epoch in indices.reshape(2, 10):
    assert sorted(epoch) == list(range(10))
  assert indices[:10].tolist() != indices[10:].tolist()
  views = plan.views(positions, np.full((20, 2), (200, 300)))
  boxes = np.asarray(views.boxes)
  first = {i: tuple(box) for i, box in zip(indices[:10], boxes[:10])}
  second = {i: tuple(box) for i, box in zip(indices[10:], boxes[10:])}
  assert all(first[i] != second[i] for i in range(10))
  assert (boxes[:10] != boxes[10:]).any(1).all()
