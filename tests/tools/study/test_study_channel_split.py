"""The study of split convolutions: what their cost model predicts, and their mesh."""

import json

import numpy as np
import pytest

from anp_jax.runtimes.calibration import costs as costs_lib
from anp_jax.tools.study import grid, study_results, study_runner, study_table
from tests import splitting, study_runs


def _run(folder, costs, plan, helpers=()):
  """Reads a run of 32 images a step, whose plan was measured first."""
  saved = {'key': {'helpers': list(helpers)}, 'costs': costs.to_json(), 'plan': plan}
  (folder / 'channel_split.json').write_text(json.dumps(saved))
  train = [{'step': 2, 'seconds': 8.0, 'images_per_second': 8.0}]
  study_runs.write(folder, train, [{'step': 2, 'anp_top1': 0.5}], batch_size=32)
  return study_results.read(str(folder))


def _costs():
  """One second of rest; 16 features, 4 and 2 a second on the two devices."""
  return splitting.costs({'conv': splitting.layer(4, 2, features=16, output=800)})


def test_rates_are_compared_with_those_of_the_cost_model(tmp_path):
  run = _run(tmp_path, _costs(), {'conv': [11, 5]})
  assert run.predicted == pytest.approx(32 / _costs().step_seconds({'conv': (11, 5)}))
  # The ideal: a second, and 16 features at 6 a second.
  assert run.ideal == pytest.approx(5 / (1 + 16 / 6))
  runs = {grid.Cell('channel_split', 2, 1, 0): run}
  head, row = study_table.speed(study_results.points(list(runs), runs, {}), ())
  cells = dict(zip(head, row))
  assert cells['images/s'] == '8' and cells['ideal'] == '1.36'
  assert cells['predicted'] == f'{run.predicted:.0f}'


def test_the_ideal_of_offload_devices_has_their_transfers(tmp_path):
  fields = {**_costs().to_json(), 'unsplit': (5.0,)}
  costs = costs_lib.OffloadCosts.from_json(fields)
  run = _run(tmp_path, costs, {'conv': [11, 5]}, ['cpu:1'])
  assert run.ideal == pytest.approx(5 / (1 + 16 / 6))
  assert np.isfinite(run.predicted)


@pytest.mark.parametrize(
  'recipe, strategy, mesh',
  [
    ('configs/lenet.py', 'channel_split', (1, -1)),
    ('configs/channel_split_cifar10.py', 'sync', (-1, 1)),
    ('configs/channel_split_cifar10.py', 'channel_split', (1, -1)),
  ],
)
def test_each_strategy_has_the_mesh_that_it_needs(recipe, strategy, mesh):
  study = study_runner.Study(recipe, {'data.source': 'synthetic'}, 'folder')
  config = study.config(grid.Cell(strategy, 2, 1, 0))
  assert (config.mesh.data, config.mesh.model) == mesh
  typed = study_runner.Study(recipe, {'data.source': 'synthetic', 'mesh.data': '2'}, 'folder')
  assert typed.config(grid.Cell(strategy, 2, 1, 0)).mesh.data == 2
