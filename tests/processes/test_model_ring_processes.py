"""A ring over real processes; a killed one is started again."""

import json

import numpy as np
import pytest

from anp_jax.config import command_line
from anp_jax.reporting import telemetry
from anp_jax.runtimes.model_ring import spans as spans_lib
from tests import event_files, launching, model_rings

# The references in this process are compiled as the ranks are.
pytestmark = pytest.mark.multiprocess

MODELS = ('seed=1', 'seed=2', 'ema=0.9; optimizer.name=adam')
_KEYS = {
  'strategy.name': 'model_ring',
  'duration': '3 epochs',
  'eval.every': '1 epochs',
  'model.name': 'tests.user_network:PlainNet',
  'model.norm_group': '2',
  'schedule.warmup': '0 steps',
  'batch_size': '4',
  'data.image_size': '8',
  'data.resize': '8',
  'checkpoint.every': '5 steps',
}


def _arguments(folder, models, **keys):
  return launching.arguments(folder / 'run', **{**_KEYS, 'strategy.models': str(models), **keys})


def _config(arguments):
  overrides, _ = command_line.split_overrides(arguments)
  return command_line.load('configs/resnet_anp.py:tiny', overrides)


@pytest.mark.soak  # a killed node's ring and Slurm's are in CI
@pytest.mark.parametrize('processes, devices', [(2, 1), (2, 2), (3, 1)])
def test_models_travel_between_processes_and_end_as_if_alone(tmp_path, processes, devices):
  arguments = _arguments(tmp_path, MODELS, **{'log.tensorboard': 'True'})
  texts = launching.run(tmp_path, processes, arguments, devices)
  assert 'finished' in texts[0]
  stations = processes * devices
  sizes = json.loads((tmp_path / 'run' / 'model_ring.json').read_text())['parts']
  assert len(sizes) == stations
  model_rings.assert_same(tmp_path / 'run', _config(arguments), sizes, range(3))
  for index in range(3):
    _assert_shown(tmp_path / 'run' / 'models' / f'{index:03}')
  if stations > 2:
    return
  # Models alone travel: to the other station after each visit but the last, and
  # what a score needs where that is due at the other one.
  spans = spans_lib.read(str(tmp_path / 'run'))
  want = 0
  for model in range(3):
    leaves = model_rings.ended(tmp_path / 'run', model)
    scored = [v for k, v in leaves.items() if k.startswith(('params/', 'stats/'))]
    # Laps end at station 1; station 0 makes the last scores.
    scores = sum((model + lap) % 2 == 0 for lap in (1, 2)) + 1
    want += 5 * _size(leaves.values()) + scores * _size(scored)
  assert sum(s['bytes'] for s in spans if s['what'] == 'send') == want


def _assert_shown(folder):
  """Each line of metrics.jsonl is shown once by TensorBoard, and no other."""
  lines = telemetry.read(str(folder))
  want = {
    (f'{r["kind"]}/{name}', r['step']): [np.float32(value)]
    for r in lines
    for name, value in r.items()
    if name not in ('kind', 'step', 'time', 'epoch')
  }
  assert len(want) > 10 and event_files.points(folder / 'tensorboard') == want


def _size(leaves):
  return sum(leaf.nbytes for leaf in leaves)


def test_a_killed_node_is_started_again(tmp_path):
  arguments = _arguments(tmp_path, MODELS, duration='8 epochs', **{'log.tensorboard': 'True'})
  folder = tmp_path / 'run' / 'model_ring.jsonl'
  with launching.Ranks(tmp_path, 2, arguments) as ranks:
    launching.wait_until(
      lambda: folder.exists() and folder.read_text().count('\n') >= 5, 90, ranks.text
    )
    ranks.processes[1].kill()
    ranks.ends(75, -9)
  launching.run(tmp_path, 2, arguments)
  config = _config(arguments)
  model_rings.assert_same(tmp_path / 'run', config, (35, 35), range(3), 8)
  records = [json.loads(x) for x in folder.read_text().splitlines()]
  scored = sorted((r['model'], r['laps']) for r in records)
  assert scored == [(m, k) for m in range(3) for k in range(1, 9)]
  for model in range(3):
    model_dir = tmp_path / 'run' / 'models' / f'{model:03}'
    lines = telemetry.of_kind(str(model_dir), 'validation')
    assert len(lines) == len({r['step'] for r in lines}) == 8
    # What was not written out when it was killed is not there.
    points = event_files.points(model_dir / 'tensorboard')
    assert all(len(values) == 1 for values in points.values())
