"""A run over several processes is the run of one, on real processes."""

import json
import os
import pathlib
import socket
import subprocess
import sys

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
  for child, (out, err) in zip(children, results):
    assert child.returncode == 0, out + err
  return [json.loads(out.strip().splitlines()[-1]) for out, _ in results]


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
