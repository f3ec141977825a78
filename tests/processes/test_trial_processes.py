"""Trials over several processes: what they find is what one finds."""

import json

import numpy as np
import pytest

from tests import launching

pytestmark = pytest.mark.multiprocess


def _arguments(workdir, mode):
  keys = {'duration': '20 steps'} if mode == 'range_test' else {}
  return launching.arguments(workdir, f'--mode={mode}', **keys)


def test_a_range_test_of_two_processes_is_that_of_one(tmp_path):
  results = []
  for count in (1, 2):
    workdir = tmp_path / str(count)
    launching.run(tmp_path / f'logs{count}', count, _arguments(workdir, 'range_test'))
    path = workdir / 'range_test.json'
    results.append(json.loads(path.read_text()))
  alone, pair = results
  assert len(alone['losses']) > 10
  # Sums over devices in another order, in float32; what diverges enlarges it.
  np.testing.assert_allclose(alone['losses'][:10], pair['losses'][:10], rtol=1e-5)
  assert alone['rates'] == pair['rates']


def test_a_benchmark_of_two_processes_ends_with_one_page(tmp_path):
  workdir = tmp_path / 'run'
  arguments = _arguments(workdir, 'benchmark')
  texts = launching.run(tmp_path, 2, arguments, environment={'ANP_ROUND': '0.05'})
  values = json.loads((workdir / 'benchmark.json').read_text())
  assert values['devices'] == 2 and values['hardware']['processes'] == 2
  assert 'input wait' in texts[0] and 'input wait' not in texts[1]
