"""The folder of a run: whose it is, and what was decided when it began."""

import contextlib
import json
import os

import jax
import numpy as np

from anp_jax import config as config_lib
from anp_jax.checkpoint import manager
from anp_jax.data import vocabulary as vocabulary_lib

CONFIG_FILE = 'config.json'
LABELS_FILE = 'labels.json'
SIZES_FILE = 'class_sizes.json'
WEIGHTS_FILE = 'weights.txt'
MARKER = 'stopped.json'
_FEW = 200_000  # examples


def with_batch_size(config, workdir: str, devices: int):
  """The config with the global batch, decided once a run.

  Args:
    config: resolved; its batch_size may be 0.
    workdir: of the run; one that is resumed keeps its batch.
    devices: that divide the batch.

  Returns:
    The config, or a copy of it with a batch_size above 0.
  """
  if config.batch_size:
    return config
  config = config.copy_and_resolve_references()
  saved = saved_config(workdir).get('batch_size', 0)
  config.batch_size = saved or config.batch_size_per_device * devices
  return config


def saved_config(workdir: str) -> dict:
  """The flat config the workdir's run was started with; {} if none."""
  path = os.path.join(workdir, CONFIG_FILE)
  if not os.path.exists(path):
    return {}
  with open(path) as f:
    return json.load(f)


def labels(workdir: str) -> vocabulary_lib.Vocabulary:
  """The classes that the workdir's run was trained to name.

  Raises:
    ConfigError: if its file is missing or is not what `open_or_refuse` wrote.
  """
  path = os.path.join(workdir, LABELS_FILE)
  try:
    with open(path) as f:
      return vocabulary_lib.from_json(json.load(f))
  except (OSError, ValueError, TypeError, KeyError) as e:
    raise config_lib.ConfigError(
      f'cannot read the names of the classes from {path}: {e}'
    ) from e


def has_checkpoints(
  workdir: str, kinds: tuple[str, ...] = (manager.NEWEST, manager.BEST)
) -> bool:  # fmt: skip
  """Whether any step of a run was saved there."""
  return any(
    name.isdigit()
    for kind in kinds
    if os.path.isdir(os.path.join(workdir, kind))
    for name in os.listdir(os.path.join(workdir, kind))
  )


def record_class_sizes(workdir: str, source) -> None:
  """Writes how many images each class is trained on, where that is cheap."""
  path = os.path.join(workdir, SIZES_FILE)
  if jax.process_index() or os.path.exists(path) or source.kind == 'synthetic':
    return
  # Of prepared sets it is a pass over all records, 24 us each.
  if source.kind == 'encoded' and len(source) > _FEW:
    return
  labels = source.labels()
  sizes = np.bincount(labels[labels >= 0], minlength=len(source.vocabulary))
  _write(workdir, SIZES_FILE, json.dumps(sizes.tolist()))


def class_sizes(workdir: str, classes: int) -> np.ndarray | None:
  """(classes,) training images of each; None where they were not counted."""
  path = os.path.join(workdir, SIZES_FILE)
  if not os.path.exists(path):
    return None
  with open(path) as f:
    sizes = np.array(json.load(f), np.int64)
  return sizes if len(sizes) == classes else None


def open_or_refuse(workdir: str, config, vocabulary) -> None:
  """Writes the run's config and classes into its workdir.

  Args:
    workdir: of the run.
    config: resolved.
    vocabulary: of the training data.

  Raises:
    ConfigError: if the workdir is another run's, or cannot be written to.
  """
  used = has_checkpoints(workdir, (manager.NEWEST,))
  named = os.path.exists(os.path.join(workdir, LABELS_FILE))
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
    # Here, and not only where the state is restored: else the names of the
    # classes would be gone by then.
    if named and labels(workdir) != vocabulary:
      raise config_lib.ConfigError(
        f'{workdir}: the training data differ in the names of their classes, '
        'or in whether these are pairs (config.data.pairs), from those that '
        'the run was started with; choose another --workdir'
      )
  if jax.process_index() == 0:
    try:
      os.makedirs(workdir, exist_ok=True)
      _write(workdir, CONFIG_FILE, config_lib.to_json(config))
      text = json.dumps(vocabulary.to_json(), indent=1)
      _write(workdir, LABELS_FILE, text)
      _remove(workdir, MARKER)  # the run goes on, or has ended
      if not used:  # what a run has left that came to no checkpoint
        _remove(workdir, SIZES_FILE)
        _remove(workdir, WEIGHTS_FILE)
    except OSError as e:  # a full disk, say, or a file system of another kind
      raise config_lib.ConfigError(
        f'--workdir={workdir!r} cannot be written to: {e.strerror}; choose '
        'another folder'
      ) from e


def mark_stopped(workdir: str, step: int, total: int, reason: str) -> None:
  """Leaves the file that tells a launcher to start this run again."""
  text = json.dumps({'step': step, 'total': total, 'reason': reason})
  _write(workdir, MARKER, text)


def _write(workdir, name, text):
  """Writes a file whole, or not at all."""
  path = os.path.join(workdir, name)
  with open(path + '.new', 'w') as f:
    f.write(text)
  os.replace(path + '.new', path)


def _remove(workdir, name):
  with contextlib.suppress(FileNotFoundError):
    os.remove(os.path.join(workdir, name))
