"""Nodes whose copies of the data set differ do not train together."""

import itertools
import os
import subprocess
import sys

import pytest

from tests import builders, launching

pytestmark = pytest.mark.multiprocess

_RENAMED = "class 1 is 'misty morning', there it is 'misty_morning'"


def _rename(root):
  for split in ('train', 'validation'):
    (root / split / 'misty_morning').rename(root / split / 'misty morning')


@pytest.fixture
def start(tmp_path):
  """Starts two ranks, each with a copy of the set under one path."""
  processes = []

  def begin(change, **keys):
    port = launching.free_port()
    for rank in range(2):
      node = tmp_path / f'node{rank}'
      for folder in itertools.product(('train', 'validation'), ('fog', 'misty_morning')):
        photos = (builders.encode_image(builders.random_pixels(16, 16, i)) for i in range(8))
        files = {f'{i}.png': photo for i, photo in enumerate(photos)}
        builders.write_tree(node.joinpath('set', *folder), files)
      if rank:
        change(node / 'set')
      values = {
        'data.source': 'folder',
        'data.path': '/proc/self/cwd/set',
        'duration': '100000 steps',
        'batch_size': '8',
        **keys,
      }
      arguments = [
        a.replace('=configs/', f'={launching.ROOT}/configs/')
        for a in launching.arguments(tmp_path / 'run', **values)
      ]
      with open(tmp_path / f'{rank}.log', 'w') as log:
        processes.append(
          subprocess.Popen(
            [
              sys.executable,
              str(launching.ROOT / 'main.py'),
              *arguments,
              f'--coordinator=127.0.0.1:{port}',
              '--num_processes=2',
              f'--process_id={rank}',
            ],
            cwd=node,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, 'JAX_NUM_CPU_DEVICES': '1'},
          )
        )
    return processes, lambda rank: (tmp_path / f'{rank}.log').read_text()

  yield begin
  for process in processes:
    process.kill()
    process.wait()


def test_one_missing_image_ends_both(start):
  processes, log = start(lambda root: (root / 'validation/misty_morning/3.png').unlink())
  assert [p.wait(120) for p in processes] == [2, 2], log(0)
  assert 'has other evaluation data than rank 0 on ' in log(0)
  assert "7 examples of the class 'misty_morning', there 8" in log(0)
  assert 'Traceback' not in log(0) + log(1)


def test_a_worker_of_other_classes_leaves(start):
  """And with it the run, as it is a server too."""
  keys = {'strategy.name': 'parameter_server', 'strategy.servers': '2'}
  processes, log = start(_rename, **keys, **{'optimizer.name': 'momentum'})
  assert processes[1].wait(120) == 2, log(1)
  assert f'rank 1 has other training data than rank 0: {_RENAMED}' in log(1)
  assert processes[0].wait(60) == 2, log(0)
  assert _RENAMED in log(0)


def test_a_ring_of_other_classes_ends(start):
  processes, log = start(
    _rename,
    **{
      'strategy.name': 'model_ring',
      'strategy.models': "('seed=1', 'seed=2')",
      'duration': '3 epochs',
      'eval.every': '1 epochs',
      'batch_size': '4',
    },
  )
  assert [p.wait(120) for p in processes] == [2, 2], log(0)
  assert _RENAMED in log(0)
