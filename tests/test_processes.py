"""A run over several processes is the run of one, on real processes."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import numpy as np
from PIL import Image
import pytest

from anp_jax import telemetry

_ROOT = pathlib.Path(__file__).resolve().parent.parent

# What a cluster's launcher will do: bring the processes together, then run.
_PROGRAM = """
import json, os, sys
import jax
address, count, index, devices, workdir, texts = sys.argv[1:]
jax.config.update('jax_num_cpu_devices', int(devices))
if int(count) > 1:
  jax.distributed.initialize(address, int(count), int(index))
from anp_jax import command_line, train
config = command_line.load('configs/resnet_anp.py:tiny', json.loads(texts))
print(json.dumps(train.run(config, workdir)))
# Without this, one that ends early is waited for by the others.
os._exit(0) if int(count) == 1 else jax.distributed.shutdown()
"""

_TEXTS = {
  'log.tensorboard': 'False',
  'log.every': '1 steps',
  'model.name': 'tests.user_network:PlainNet',
  'model.norm_group': '4',
  'data.synthetic_examples': '70',  # 70 do not divide by any batch below
}


def _free_port():
  with socket.socket() as s:
    s.bind(('127.0.0.1', 0))
    return s.getsockname()[1]


def _run(workdir, processes, devices, **texts):
  """Validation scores that each process returned."""
  results = []
  for code, out, err in _ended(workdir, processes, devices, **texts):
    assert code == 0, out + err
    results.append(json.loads(out.strip().splitlines()[-1]))
  return results


def _ended(workdir, processes, devices, **texts):
  """Exit status, standard output and standard error of each process."""
  address = f'127.0.0.1:{_free_port()}'
  texts = json.dumps({**_TEXTS, **texts})
  environment = {**os.environ, 'PYTHONPATH': str(_ROOT)}
  children = [
    subprocess.Popen(
      [
        sys.executable, '-c', _PROGRAM, address, str(processes), str(i),
        str(devices), str(workdir), texts,
      ],
      cwd=_ROOT, env=environment, stdout=subprocess.PIPE,
      stderr=subprocess.PIPE, text=True,
    )
    for i in range(processes)
  ]  # fmt: skip
  results = [c.communicate(timeout=90) for c in children]
  return [(c.returncode, *texts) for c, texts in zip(children, results)]


def _losses(workdir):
  lines = telemetry.read(str(workdir))
  return {(r['kind'], r['step']): r['loss'] for r in lines}


@pytest.mark.multiprocess
@pytest.mark.parametrize('processes, devices', [(2, 1), (2, 2), (4, 1)])
def test_processes_train_and_score_like_one(tmp_path, processes, devices):
  (alone,) = _run(tmp_path / 'one', 1, 1)
  scores = _run(tmp_path / 'many', processes, devices)
  assert all(s == scores[0] for s in scores)
  assert scores[0]['examples'] == alone['examples'] == 70
  wanted, found = _losses(tmp_path / 'one'), _losses(tmp_path / 'many')
  assert wanted.keys() == found.keys()
  for key, loss in wanted.items():
    # Sums over devices in another order, in float32, over 12 steps.
    assert found[key] == pytest.approx(loss, rel=1e-5), key


@pytest.mark.multiprocess
def test_run_goes_on_with_other_processes(tmp_path):
  _run(tmp_path / 'run', 2, 2, duration='8 steps')
  _run(tmp_path / 'run', 1, 1, duration='12 steps')
  lines = [r for r in telemetry.read(str(tmp_path / 'run'))]
  steps = [r['step'] for r in lines if r['kind'] == 'train']
  assert steps == list(range(1, 13))


@pytest.fixture
def photographs(tmp_path):
  """A tree of which one file is no image; the keys that name it."""
  rng = np.random.default_rng(0)
  for split, count in (('train', 24), ('validation', 8)):
    for i in range(count):
      path = tmp_path / 'tree' / split / f'class_{"ab"[i % 2]}' / f'{i:03}.png'
      path.parent.mkdir(parents=True, exist_ok=True)
      Image.fromarray(rng.integers(0, 256, (32, 32, 3), np.uint8)).save(path)
  (tmp_path / 'tree/train/class_b/003.png').write_bytes(b'no image')
  return {'data.source': 'folder', 'data.path': str(tmp_path / 'tree')}


@pytest.mark.multiprocess
def test_processes_count_damage_like_one(tmp_path, photographs):
  _run(tmp_path / 'one', 1, 1, **photographs)
  _run(tmp_path / 'many', 2, 1, **photographs)
  wanted, found = _losses(tmp_path / 'one'), _losses(tmp_path / 'many')
  assert wanted.keys() == found.keys()
  for key, loss in wanted.items():
    assert found[key] == pytest.approx(loss, rel=1e-5), key
  last = [telemetry.read(str(tmp_path / w))[-2] for w in ('one', 'many')]
  # 12 steps of 16 rows are eight epochs of 24.
  assert [r['damaged'] for r in last] == [8, 8]


@pytest.mark.multiprocess
def test_damage_ends_all_processes(tmp_path, photographs):
  """Also the one whose own rows are all whole."""
  ended = _ended(
    tmp_path / 'run', 2, 1, **photographs, **{'data.max_damaged': '0'}
  )
  for code, _, err in ended:
    assert code == 1 and 'config.data.max_damaged=0 allows' in err
