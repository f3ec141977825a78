"""Fine-tuning weights of timm on photographs: an interruption leaves no trace.

timm itself writes the weights, random ones. The photographs are the garments
of the shared data folder; where that is missing, nothing is tested.
"""

import os
import signal

import pytest

from anp_jax import train
from anp_jax.reporting import telemetry
from tests import builders, launching, serving, showing, timm_peer

pytestmark = [
  pytest.mark.usefixtures('on_one_device'),
  pytest.mark.skipif(
    not showing.CLOTHING.is_dir(), reason='the photographs of clothing are not here'
  ),
]

# They compile for a minute: for `make soak`.
NETWORKS = 'convnextv2_atto', 'efficientnet_b0'
_STEPS, _SIGNAL_AT = 12, 2


def _config(name, weights):
  """Every kind of randomness that a step can have: crops, flips, paths."""
  return builders.config(
    {
      'model.name': name,
      'model.drop_path': 0.2,
      'init.from': weights,
      'duration': f'{_STEPS} steps',
      'batch_size': 32,  # a group of batch norm, where there is one
      'data.source': 'folder',
      'data.path': str(showing.CLOTHING),
      'data.eval_split': 'test',
      'data.image_size': 32,
      'data.resize': 36,
      'data.prefetch': 1,  # batches that a signal finds made are trained on
      'optimizer.name': 'adamw',
      'optimizer.learning_rate': 1e-4,
      'ema': 0.9,
      'schedule.warmup': '2 steps',
      'eval.every': f'{_STEPS} steps',
      'eval.batch_size': 128,
      'eval.examples': False,
      'checkpoint.every': f'{_STEPS} steps',
      'log.every': '1 steps',
      'log.tensorboard': False,
    }
  )


@pytest.mark.soak
@pytest.mark.parametrize('name', NETWORKS)
def test_interrupted_fine_tuning_ends_with_the_same_bits(tmp_path, monkeypatch, capsys, name):
  arguments = {name: {'model_name': name, 'num_classes': 7}}
  peer = timm_peer.compute(tmp_path, arguments, side=32)[name]
  config = _config(name, peer.path)
  straight, broken = tmp_path / 'straight', tmp_path / 'broken'
  train.run(config, str(straight))
  # PyTorch counts batches, which nothing here uses. The classifier there is of
  # 7 classes, of 10 here; all else is loaded.
  used = [n for n in peer.tensors if not n.endswith('num_batches_tracked')]
  line = f'weights  {len(used) - 2} loaded, 2 initialised'
  assert line in capsys.readouterr().out
  with monkeypatch.context() as patch:
    builders.signal_at(patch, _SIGNAL_AT, signal.SIGTERM)
    train.run(config, str(broken))
  output = capsys.readouterr()
  assert 'SIGTERM: saving, then stopping' in output.err
  assert 'run the same command to resume' in output.out
  os.remove(peer.path)  # a resumed run starts from its own checkpoint
  train.run(config, str(broken))
  assert 'continuing from step' in capsys.readouterr().out
  serving.same_bits(launching.weights(straight), launching.weights(broken))
  losses = [
    [(r['kind'], r['step'], r['loss']) for r in telemetry.read(str(workdir))]
    for workdir in (straight, broken)
  ]
  assert losses[0] == losses[1]
