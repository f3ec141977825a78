"""The peer of `input.py`: a PyTorch DataLoader with Pillow.

A file of its own, since its worker processes import it, and nothing else.
"""

import io
import math
import random

import numpy as np
from PIL import Image
import torch


class Photographs(torch.utils.data.Dataset):
  """Random resized crops and flips, as torchvision makes them with Pillow."""

  def __init__(self, files, side, area, ratio):
    """Keeps paths, or the bytes of files; `side` in pixels."""
    self._files = files
    self._side = side
    self._area = area
    self._ratio = [math.log(r) for r in ratio]

  def __len__(self):
    return len(self._files)

  def __getitem__(self, index):
    file = self._files[index]
    if isinstance(file, str):
      with open(file, 'rb') as f:
        file = f.read()
    image = Image.open(io.BytesIO(file)).convert('RGB')
    width, height = image.size
    area = random.uniform(*self._area) * width * height
    ratio = math.exp(random.uniform(*self._ratio))
    crop = [min(round(math.sqrt(area * ratio)), width), min(round(math.sqrt(area / ratio)), height)]
    left = random.randint(0, width - crop[0])
    top = random.randint(0, height - crop[1])
    image = image.crop((left, top, left + crop[0], top + crop[1]))
    image = image.resize((self._side, self._side), Image.Resampling.BILINEAR)
    if random.random() < 0.5:
      image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    # Left as bytes, like ours; ToTensor would make four bytes of each.
    return torch.from_numpy(np.array(image)), index


def batches(files, side, area, ratio, batch_size, workers):
  """Endless shuffled batches of (n, side, side, 3) uint8."""
  loader = torch.utils.data.DataLoader(
    Photographs(files, side, area, ratio),
    batch_size,
    shuffle=True,
    num_workers=workers,
    drop_last=True,
    persistent_workers=True,
    # A fork of a process with TensorFlow's threads may hang.
    multiprocessing_context='spawn',
  )
  while True:
    yield from loader
