"""The networks of the benchmark's cases, plainly written with Flax's own layers.

Their last mean and classifier have the case's dtype; ours have float32 there.
"""

import functools

from flax import linen as nn

from scripts.bench import _cases

# Table 1 of Tan and Le 2019: expansion, window, stride, features and blocks of a stage of
# EfficientNet-B0; and of Liu et al. 2022: blocks of a stage of ConvNeXt-T.
_MBCONV = (
  (1, 3, 1, 16, 1),
  (6, 3, 2, 24, 2),
  (6, 5, 2, 40, 2),
  (6, 3, 2, 80, 3),
  (6, 5, 1, 112, 3),
  (6, 5, 2, 192, 4),
  (6, 3, 1, 320, 1),
)
_CONVNEXT_TINY = (3, 3, 9, 3)


def network(case: _cases.Case) -> nn.Module:
  """The case's network, called (images, train); without dropout and stochastic depth."""
  functions = {'efficientnet_b0': _efficientnet_b0, 'convnext_tiny': _convnext_tiny}
  functions |= {'lenet': _lenet, 'cifar10_full': _cifar10_full}
  function = functions.get(case.model, _resnet)

  class Network(nn.Module):
    @nn.compact
    def __call__(self, images, train: bool):
      x = function(self, case, images, train)
      return nn.Dense(case.classes, dtype=case.dtype)(x)

  return Network()


def _lenet(_, case, x, train):
  del train
  for features in (20, 50):
    x = nn.Conv(features, (5, 5), padding='VALID', dtype=case.dtype)(x)
    x = nn.max_pool(x, (2, 2), (2, 2))
  return nn.relu(nn.Dense(500, dtype=case.dtype)(x.reshape(len(x), -1)))


def _cifar10_full(_, case, x, train):
  del train
  conv = functools.partial(nn.Conv, dtype=case.dtype)
  # Caffe's pools have windows that the far edge cuts off: one pixel more.
  edge = ((0, 1), (0, 1))

  def response(x):
    mean = nn.avg_pool(x * x, (3, 3), padding='SAME')
    return x * (1 + 5e-5 * mean) ** -0.75

  def mean_pool(x):
    return nn.avg_pool(x, (3, 3), (2, 2), edge, count_include_pad=False)

  x = nn.max_pool(conv(32, (5, 5))(x), (3, 3), (2, 2), edge)
  x = response(nn.relu(x))
  x = response(mean_pool(nn.relu(conv(32, (5, 5))(x))))
  x = mean_pool(nn.relu(conv(64, (5, 5))(x)))
  return x.reshape(len(x), -1)


def _resnet(_, case, x, train):
  bare = functools.partial(nn.Conv, use_bias=False, dtype=case.dtype)
  norm = functools.partial(nn.BatchNorm, not train, momentum=0.9, dtype=case.dtype)
  around = ((1, 1), (1, 1))
  bottleneck = case.model == 'resnet50'
  wider = 4 if bottleneck else 1
  x = bare(64, (7, 7), 2, ((3, 3), (3, 3)))(x)
  x = nn.max_pool(nn.relu(norm()(x)), (3, 3), (2, 2), around)
  for stage, blocks in enumerate(_cases.BLOCKS[case.model]):
    for block in range(blocks):
      inside, stride = 64 * 2**stage, 2 if stage and not block else 1
      y = x
      if bottleneck:
        y = nn.relu(norm()(bare(inside, (1, 1))(y)))
      y = nn.relu(norm()(bare(inside, (3, 3), stride, around)(y)))
      last = ((1, 1),) if bottleneck else ((3, 3), 1, around)
      y = norm()(bare(wider * inside, *last)(y))
      if x.shape != y.shape:
        x = norm()(bare(wider * inside, (1, 1), stride)(x))
      x = nn.relu(x + y)
  return x.mean((1, 2))


def _efficientnet_b0(_, case, x, train):
  conv = functools.partial(nn.Conv, dtype=case.dtype)
  norm = functools.partial(nn.BatchNorm, not train, momentum=0.9, dtype=case.dtype)

  def convolved(x, features, size=1, stride=1, groups=1):
    around = ((size // 2, size // 2),) * 2
    options = dict(feature_group_count=groups, use_bias=False)
    return norm()(conv(features, (size, size), stride, around, **options)(x))

  x = nn.silu(convolved(x, 32, 3, 2))
  for expansion, size, stride, features, blocks in _MBCONV:
    for block in range(blocks):
      channels = x.shape[-1]
      inner = expansion * channels
      y = nn.silu(convolved(x, inner)) if expansion > 1 else x
      y = nn.silu(convolved(y, inner, size, 1 if block else stride, inner))
      gates = conv(channels // 4, (1, 1))(y.mean((1, 2), keepdims=True))
      gates = conv(inner, (1, 1))(nn.silu(gates))
      y = convolved(y * nn.sigmoid(gates), features)
      x = x + y if x.shape == y.shape else y
  return nn.silu(convolved(x, 1280)).mean((1, 2))


def _convnext_tiny(module, case, x, train):
  del train
  conv, dense = (functools.partial(layer, dtype=case.dtype) for layer in (nn.Conv, nn.Dense))
  norm = functools.partial(nn.LayerNorm, 1e-6, dtype=case.dtype)
  x = norm()(conv(96, (4, 4), 4, 'VALID')(x))
  for stage, blocks in enumerate(_CONVNEXT_TINY):
    if stage:
      x = conv(96 * 2**stage, (2, 2), 2, 'VALID')(norm()(x))
    for block in range(blocks):
      channels = x.shape[-1]
      y = norm()(conv(channels, (7, 7), feature_group_count=channels)(x))
      y = dense(channels)(nn.gelu(dense(4 * channels)(y), approximate=False))
      start = nn.initializers.constant(1e-6)
      scale = module.param(f'stage{stage}_block{block}_scale', start, (channels,))
      x = x + y * scale.astype(y.dtype)
  return norm()(x.mean((1, 2)))
