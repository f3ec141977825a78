"""`invariant`'s promise as a user meets it: main.py, processes, cores."""

import json
import os
import sys

import numpy as np
import pytest

from anp_jax.reporting import telemetry
from tests import builders, launching

pytestmark = pytest.mark.multiprocess

# Processes, devices of each, and the cores that they may use: the first alone,
# all, or an equal share of them for each process (`--bind`).
ONE_CORE, ALL_CORES = (1, 1, 'first'), (1, 1, 'all')
TWO, FOUR = (1, 2, 'all'), (1, 4, 'all')
BOUND, TWO_BY_TWO = (2, 1, 'bind'), (2, 2, 'bind')

_INVARIANT = {
  'strategy.name': 'invariant',
  'strategy.logical_shards': 4,  # with four devices, one of each
  'strategy.threads': 4,
  'log.tensorboard': False,
  'log.every': '1 steps',
  'checkpoint.keep_best': 2,
}
# The rate does not end with the run: one that goes on has the same.
_LENET = {
  'duration': '8 steps',
  'eval.every': '4 steps',
  'eval.batch_size': 90,
  'schedule.name': 'constant',
}
_RESNET = {
  'data.source': 'folder',
  'data.imbalance': 2.0,
  'data.balance': 'weights',
  'data.mixup': 0.2,
  'data.cutmix': 1.0,
  'data.max_damaged': 0.2,
  'ema': 0.9,
  'label_smoothing': 0.1,
  'optimizer.clip_norm': 0.5,
  'optimizer.weight_decay': 1e-3,
  'model.norm_group': 4,
  'duration': '8 steps',
  'eval.every': '4 steps',
  'eval.examples': True,
}


def _run(folder, recipe, keys, topology, *more):
  """Trains in FOLDER/run from a shell's command line; ends well."""
  processes, devices, cores = topology
  usable = sorted(os.sched_getaffinity(0))
  command = ['scripts/launch_local.sh', str(processes), f'--devices={devices}']
  if cores == 'first':
    command = ['taskset', '-c', str(usable[0]), *command]
  command += ['--bind'] * (cores == 'bind')
  command += [f'--config=configs/{recipe}', f'--workdir={folder / "run"}', *more]
  command += [f'--config.{k}={v}' for k, v in (_INVARIANT | keys).items()]
  return launching.command(*command, PYTHON=sys.executable).stdout


def _results(workdir):
  """Name to bytes: all weights, the metrics, and what an evaluation wrote."""
  results = {name: np.asarray(leaf).tobytes() for name, leaf in launching.weights(workdir).items()}
  clocks = ('time', 'seconds', 'images_per_second', 'input_wait')
  for row in telemetry.read(str(workdir)):
    numbers = {k: v for k, v in row.items() if k not in clocks}
    results[f'{row["kind"]} of step {row["step"]}'] = json.dumps(numbers)
  for path in workdir.glob('evaluation/*/*'):
    if path.name in ('scores.json', 'predictions.csv'):
      results[str(path.relative_to(workdir))] = path.read_bytes()
  results['best'] = sorted(p.name for p in (workdir / 'best').iterdir() if p.name.isdigit())
  return results


def _assert_same(workdir, expected):
  results = _results(workdir)
  assert results.keys() == expected.keys()
  assert not [name for name in expected if results[name] != expected[name]]


@pytest.fixture(scope='module')
def photographs(tmp_path_factory):
  """A tree of JPEG files of unlike classes; one of each cannot be read."""
  root = tmp_path_factory.mktemp('photographs')
  for split, counts in ('train', (40, 24, 12)), ('validation', (9, 8, 10)):
    for label, count in enumerate(counts):
      noise = (builders.random_pixels(44, 60, i) for i in range(count))
      files = {f'{i}.jpg': builders.encode_image(x, 'JPEG') for i, x in enumerate(noise)}
      builders.write_tree(root / split / f'class{label}', files | {'0.jpg': b'no image'})
  return root


@pytest.fixture(scope='module')
def lenet(tmp_path_factory):
  """A run of LeNet's shipped recipe on one core, in shards on one device."""
  folder = tmp_path_factory.mktemp('lenet')
  _run(folder, 'lenet.py', _LENET, ONE_CORE)
  results = _results(folder / 'run')
  expected = {'8/params/conv1/kernel', 'validation of step 8', 'best'}
  for name in ('scores.json', 'predictions.csv'):
    expected.add(f'evaluation/8-validation/{name}')
  assert expected <= results.keys()
  return folder, results


@pytest.mark.parametrize(
  'topology', [ALL_CORES, TWO_BY_TWO, *(builders.soak(topology) for topology in (TWO, FOUR, BOUND))]
)
def test_no_bit_depends_on_cores_devices_or_processes(tmp_path, lenet, topology):
  _run(tmp_path, 'lenet.py', _LENET, topology)
  _assert_same(tmp_path / 'run', lenet[1])


@pytest.mark.soak
def test_a_run_may_go_on_on_other_devices(tmp_path, lenet):
  for topology, steps in ((TWO_BY_TWO, 3), (FOUR, 5), (ALL_CORES, 8)):
    _run(tmp_path, 'lenet.py', _LENET | {'duration': f'{steps} steps'}, topology)
  results, expected = _results(tmp_path / 'run'), lenet[1]
  # A part's end is scored too, and so may be among the best.
  compared = [name for name in expected if name != 'best']
  assert set(compared) <= results.keys()
  assert not [name for name in compared if results[name] != expected[name]]


@pytest.mark.parametrize('topology', [FOUR, builders.soak(BOUND)])
def test_a_checkpoint_has_the_same_scores_on_any_devices(tmp_path, lenet, topology):
  folder, expected = lenet
  _run(folder, 'lenet.py', _LENET, topology, '--mode=evaluate', f'--output={tmp_path}')
  for file in ('scores.json', 'predictions.csv'):
    assert (tmp_path / file).read_bytes() == expected[f'evaluation/8-validation/{file}']


@pytest.mark.soak
@pytest.mark.parametrize('topology', [FOUR, TWO_BY_TWO])
def test_photographs_with_everything_on(tmp_path, photographs, topology):
  keys = _RESNET | {'data.path': photographs}
  _run(tmp_path / 'one', 'resnet_anp.py:tiny', keys, ONE_CORE)
  expected = _results(tmp_path / 'one' / 'run')
  assert 'evaluation/8-validation/predictions.csv' in expected
  _run(tmp_path / 'many', 'resnet_anp.py:tiny', keys, topology)
  _assert_same(tmp_path / 'many' / 'run', expected)
