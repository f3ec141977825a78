"""The folder of a run: its owner, and what was decided when the run began."""

from collections.abc import Iterator
import contextlib
import json
import os

import jax
import ml_collections
import numpy as np

from anp_jax import cluster, config as config_lib
from anp_jax.config import saved_run, urls
from anp_jax.data import sources, vocabulary as vocabulary_lib
from anp_jax.data.sources import features
from anp_jax.system import files, mirror

LABELS_FILE = 'labels.json'
SIZES_FILE = 'class_sizes.json'
WEIGHTS_FILE = 'weights.txt'
MARKER = 'stopped.json'
_MAX_COUNTED = 200_000  # examples


def with_sizes(
  config: ml_collections.ConfigDict, workdir: str, devices: int
) -> ml_collections.ConfigDict:
  """Returns the config with the global batch size and the widths of features.

  They are decided once per run.

  Args:
    config: resolved config; its batch_size may be 0.
    workdir: folder of the run, which keeps its batch when it is resumed; '': none.
    devices: number of devices that divide the batch.

  Returns:
    The config, or a copy of it with a batch_size above 0.

  Raises:
    ConfigError: if files of features cannot be read.
  """
  saved = saved_run.read(workdir)
  expected = saved.get('data.widths', ()) if saved and saved_run.has_checkpoints(workdir) else ()
  if widths := features.widths(config, expected):
    config = config_lib.replaced(config, {'data.widths': widths})
  if config.batch_size:
    return config
  batch_size = saved.get('batch_size', 0) or config.batch_size_per_device * devices
  return config_lib.replaced(config, {'batch_size': batch_size})


def labels(workdir: str) -> vocabulary_lib.Vocabulary:
  """Returns the classes that the workdir's run was trained to name.

  Raises:
    ConfigError: if its file is missing or is not what `claim_workdir` wrote.
  """
  path = os.path.join(workdir, LABELS_FILE)
  try:
    with open(path, encoding='utf-8') as f:
      return vocabulary_lib.from_json(files.loads(f.read()))
  except (OSError, ValueError, TypeError, KeyError, AttributeError) as e:
    raise config_lib.ConfigError(f'cannot read the names of the classes from {path}: {e}') from e


def record_class_sizes(workdir: str, source: sources.Source) -> None:
  """Writes how many images each class is trained on, if that is cheap."""
  path = os.path.join(workdir, SIZES_FILE)
  if jax.process_index() or os.path.exists(path) or source.kind == 'synthetic':
    return
  # For prepared sets it is a pass over all records, 24 us each.
  if source.kind == 'encoded' and len(source) > _MAX_COUNTED and source.listing() is None:
    return
  labels = source.labels()
  sizes = np.bincount(labels[labels >= 0], minlength=len(source.vocabulary))
  files.write_atomic(path, json.dumps(sizes.tolist()))


def class_sizes(workdir: str, classes: int) -> np.ndarray | None:
  """Returns (classes,) int64 training images of each class; None if not counted."""
  try:
    sizes = np.array(files.read_json(os.path.join(workdir, SIZES_FILE), []), np.int64)
  except (ValueError, TypeError, OverflowError):  # damaged
    return None
  return sizes if sizes.shape == (classes,) and (sizes >= 0).all() else None


def claim_workdir(
  workdir: str, config: ml_collections.ConfigDict, vocabulary: vocabulary_lib.Vocabulary
) -> None:
  """Writes the run's config and classes into its workdir, if it is this run's.

  Args:
    workdir: folder of the run.
    config: resolved config.
    vocabulary: classes of the training data.

  Raises:
    ConfigError: if the workdir is another run's, or cannot be written to.
  """
  has_saved = saved_run.has_checkpoints(workdir, (saved_run.NEWEST,))
  if has_saved:
    _check_same_run(workdir, config, vocabulary)
  if jax.process_index():
    return
  try:
    os.makedirs(workdir, exist_ok=True)
    files.write_atomic(os.path.join(workdir, saved_run.FILE), config_lib.to_json(config))
    files.write_json(os.path.join(workdir, LABELS_FILE), vocabulary.to_json())
    outdated = [MARKER]  # the run goes on, or has ended
    if not has_saved:  # what a run has left that came to no checkpoint
      outdated += [SIZES_FILE, WEIGHTS_FILE]
    for name in outdated:
      with contextlib.suppress(FileNotFoundError):
        os.remove(os.path.join(workdir, name))
    mirror.upload(workdir)
  except OSError as e:  # a full disk, say, or a file system of another kind
    raise _unwritable(workdir, e) from e


