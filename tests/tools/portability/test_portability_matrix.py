"""The steps of networks and strategies, compiled for machines not here.

`make portability` runs it in an environment with the compilers. XLA's CPU
backend widens sums in bfloat16, so there the dtype is read before XLA.
"""

import functools
import json

import pytest

from anp_jax.cluster import preemption
from anp_jax.config import command_line, strategy as strategy_lib
from anp_jax.tools.portability import targets
from tests import launching

pytestmark = [
  pytest.mark.portability,
  # ResNet-50 compiles for a TPU in a minute on a core of its own.
  pytest.mark.timeout(1800),
]

TARGETS = {'cpu:8': 8, 'tpu:v5e:2x2': 4, 'gpu:h200:16x4': 64}  # devices
# The workers of `parameter_server`, and the stations of `model_ring`, are runs of `sync` on a
# few devices each; what `channel_split` sends is told apart below.
STRATEGIES = [
  s for s in strategy_lib.BUILT_IN if s not in ('parameter_server', 'model_ring', 'channel_split')
]
_RESNET50 = {
  'model.dtype': 'bfloat16',
  'model.width': 64,
  'model.norm_group': 32,
  'batch_size': 0,
  'batch_size_per_device': 32,
  'data.resize': 224,
  'data.synthetic_classes': 1000,
}
_64_PIXELS = {'data.image_size': 64, 'data.resize': 64, 'batch_size': 64}
_EFFICIENTNET = {'model.norm_group': 1, 'model.drop_path': 0.2, 'model.dropout': 0.2}
# Name: overrides; parameters as published; numbers in statistics.
NETWORKS = {
  'resnet50': ({'data.image_size': 224} | _RESNET50, 25_557_032, 53_120),
  'lenet': ({'data.image_size': 28, 'batch_size': 64}, 432_080, 0),
  'cifar10_full': ({'data.image_size': 32, 'batch_size': 64}, 89_578, 0),
  # timm's with 1,000 classes, less 990 of the classifier's rows; Keras counts
  # 42,016 statistics of batch norm.
  'efficientnet_b0': (_64_PIXELS | _EFFICIENTNET, 5_288_548 - 990 * 1281, 42_016),
  'convnextv2_atto': (_64_PIXELS | {'model.drop_path': 0.1}, 3_708_400 - 990 * 321, 0),
}
CASES = [
  pytest.param(network, strategy, target, id=f'{network}-{strategy}-{target}')
  for network in NETWORKS
  for strategy in STRATEGIES
  for target in TARGETS
]


@functools.cache
def _compiled(network, strategy, target, dtype='float32', model=1, **more):
  """The command's last line, for one target; model: devices of that axis."""
  try:
    targets.check_plugin(targets.parse(target))
  except targets.CompilerMissingError as e:
    pytest.skip(str(e))
  overrides = {
    'model.name': network,
    'data.synthetic_classes': 10,
    'strategy.name': strategy,
    'strategy.reduce_dtype': dtype,
    'strategy.logical_shards': TARGETS[target],
    'strategy.threads': TARGETS[target],
    'mesh.model': model,
    **NETWORKS[network][0],
    **more,
  }
  if strategy == 'invariant' and not overrides['batch_size']:
    overrides['batch_size'] = 32 * TARGETS[target]
  spec = 'configs/resnet_anp.py:tiny'
  overrides = command_line.applying(spec, {key: str(value) for key, value in overrides.items()})
  flags = [f'--target={target}', f'--config={spec}', *launching.typed(overrides)]
  done = launching.python('-m', 'anp_jax.tools.portability', *flags, status=0, timeout=None)
  return json.loads(done.stdout.splitlines()[-1])['targets'][target]


def _sums(rows, dtype, conditional=False):
  """Elements that are summed in a dtype, over all kinds of sums."""
  return sum(
    r['elements']
    for r in rows
    if r['dtype'] == dtype
    and r['conditional'] == conditional
    and r['kind'] in ('all-reduce', 'reduce-scatter', 'all-to-all')
  )


