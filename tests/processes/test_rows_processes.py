"""A batch that processes divide by their speeds is that of one process."""

import json
import re

import pytest

from tests import launching, splitting

pytestmark = pytest.mark.multiprocess

_FLOAT64 = {
  'batch_size': '24',
  **launching.FLOAT64,
  'schedule.name': 'constant',
  'duration': '12 steps',
  'checkpoint.every': '6 steps',
}
_LINE = re.compile(r'rows     (\d+) \+ (\d+) of the 24 images of a step: predicted step time .*')


def _parts(texts):
  """The rows of both processes, as the first one says."""
  return [int(rows) for rows in _LINE.search(texts[0]).groups()]


def test_rows_are_measured_once_and_train_like_one_process(tmp_path):
  alone = tmp_path / 'alone'
  launching.run(alone, 1, launching.arguments(alone / 'run', **_FLOAT64), environment=launching.X64)

  def run(folder, **keys):
    keys = _FLOAT64 | {'strategy.rows': 'measured'} | keys
    arguments = launching.arguments(folder / 'run', **keys)
    return launching.run(folder, 2, arguments, environment=launching.X64)

  shared = tmp_path / 'shared'
  parts = _parts(run(shared, duration='6 steps'))
  assert sum(parts) == 24 and all(n >= 4 and n % 4 == 0 for n in parts)
  # The second machine turns out to be slower before the run goes on.
  path = shared / 'run' / 'rows.json'
  measured = json.loads(path.read_text())
  measured |= {'fixed': [0, 0], 'per_row': [1, 5]}
  path.write_text(json.dumps(measured))
  assert _parts(run(shared)) == [20, 4]
  splitting.assert_same_weights(shared / 'run', alone / 'run', '12/params/head/kernel')