@contextlib.contextmanager
def change(
  workdir: str, config: ml_collections.ConfigDict, text: str, processes: cluster.Processes
) -> Iterator[None]:
  """A context in which a run is resumed with new values in its config.

  If the run refuses them, it has trained nothing, and the old values return.

  Args:
    workdir: folder of the run.
    config: resolved config with the new values.
    text: value of the flag --change, see `config.changed`.
    processes: the run's processes; all of them call it.

  Raises:
    ConfigError: if the config differs in other keys too.
  """
  saved = saved_run.read(workdir)
  changed = config_lib.changed(saved, config, text)
  # What the run has decided, see `with_sizes`.
  free = ('data.widths', *(() if config.batch_size else ('batch_size',)))
  difference = config_lib.difference(changed, config, free)
  if difference:
    raise config_lib.ConfigError(
      f'{workdir} belongs to another run: {difference}, which --change={text} does not name'
    )
  is_new = changed != saved
  if is_new:  # not for a process that comes back to a run, whose others are past this
    processes.gather('read')
    if processes.index == 0:
      _write_config(workdir, changed)
    processes.gather('written')
    if processes.index and urls.is_mirror(workdir):
      mirror.fetch(urls.remote_url(workdir))
  try:
    yield
  except config_lib.ConfigError:
    # Whoever refuses it first may end the others before they come here.
    if is_new and not (processes.index and urls.is_mirror(workdir)):
      _write_config(workdir, saved)
    raise


def _write_config(workdir, values):
  try:
    files.write_atomic(os.path.join(workdir, saved_run.FILE), json.dumps(values, indent=1))
    mirror.upload(workdir)
  except OSError as e:
    raise _unwritable(workdir, e) from e


def mark_stopped(workdir: str, step: int, total: int, reason: str) -> None:
  """Writes the file that tells a launcher to start this run again, and says so."""
  record = {'step': step, 'total': total, 'reason': reason}
  files.write_atomic(os.path.join(workdir, MARKER), json.dumps(record))
  print(stopped_line(workdir), flush=True)


def stopped_line(workdir: str) -> str:
  """Returns where and why a run has stopped; '' for one that goes on, or has ended."""
  record = files.read_json(os.path.join(workdir, MARKER))
  text = 'stopped at step {step} of {total} by {reason}; run the same command to resume'
  return text.format(**record) if record else ''


def _unwritable(workdir, error):
  return config_lib.ConfigError(
    f'--workdir={urls.remote_url(workdir)!r} cannot be written to: '
    f'{error.strerror}; choose another folder'
  )


def _check_same_run(workdir, config, vocabulary):
  """Refuses a config, or names of classes, that a saved run does not have."""
  saved = saved_run.read(workdir)
  text = f'it holds checkpoints, but no {saved_run.FILE}'
  if saved:
    text = config_lib.difference(saved, config)
  if text:
    raise config_lib.ConfigError(
      f'{workdir} belongs to another run: {text}; only these keys may '
      f'change: {", ".join(config_lib.resumable(config))}. Choose another '
      f'--workdir{_change_flag(saved, config)}'
    )
  # Here, and not only where the state is restored: else the names of the
  # classes would be gone by then.
  has_labels = os.path.exists(os.path.join(workdir, LABELS_FILE))
  if has_labels and labels(workdir) != vocabulary:
    raise config_lib.ConfigError(
      f'{workdir}: the training data differ in the names of their classes, '
      'or in whether these are pairs (config.data.pairs), from those that '
      'the run was started with; choose another --workdir'
    )


def _change_flag(saved, config):
  """The flag that makes a run go on with a config, for an error line; or ''."""
  changeable = config_lib.changeable(config)
  if not saved or config_lib.difference(saved, config, changeable):
    return ''
  keys = ','.join(config_lib.changes(saved, config))
  return f', or go on with the new values: --change={keys}'
