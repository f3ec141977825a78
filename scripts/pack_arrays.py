"""Packs a folder of images of one size as arrays, for config.data.source=arrays.

  python -m scripts.pack_arrays FOLDER OUT.npz

Images lie in FOLDER/train/CLASS, and those to test with in a second folder, whatever its
name: both become `train` and `test`, the splits of CIFAR-10's published files.
"""

import pathlib
import sys

import numpy as np
from PIL import Image


def pack(folder: pathlib.Path) -> dict[str, np.ndarray]:
  """Returns `SPLIT_images` (n, height, width, 3) uint8, `SPLIT_labels` (n,) and `class_names`."""
  names = sorted(place.name for place in (folder / 'train').iterdir())
  arrays = {'class_names': np.array(names)}
  folders = [place for place in folder.iterdir() if place.is_dir() and place.name != 'train']
  if len(folders) != 1:
    sys.exit(f'error: {folder}: expected `train` and one folder to test with, not {len(folders)}')
  for split, place in ('train', folder / 'train'), ('test', folders[0]):
    files = sorted(place.glob('*/*'))
    arrays[f'{split}_images'] = np.stack([np.asarray(Image.open(f).convert('RGB')) for f in files])
    arrays[f'{split}_labels'] = np.array([names.index(f.parent.name) for f in files])
  return arrays


if __name__ == '__main__':
  np.savez(sys.argv[2], **pack(pathlib.Path(sys.argv[1])))
