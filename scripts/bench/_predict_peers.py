"""The peers of `predict.py`: PyTorch and ONNX Runtime."""

from collections.abc import Callable
import io
import os
import tempfile
import types

import numpy as np

from anp_jax.predict import file_batches
from anp_jax.system import cores
from scripts.bench import _cases

CLASSES = 1000


def create(name: str, side: int, model: str, dtype: str, top: int):
  """Makes a peer, whose files go through Pillow.

  Args:
    name: 'torch_eager', 'torch_compile' or 'onnx'.
    side: pixels a side of the images.
    model: 'resnet50' or 'resnet18'.
    dtype: dtype of the network.
    top: classes to name.

  Returns:
    files: a function (paths, batch size) that returns how many it named.
    network: a function (batch size, images) that names noise.
    library: ''.
  """
  from PIL import Image

  module = torch_names(model, dtype, top)
  names = onnx_names(module, side) if name == 'onnx' else _torch(name, module)
  shorter = side * 8 // 7

  def decode(file):
    image = Image.open(io.BytesIO(file)).convert('RGB')
    share = shorter / min(image.size)
    size = [round(n * share) for n in image.size]
    image = image.resize(size, Image.Resampling.BILINEAR)
    left, top = ((n - side) // 2 for n in size)
    return np.array(image.crop((left, top, left + side, top + side)))

  def name_files(paths, size):
    files = file_batches.find(paths)
    batches = file_batches.batches(files, decode, size, side, cores.count())
    return sum(len(names(batch.images[: len(batch.files)])[0]) for batch in batches)

  def run(size, count):
    batch = np.random.default_rng(0).integers(0, 256, (size, side, side, 3), np.uint8)
    for _ in range(count // size):
      names(batch)

  return types.SimpleNamespace(files=name_files, network=run, library='')


def torch_names(model: str, dtype: str, top: int):
  """A torch.nn.Module: pixels (batch, side, side, 3) to the best classes.

  Args:
    model: 'resnet50' or 'resnet18'.
    dtype: dtype of the network, not of the pixels' normalisation and the ranking.
    top: classes to name.

  Returns:
    In eval mode; called with uint8, it returns classes and probabilities.
  """
  import torch

  from scripts.bench import _torch_peers

  torch.manual_seed(0)
  case = _cases.Case(model, 224, 1, classes=CLASSES)
  last = torch.channels_last
  kind = getattr(torch, dtype)
  mean = torch.tensor(_cases.MEAN)[:, None, None]
  std = torch.tensor(_cases.STD)[:, None, None]

  class Names(torch.nn.Module):
    def __init__(self):
      super().__init__()
      self.net = _torch_peers.network(case).to(kind, memory_format=last)

    def forward(self, pixels):
      images = pixels.permute(0, 3, 1, 2)  # channels last, without a copy
      outputs = self.net(((images.float() - mean) / std).to(kind))
      best = outputs.float().softmax(-1).topk(top)
      return best.indices, best.values

  return Names().eval()


def _torch(name, module):
  """A function of a batch, eager or compiled."""
  import torch

  call = torch.compile(module) if name == 'torch_compile' else module

  @torch.inference_mode()
  def names(pixels):
    return [part.numpy() for part in call(torch.from_numpy(pixels))]

  return names


def onnx_names(module, side: int) -> Callable:
  """The same in ONNX Runtime: a function of a batch.

  Args:
    module: from `torch_names`.
    side: pixels a side of the images.
  """
  import onnxruntime
  import torch

  with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, 'net.onnx')
    torch.onnx.export(
      module,
      (torch.zeros(1, side, side, 3, dtype=torch.uint8),),
      path,
      input_names=['pixels'],
      dynamic_axes={'pixels': {0: 'batch'}},
      dynamo=False,
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = cores.count()
    session = onnxruntime.InferenceSession(path, options, providers=['CPUExecutionProvider'])
  return lambda pixels: session.run(None, {'pixels': pixels})
