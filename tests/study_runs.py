"""What the tests of the study share: runs without training, in memory and on disk."""

import json
import pathlib
import sys

import numpy as np

from anp_jax.tools.study import local, study_results

TINY = 'configs/resnet_anp.py:tiny'
LENET = 'configs/lenet.py'


def run(*accuracy, rate=100.0, samples=10, seconds=None, **more) -> study_results.Run:
  """Returns the numbers of a run with these scores.

  Args:
    *accuracy: accuracies of its evaluations, after steps 1, 2, and so on.
    rate: images per second.
    samples: images of a step.
    seconds: seconds of a step; None: those in which the rate has one image.
    **more: other fields.
  """
  steps = np.arange(1, len(accuracy) + 1)
  seconds = steps * (seconds or 1 / rate)
  return study_results.Run(rate, steps, samples * steps, seconds, np.array(accuracy), **more)


_PRETEND = """\
import json, math, os, sys
nodes, *arguments = sys.argv[1:]
flags = dict(a.lstrip('-').split('=', 1) for a in arguments if '=' in a)
workdir, here = flags['workdir'], os.path.dirname(__file__)
with open(os.path.join(here, 'calls'), 'a') as f:
  print(os.path.basename(workdir), file=f)
accuracy, timed = 0.5, {'seconds': 1 / int(nodes), 'images_per_second': 20 * int(nodes)}
"""
_LEAVES = """\
with open(os.path.join(workdir, 'config.json'), 'w') as f:
  json.dump({'batch_size': 10}, f)
with open(os.path.join(workdir, 'metrics.jsonl'), 'w') as f:
  for step in (2, 4):
    print(json.dumps({'kind': 'train', 'step': step, 'epoch': step / 10, **timed}), file=f)
  print(json.dumps({'kind': 'validation', 'step': 4, 'epoch': 0.4, 'anp_top1': accuracy}), file=f)
"""


def pretend(folder: pathlib.Path, monkeypatch, text: str) -> None:
  """Has studies launch a program that trains nothing, and notes its calls in a file `calls`.

  Args:
    folder: folder of the program and the file.
    monkeypatch: fixture of the test.
    text: what the program does before it leaves numbers: `accuracy`, and in `timed` its speed.
  """
  script = folder / 'pretend.py'
  script.write_text(_PRETEND + text + _LEAVES)

  def command(study, cell, _):
    return [sys.executable, str(script), str(cell.nodes), *study.arguments(cell)]

  monkeypatch.setattr(local, '_command', command)


def write(folder: pathlib.Path, train=(), validation=(), batch_size=10, **config) -> str:
  """Writes what a run leaves in its folder: its config and its records; returns the folder."""
  folder.mkdir(parents=True, exist_ok=True)
  config = {'batch_size': batch_size} | {k.replace('__', '.'): v for k, v in config.items()}
  (folder / 'config.json').write_text(json.dumps(config))
  records = [{'kind': 'train', 'epoch': 0.0, **record} for record in train]
  records += [{'kind': 'validation', 'epoch': 0.0, **record} for record in validation]
  (folder / 'metrics.jsonl').write_text(''.join(json.dumps(r) + '\n' for r in records))
  return str(folder)
