"""Networks of timm's, computed by a process of their own.

timm is imported with a stand-in for torchvision, and takes seconds; a test needs a
network's numbers alone.
"""

import dataclasses
import importlib.util
import json
import os
import sys

import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy

from scripts.bench import _timm_networks


@dataclasses.dataclass(frozen=True)
class Result:
  """What timm computed.

  Attributes:
    path: path of the .safetensors file with the network's tensors.
    tensors: by timm's names.
    images: (n, side, side, 3) float32, that it saw.
    logits: (n, classes) float32, in evaluation.
  """

  path: str
  tensors: dict[str, np.ndarray]
  images: np.ndarray
  logits: np.ndarray


def require() -> None:
  """Skips the test where timm or torch is missing."""
  for package in ('torch', 'timm'):
    if importlib.util.find_spec(package) is None:
      pytest.skip(f'no {package} here')


def compute(folder, networks: dict, side: int = 64) -> dict[str, Result]:
  """Computes networks of random weights and statistics on random images.

  Skips the test where timm or torch is missing.

  Args:
    folder: that exists, for files.
    networks: by a name for each (a-z, 0-9, _ and -): the arguments of
      timm.create_model, or with `blocks`, timm's texts for them, an EfficientNet
      of these; with `state`, the path of a .safetensors file, all tensors are
      loaded from it instead, or of a .pth file, in their order.
    side: side of the images, pixels.

  Returns:
    The results by the same names.
  """
  from tests import launching  # the process of timm does without it

  require()
  random = np.random.default_rng(0)
  images = random.normal(size=(4, side, side, 3)).astype(np.float32)
  folder = os.fspath(folder)
  np.save(os.path.join(folder, 'images.npy'), images)
  launching.python('-m', 'tests.timm_peer', folder, json.dumps(networks), status=0)
  return {name: _result(folder, name, images) for name in networks}


def _result(folder, name, images):
  path = os.path.join(folder, f'{name}.safetensors')
  return Result(
    path=path,
    tensors=safetensors_numpy.load_file(path),
    images=images,
    logits=np.load(os.path.join(folder, f'{name}.npy')),
  )


def main(folder, networks):
  """Writes NAME.safetensors and NAME.npy of each network to the folder."""
  from safetensors import torch as safetensors_torch
  import torch

  from tests import published

  images = np.load(os.path.join(folder, 'images.npy'))
  for name, arguments in networks.items():
    state = arguments.pop('state', None)
    create = _efficientnet if 'blocks' in arguments else _timm_networks.create
    network = published.randomised(create(**arguments))
    if state and state.endswith('.pth'):
      values = torch.load(state, weights_only=True).values()
      network.load_state_dict(dict(zip(network.state_dict(), values, strict=True)))
    elif state:
      network.load_state_dict(safetensors_torch.load_file(state))
    with torch.no_grad():
      logits = network.eval()(published.pixels(images))
    np.save(os.path.join(folder, f'{name}.npy'), logits.numpy())
    safetensors_numpy.save_file(
      published.tensors(network), os.path.join(folder, f'{name}.safetensors')
    )


def _efficientnet(blocks, num_classes):
  """EfficientNet of these blocks, with 8 and 1,280 channels at its ends."""
  _timm_networks.create('efficientnet_lite0')  # imports timm with the stand-in
  from timm.models import _efficientnet_builder as builder, efficientnet
  import torch

  return efficientnet.EfficientNet(
    builder.decode_arch_def(blocks),
    num_classes,
    num_features=1280,
    stem_size=8,
    act_layer=torch.nn.SiLU,
  )


if __name__ == '__main__':
  main(sys.argv[1], json.loads(sys.argv[2]))
