"""A trained network, read back for use: nothing of a run is needed but files.

Reading changes nothing, so that a run may go on in the same folder.
"""

import contextlib
import dataclasses
import json
import os
from typing import Any

from absl import logging
import jax
import ml_collections
import numpy as np
import orbax.checkpoint as ocp

from anp_jax import config as config_lib
from anp_jax import models
from anp_jax.checkpoint import checksums
from anp_jax.checkpoint import manager as checkpoint_lib
from anp_jax.checkpoint import run_dir as workdir_lib
from anp_jax.config import strategy as strategy_lib
from anp_jax.data import vocabulary as vocabulary_lib
from anp_jax.parallel import mesh as mesh_lib
from anp_jax.parallel import state as state_lib
from anp_jax.training import objective as objective_lib

_STATE = 'state'
_USED = ('step', 'params', 'stats', 'average')
# Folders from a checkpoint up to its run: WORKDIR/models/NAME/checkpoints/STEP.
_DEPTH = 4


@dataclasses.dataclass(frozen=True)
class Trained:
  """A checkpoint's network.

  Attributes:
    folder: of the checkpoint that was read.
    config: of the run, resolved.
    vocabulary: of the classes that it was trained to name.
    step: updates that made it.
    params: tree of NumPy arrays: those that evaluation sees, so averaged ones
      where the run averages (config.ema), the mean over groups for `local`.
    stats: the model's other collections, likewise.
  """

  folder: str
  config: ml_collections.ConfigDict
  vocabulary: vocabulary_lib.Vocabulary
  step: int
  params: Any
  stats: Any

  @property
  def objective(self) -> objective_lib.Objective:
    """What its outputs mean."""
    return objective_lib.create(self.vocabulary, self.config)

  def model(self, platform: str):
    """The Flax module, for devices of a platform: 'cpu', 'gpu', 'tpu'."""
    return models.create(self.config, self.objective.outputs, platform)


def load(path: str, which: str = 'newest') -> Trained:
  """Reads the network of a run.

  Args:
    path: a workdir, or in it `checkpoints`, `best` or the folder of a step.
    which: of a workdir: 'newest', 'best' or a step.

  Raises:
    ConfigError: if there is no checkpoint, or it cannot be read whole.
  """
  folder = find(path, which)
  try:
    with _quiet():
      meta = _read_meta(folder)
      state = _read_state(folder)
  except Exception as e:  # noqa: BLE001 - whatever a broken folder raises
    text = (str(e).splitlines() or [''])[0]
    raise config_lib.ConfigError(
      f'{folder} cannot be read whole: {type(e).__name__}: {text}'
    ) from e
  config = config_lib.from_flat(meta['config'])
  found = state['average'] or state
  trees = {'params': found['params'], 'stats': found['stats']}
  if strategy_lib.find(config).has_group_weights():
    trees = jax.tree.map(_mean_of_groups, trees)
  return Trained(
    folder, config, vocabulary(folder), int(state['step'].max()), **trees
  )


def find(path: str, which: str = 'newest') -> str:
  """The folder of a checkpoint; arguments and errors as of `load`."""
  if which not in ('newest', 'best') and not which.isdecimal():
    raise config_lib.ConfigError(
      f'{which!r}: expected newest, best or a step'
      f'{config_lib.nearest(which, ("newest", "best"))}'
    )
  path = os.path.normpath(os.path.expanduser(path))
  if not os.path.isdir(path):
    raise config_lib.ConfigError(
      f'{path}: expected the workdir of a run or one of its checkpoints'
    )
  if os.path.isdir(os.path.join(path, _STATE)):
    return path
  kinds = (checkpoint_lib.NEWEST, checkpoint_lib.BEST)
  if os.path.basename(path) in kinds:
    folders = [path]
    if os.path.basename(path) == checkpoint_lib.BEST and which == 'newest':
      which = 'best'
    elif which == 'best' and os.path.basename(path) != checkpoint_lib.BEST:
      folders = []
  else:
    folders = [os.path.join(path, kind) for kind in kinds]
    if which == 'best':
      del folders[0]
    elif which == 'newest':
      del folders[1]
  steps = {
    step: os.path.join(folder, str(step))
    for folder in reversed(folders)
    for step in checkpoint_lib.saved_steps(folder)
  }
  if which == 'best' and steps:
    return max(steps.values(), key=_score)
  chosen = int(which) if which.isdecimal() else max(steps, default=-1)
  if chosen not in steps:
    have = ', '.join(map(str, sorted(steps))) or 'none'
    what = f'checkpoint of step {which}' if which.isdecimal() else 'checkpoint'
    raise config_lib.ConfigError(f'{path} has no {what} (there are: {have})')
  return steps[chosen]