def _gathered(rows):
  """Elements of all-gathers."""
  return sum(r['elements'] for r in rows if r['kind'] == 'all-gather')


def _check_sums_are_float32(train):
  """Gradients, and whatever else is summed: XLA may narrow on its own."""
  assert train['gradients_asked'] == train['gradients_compiled'] == ['float32']
  assert not any(
    _sums(train[text], narrow)
    for text in ('asked', 'compiled')
    for narrow in ('bfloat16', 'float16')
  )


@pytest.mark.parametrize('network, strategy, target', CASES)
def test_steps_compile(network, strategy, target):
  result = _compiled(network, strategy, target)
  _, parameters, statistics = NETWORKS[network]
  assert result['parameters'] == parameters
  for step in ('train', 'eval'):
    assert result[step]['memory']['together'] > 4 * parameters
    assert result[step]['flops'] > 0
  # Loss and weight; top 1 and 5, and of a thousand classes 10 and 100.
  metrics = 6 if network == 'resnet50' else 4
  train, scored = result['train'], result['eval']
  scores = _sums(scored['compiled'], 'float32')
  if strategy == 'invariant':
    # Those of each device, which the tree adds; see below for a TPU's XLA.
    scores += _gathered(scored['compiled'])
    metrics *= result['devices']
  assert scores == metrics
  # Two sums of metrics, the weight and the count of rows without one; votes.
  sent = parameters + statistics + 4 + preemption.VOTES
  # Cut into slices, a vector of gradients has to divide by the devices.
  padding = 8 * result['devices'] if strategy == 'invariant' else 0
  for text in ('asked', 'compiled'):
    summed = _sums(train[text], 'float32')
    # Slices that are asked to be gathered a TPU's XLA may sum among zeros.
    summed -= max(0, _gathered(train['asked']) - _gathered(train[text]))
    assert 0 <= summed - sent <= padding
    # Weights and statistics between groups, now and then.
    exchanged = parameters + statistics if strategy == 'local_sgd' else 0
    assert _sums(train[text], 'float32', conditional=True) == exchanged
  _check_sums_are_float32(train)


# What is gathered: numbers in an image's maps, after what keeps channels apart,
# such as a pool, and in vectors of all channels.
SPLIT = {
  'lenet': (20 * 12**2 + 50 * 4**2, 20 + 50),  # gradients of biases
  'cifar10_full': (32 * 16**2 + 32 * 8**2 + 64 * 4**2, 32 + 32 + 64),
  # The activations that fvcore counts, but for the stem's, which are pooled,
  # and the shortcuts', which are added where they are; of batch norm two
  # statistics and two gradients of each channel.
  'resnet50': (
    11_113_984 - 64 * (112**2 - 56**2) - (256 * 56**2 + 512 * 28**2 + 1024 * 14**2 + 2048 * 7**2),
    2 * 53_120,
  ),
}


@pytest.mark.parametrize('target', TARGETS)
@pytest.mark.parametrize('network', SPLIT)
def test_split_convolutions_compile(network, target):
  result = _compiled(network, 'channel_split', target, model=2)
  maps, vectors = SPLIT[network]
  devices = TARGETS[target] // 2  # that divide the batch
  images = 32 if network == 'resnet50' else 64 // devices
  for step, want in (
    ('train', images * maps + vectors),
    ('eval', result['eval']['images'] * maps // devices),
  ):
    assert _gathered(result[step]['asked']) == want
    assert not any(r['conditional'] for r in result[step]['asked'])
    assert result[step]['memory']['together'] > 0
  # Gradients of maps are exchanged as they are computed, and added afterwards.
  for row in result['train']['asked']:
    assert row['kind'] != 'all-reduce' or row['dtype'] in ('float32', 'int32')


@pytest.mark.parametrize('target', TARGETS)
def test_a_narrower_sum_is_seen(target):
  train = _compiled('lenet', 'sync', target, 'bfloat16')['train']
  assert train['gradients_asked'] == ['bfloat16']
  widened = target.startswith('cpu')
  assert train['gradients_compiled'] == (['float32'] if widened else ['bfloat16'])
