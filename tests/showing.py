"""What the tests of show share: sets made by hand, and the command."""

import pathlib

import numpy as np
from PIL import Image

from anp_jax.data.show import __main__ as show
from tests import launching

CONFIG = f'--config={launching.ROOT / "configs" / "resnet_anp.py"}:tiny'
# Images of a class of the tree, in training and in evaluation.
PAIRS = {'big_cat': (2, 1), 'big_dog': (3, 0), 'old_car': (1, 3), 'old_dog': (3, 2)}


def color(split, name, i):
  """Returns another colour for every file of the tree, and none of a sheet."""
  return (10 + 20 * sorted(PAIRS).index(name), 60 + 40 * split, 100 + 9 * i)


def tree_flags(root: pathlib.Path) -> list[str]:
  """Writes the tree of one-coloured PNG files; returns the flags to show it."""
  _write_tree(root)
  return [CONFIG, '--config.data.source=folder', f'--config.data.path={root}']


def save_arrays(path, train, evaluation=(0,), names=None, side=32):
  """Writes arrays with these labels; returns the flags to show them.

  All pixels of image i of a split have the value i.
  """
  arrays = {}
  for split, labels in (('train', train), ('validation', evaluation)):
    values = np.arange(len(labels), dtype=np.uint8)[:, None, None, None]
    arrays[f'{split}_images'] = np.broadcast_to(values, (len(labels), side, side, 3))
    arrays[f'{split}_labels'] = np.array(labels)
  classes = max(*train, *evaluation) + 1
  arrays['class_names'] = np.array(names or [f'n{i}' for i in range(classes)])
  np.savez(path, **arrays)
  return [CONFIG, '--config.data.source=arrays', f'--config.data.path={path}']


def printed(flags, capsys):
  """Runs a command that succeeds; returns its lines."""
  assert show.main(['show', *flags]) == 0
  out, err = capsys.readouterr()
  assert err == ''
  return out.splitlines()


def pixels(path) -> np.ndarray:
  """Returns the (height, width, 3) uint8 pixels of a file."""
  return np.asarray(Image.open(path).convert('RGB'))


def _write_tree(root):
  for name, counts in PAIRS.items():
    for split, count in enumerate(counts):
      folder = root / ('train', 'validation')[split] / name
      folder.mkdir(parents=True, exist_ok=True)
      for i in range(count):
        Image.new('RGB', (40, 30), color(split, name, i)).save(folder / f'{i}.png')
