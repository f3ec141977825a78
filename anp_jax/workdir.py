"""The folder of a run: whose it is, and what was decided when it began."""

import contextlib
import json
import os

import jax

from anp_jax import checkpoint
from anp_jax import config as config_lib

CONFIG_FILE = 'config.json'
MARKER = 'stopped.json'


def batch_size(config, workdir: str, devices: int) -> int:
  """The global batch, decided once a run: a resumed one keeps its own."""
  if not config.batch_size:
    saved = saved_config(workdir).get('batch_size', 0)
    config.batch_size = saved or (config.batch_size_per_device * devices)
  return config.batch_size


def saved_config(workdir: str) -> dict:
  """The flat config the workdir's run was started with; {} if none."""
  path = os.path.join(workdir, CONFIG_FILE)
  if not os.path.exists(path):
    return {}
  with open(path) as f:
    return json.load(f)


def claim(workdir: str, config) -> None:
  """Writes the run's config into its workdir; refuses one of another run."""
  used = os.path.isdir(os.path.join(workdir, checkpoint.NEWEST)) and any(
    name.isdigit()
    for name in os.listdir(os.path.join(workdir, checkpoint.NEWEST))
  )
  saved = saved_config(workdir)
  if used:
    text = (
      config_lib.difference(saved, config)
      if saved
      else f'it holds checkpoints, but no {CONFIG_FILE}'
    )
    if text:
      raise config_lib.ConfigError(
        f'{workdir} belongs to another run: {text}; only these keys may '
        f'change: {", ".join(config_lib.RESUMABLE)}. Choose another --workdir'
      )
  if jax.process_index() == 0:
    os.makedirs(workdir, exist_ok=True)
    path = os.path.join(workdir, CONFIG_FILE)
    with open(path + '.new', 'w') as f:
      f.write(config_lib.to_json(config))
    os.replace(path + '.new', path)
    _unmark(workdir)


def mark_stopped(workdir: str, step: int, total: int, reason: str) -> None:
  """Leaves the file that tells a launcher to start this run again."""
  path = os.path.join(workdir, MARKER)
  with open(path + '.new', 'w') as f:
    json.dump({'step': step, 'total': total, 'reason': reason}, f)
  os.replace(path + '.new', path)


def _unmark(workdir: str) -> None:
  """Takes the file away: the run goes on, or has ended."""
  with contextlib.suppress(FileNotFoundError):
    os.remove(os.path.join(workdir, MARKER))
