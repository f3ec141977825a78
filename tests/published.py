"""ResNets of PyTorch's in the two namings in which weights are published."""

import numpy as np
import torch
from torch import nn

CLASSES = 10


class _Block(nn.Module):
  """torchvision's names, and its v1.5: the 3x3 convolution strides."""

  def __init__(self, channels, features, stride, bottleneck):
    super().__init__()
    plan = ((features, 3, stride), (features, 3, 1))
    if bottleneck:
      plan = ((features, 1, 1), (features, 3, stride), (4 * features, 1, 1))
    first, self.count = channels, len(plan)
    for i, (out, size, step) in enumerate(plan, 1):
      conv = nn.Conv2d(channels, out, size, step, size // 2, bias=False)
      setattr(self, f'conv{i}', conv)
      setattr(self, f'bn{i}', nn.BatchNorm2d(out))
      channels = out
    self.downsample = nn.Identity()
    if first != channels or stride != 1:
      conv = nn.Conv2d(first, channels, 1, stride, bias=False)
      self.downsample = nn.Sequential(conv, nn.BatchNorm2d(channels))

  def forward(self, x):
    y = x
    for i in range(1, self.count + 1):
      y = getattr(self, f'bn{i}')(getattr(self, f'conv{i}')(y))
      y = y if i == self.count else y.relu()
    return (y + self.downsample(x)).relu()


class _ResNet(nn.Module):
  def __init__(self, stages, bottleneck, width, classes):
    super().__init__()
    self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
    self.bn1 = nn.BatchNorm2d(width)
    channels = width
    for i, blocks in enumerate(stages):
      stage = []
      for j in range(blocks):
        features, stride = width * 2**i, 2 if i and not j else 1
        stage.append(_Block(channels, features, stride, bottleneck))
        channels = features * (4 if bottleneck else 1)
      setattr(self, f'layer{i + 1}', nn.Sequential(*stage))
    self.fc = nn.Linear(channels, classes)

  def forward(self, x):
    x = nn.functional.max_pool2d(self.bn1(self.conv1(x)).relu(), 3, 2, 1)
    for i in range(1, 5):
      x = getattr(self, f'layer{i}')(x)
    return self.fc(x.mean((2, 3)))


def torchvision(stages, bottleneck, width, classes=CLASSES):
  """A random network; called on pixels, it gives logits."""
  return randomised(_ResNet(stages, bottleneck, width, classes))


def transformers(stages, bottleneck, width, classes=CLASSES, **settings):
  """A random ResNetForImageClassification."""
  import transformers as library

  wider = 4 if bottleneck else 1
  config = library.ResNetConfig(
    embedding_size=width,
    hidden_sizes=[width * wider * 2**i for i in range(4)],
    depths=list(stages),
    layer_type='bottleneck' if bottleneck else 'basic',
    num_labels=classes,
    **settings,
  )
  return randomised(library.ResNetForImageClassification(config))


def tensors(network, dtype=None):
  """The state_dict as NumPy arrays: copies, which training does not reach."""
  arrays = {}
  for name, value in network.state_dict().items():
    kind = dtype if dtype and value.is_floating_point() else None
    arrays[name] = np.array(value.numpy(), kind)
  return arrays


def images(count, side=64, seed=0):
  """(count, side, side, 3) float32 of coarse noise, which tells them apart."""
  random = np.random.default_rng(seed)
  coarse = 2 * random.normal(size=(count, side // 8, side // 8, 3))
  return coarse.repeat(8, 1).repeat(8, 2).astype(np.float32)


def pixels(images):
  """(batch, height, width, 3) as PyTorch has it."""
  return torch.from_numpy(images.transpose(0, 3, 1, 2).copy())


def randomised(network):
  """Random scales and statistics: at 1 and 0 a swap would not show.

  Scales are low, so that 50 blocks leave logits of order one to ten.
  """
  torch.manual_seed(0)
  with torch.no_grad():
    for name, value in network.state_dict().items():
      if value.ndim == 4:
        nn.init.kaiming_normal_(value, mode='fan_out')
      elif value.ndim == 2:
        value.normal_(std=0.2)
      elif value.ndim == 1 and value.is_floating_point():
        spread = torch.rand(value.shape)
        if name.endswith('weight'):
          value.copy_(0.3 + 0.3 * spread)
        elif name.endswith('running_var'):
          value.copy_(0.3 + spread / 2)
        else:
          value.copy_(spread - 0.5)
  return network.eval()
