"""What the tests of the study share: runs without training, in memory and on disk."""

import json
import pathlib

import numpy as np

from anp_jax.tools.study import study_results

TINY = 'configs/resnet_anp.py:tiny'
LENET = 'configs/lenet.py'


def run(*accuracy, rate=100.0, samples=10, seconds=None, **more) -> study_results.Run:
  """Returns the numbers of a run with these scores.

  Args:
    *accuracy: of its evaluations, after steps 1, 2, and so on.
    rate: images per second.
    samples: images of a step.
    seconds: of a step; None: one in which the rate has one image.
    **more: other fields.
  """
  steps = np.arange(1, len(accuracy) + 1)
  seconds = steps * (seconds or 1 / rate)
  return study_results.Run(rate, steps, samples * steps, seconds, np.array(accuracy), **more)


def write(folder: pathlib.Path, train=(), validation=(), batch_size=10, **config) -> str:
  """Writes what a run leaves in its folder: its config and its records; returns the folder."""
  folder.mkdir(parents=True, exist_ok=True)
  config = {'batch_size': batch_size} | {k.replace('__', '.'): v for k, v in config.items()}
  (folder / 'config.json').write_text(json.dumps(config))
  records = [{'kind': 'train', 'epoch': 0.0, **record} for record in train]
  records += [{'kind': 'validation', 'epoch': 0.0, **record} for record in validation]
  (folder / 'metrics.jsonl').write_text(''.join(json.dumps(r) + '\n' for r in records))
  return str(folder)
