"""Nodes whose copies of the data set differ do not train together."""

import itertools

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
      process = launching.start(
        launching.ROOT / 'main.py',
        *arguments,
        f'--coordinator=127.0.0.1:{port}',
        '--num_processes=2',
        f'--process_id={rank}',
        folder=node,
        JAX_NUM_CPU_DEVICES='1',
      )
      processes.append(process)
    return processes

  yield begin
  for process in processes:
    process.kill()
    process.wait()


def _refusal(process):
  """What a rank wrote that is refused."""
  texts = process.communicate(timeout=120)
  assert process.returncode == 2, texts
  return '\n'.join(texts)


def test_one_missing_image_ends_both(start):
  ranks = start(lambda root: (root / 'validation/misty_morning/3.png').unlink())
  first, second = map(_refusal, ranks)
  assert 'has other evaluation data than rank 0 on ' in first
  assert "7 examples of the class 'misty_morning', there 8" in first
  assert 'Traceback' not in first + second


def test_a_worker_of_other_classes_leaves(start):
  """And with it the run, as it is a server too."""
  keys = {'strategy.name': 'parameter_server', 'strategy.servers': '2'}
  server, worker = start(_rename, **keys, **{'optimizer.name': 'momentum'})
  assert f'rank 1 has other training data than rank 0: {_RENAMED}' in _refusal(worker)
  assert _RENAMED in _refusal(server)


def test_a_ring_of_other_classes_ends(start):
  ranks = start(
    _rename,
    **{
      'strategy.name': 'model_ring',
      'strategy.models': "('seed=1', 'seed=2')",
      'duration': '3 epochs',
      'eval.every': '1 epochs',
      'batch_size': '4',
    },
  )
  first, _ = map(_refusal, ranks)
  assert _RENAMED in first