def vocabulary(folder: str) -> vocabulary_lib.Vocabulary:
  """The classes of the run in whose folder, or a model's in it, one lies.

  Args:
    folder: of a checkpoint.

  Raises:
    ConfigError: if the run has not left them.
  """
  place = os.path.abspath(folder)
  for _ in range(_DEPTH):
    place = os.path.dirname(place)
    if os.path.exists(os.path.join(place, workdir_lib.LABELS_FILE)):
      return workdir_lib.labels(place)
  raise config_lib.ConfigError(
    f'{folder}: no {workdir_lib.LABELS_FILE} with the names of the classes '
    'beside it; the run that made it writes one when it goes on'
  )


def _read_meta(folder):
  with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as checkpointer:
    return checkpointer.restore(os.path.abspath(os.path.join(folder, 'meta')))


def _read_state(folder):
  """Of TrainState what is used, as NumPy arrays; the optimizer's stays."""
  path = os.path.abspath(os.path.join(folder, _STATE))
  with ocp.PyTreeCheckpointer() as checkpointer:
    tree = checkpointer.metadata(path).item_metadata.tree
    wanted = {name: tree['state'][name] for name in _USED}
    wanted = {'state': wanted, 'sums': tree['sums']}
    found = checkpointer.restore(
      path,
      args=ocp.args.PyTreeRestore(
        jax.tree.map(lambda _: 0, wanted),
        jax.tree.map(lambda _: ocp.RestoreArgs(np.ndarray), wanted),
        partial_restore=True,
      ),
    )
  state = found['state']
  # The sums of all leaves lie in the order of TrainState's fields.
  sums = np.split(found['sums'], np.cumsum([
    len(jax.tree.leaves(tree['state'][field.name]))
    for field in dataclasses.fields(state_lib.TrainState)
  ])[:-1])  # fmt: skip
  for field, want in zip(dataclasses.fields(state_lib.TrainState), sums):
    leaves = jax.tree_util.tree_leaves_with_path(state.get(field.name, {}))
    for (path, leaf), number in zip(leaves, want):
      if checksums.of_array(leaf) != number:
        name = f'{field.name}/{mesh_lib.path_name(path)}'
        raise ValueError(f'the bytes of {name} are not those that were saved')
  return state


@contextlib.contextmanager
def _quiet():
  """Keeps Orbax from warning of a file that is not written any more."""
  before = logging.get_verbosity()
  logging.set_verbosity(logging.ERROR)
  try:
    yield
  finally:
    logging.set_verbosity(before)


def _score(folder):
  """The metric that made a checkpoint one of the best; more is better."""
  with open(os.path.join(folder, 'metrics', 'metrics')) as f:
    ((name, value),) = json.load(f).items()
  return -value if name in checkpoint_lib.LOWER_IS_BETTER else value


def _mean_of_groups(leaf):
  """See `strategies.local.Local.scored`."""
  if np.issubdtype(leaf.dtype, np.integer):
    return leaf.max(0)
  return leaf.mean(0, np.float64).astype(leaf.dtype)
