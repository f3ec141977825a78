"""The peer of `input.py`: a PyTorch DataLoader that crops as torchvision does."""

import io
import math
import random

import cv2
import numpy as np
from PIL import Image
import simplejpeg
import torch


class Photographs(torch.utils.data.Dataset):
  """Random resized crops and flips."""

  def __init__(self, files, side, area, ratio, decode):
    """Stores paths; `side` in pixels; `decode` makes a crop's pixels of a file."""
    self._files = files
    self._side = side
    self._area = area
    self._ratio = [math.log(r) for r in ratio]
    self._decode = decode

  def __len__(self):
    return len(self._files)

  def __getitem__(self, index):
    with open(self._files[index], 'rb') as f:
      pixels = self._decode(f.read(), self._side, self._box)
    if random.random() < 0.5:
      pixels = pixels[:, ::-1]
    # Left as bytes, like ours; ToTensor would make four bytes of each.
    return torch.from_numpy(np.ascontiguousarray(pixels)), index

  def _box(self, width, height):
    area = random.uniform(*self._area) * width * height
    ratio = math.exp(random.uniform(*self._ratio))
    columns = min(round(math.sqrt(area * ratio)), width)
    rows = min(round(math.sqrt(area / ratio)), height)
    left, top = random.randint(0, width - columns), random.randint(0, height - rows)
    return left, top, left + columns, top + rows


def _by_pillow(file, side, box):
  image = Image.open(io.BytesIO(file)).convert('RGB')
  image = image.crop(box(*image.size))
  return np.asarray(image.resize((side, side), Image.Resampling.BILINEAR))


def _by_simplejpeg(file, side, box):
  image = simplejpeg.decode_jpeg(file)
  left, top, right, bottom = box(*image.shape[1::-1])
  return cv2.resize(image[top:bottom, left:right], (side, side))


DECODERS = {'torch, Pillow': _by_pillow, 'torch, simplejpeg': _by_simplejpeg}


def batches(files, side, area, ratio, batch_size, decode):
  """Endless shuffled batches of (n, side, side, 3) uint8."""
  torch.set_num_threads(1)
  data = Photographs(files, side, area, ratio, decode)
  loader = torch.utils.data.DataLoader(data, batch_size, shuffle=True, drop_last=True)
  while True:
    yield from loader
