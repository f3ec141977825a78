"""The contestants of `step.py` and `predict.py` in PyTorch.

Networks are timm's, but Caffe's two.
"""

from typing import Any

from scripts.bench import _cases, _peers


def step(case, compiled: bool, on_gpu: bool) -> _peers.Contestant:
  """PyTorch: channels last, bfloat16 by autocast, the fused optimizer.

  Args:
    case: what is trained.
    compiled: whether forward, loss and backward go through torch.compile, in its
      default mode: 'max-autotune' was still compiling after two minutes on an H200.
    on_gpu: where JAX computes too; RuntimeError where PyTorch has no GPU.
  """
  import torch

  if on_gpu and not torch.cuda.is_available():
    raise RuntimeError('this PyTorch has no GPU')
  place = 'cuda' if on_gpu else 'cpu'
  torch.manual_seed(0)
  torch.backends.cudnn.benchmark = True
  # What JAX's default precision is on a GPU.
  torch.set_float32_matmul_precision('high')
  last = torch.channels_last
  net = network(case).to(place, memory_format=last).train()
  shape = (case.batch, 3, case.side, case.side)
  images = torch.randint(0, 256, shape, dtype=torch.uint8, device=place)
  images = images.to(memory_format=last)
  labels = torch.randint(0, case.classes, (case.batch,), device=place)
  mean, std = (torch.tensor(c, device=place)[:, None, None] for c in (_cases.MEAN, _cases.STD))
  kernels = [p for p in net.parameters() if p.ndim > 1]
  vectors = [p for p in net.parameters() if p.ndim == 1]
  optimizer = torch.optim.SGD(
    [{'params': kernels, 'weight_decay': _cases.DECAY}, {'params': vectors}],
    _cases.RATE,
    _cases.MOMENTUM,
    fused=True,
  )

  def loss_of(images, labels):
    narrow = case.dtype == 'bfloat16'
    with torch.autocast(place, torch.bfloat16, enabled=narrow):
      logits = net((images.float() - mean) / std)
    return torch.nn.functional.cross_entropy(logits.float(), labels)

  if compiled:
    loss_of = torch.compile(loss_of)

  def run(steps):
    for _ in range(steps):
      optimizer.zero_grad()
      loss_of(images, labels).backward()
      optimizer.step()
    if on_gpu:
      torch.cuda.synchronize()

  if on_gpu:
    name = torch.cuda.get_device_name()
    return _peers.Contestant(run, torch.cuda.max_memory_allocated, name)
  return _peers.Contestant(run, int, 'cpu')


def network(case) -> Any:
  """The case's network as a torch.nn.Module."""
  import torch
  from torch import nn

  if case.model not in ('lenet', 'cifar10_full'):
    from scripts.bench import _timm_networks

    return _timm_networks.create(case.model, num_classes=case.classes)
  if case.model == 'lenet':
    layers = (
      nn.Conv2d(3, 20, 5),
      nn.MaxPool2d(2, ceil_mode=True),
      nn.Conv2d(20, 50, 5),
      nn.MaxPool2d(2, ceil_mode=True),
      nn.Flatten(),
      nn.LazyLinear(500),
      nn.ReLU(),
    )
  else:
    layers = _cifar10_full_layers()
  net = nn.Sequential(*layers, nn.LazyLinear(case.classes))
  net(torch.zeros(1, 3, case.side, case.side))  # tells the lazy layers their inputs
  return net


def _cifar10_full_layers():
  from torch import nn

  return (
    nn.Conv2d(3, 32, 5, padding=2),
    nn.MaxPool2d(3, 2, ceil_mode=True),
    nn.ReLU(),
    _response(),
    nn.Conv2d(32, 32, 5, padding=2),
    nn.ReLU(),
    nn.AvgPool2d(3, 2, ceil_mode=True),
    _response(),
    nn.Conv2d(32, 64, 5, padding=2),
    nn.ReLU(),
    nn.AvgPool2d(3, 2, ceil_mode=True),
    nn.Flatten(),
  )


def _response():
  from torch import nn

  class Response(nn.Module):
    def forward(self, x):
      mean = nn.functional.avg_pool2d(x * x, 3, 1, 1)
      return x * (1 + 5e-5 * mean) ** -0.75

  return Response()
