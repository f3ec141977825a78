"""A trained network, read from the files of a run.

Reading changes nothing, so that the run may continue in the same folder.
"""

import contextlib
import dataclasses
import itertools
import os
from typing import Any

from flax import linen as nn
import jax
import ml_collections
import numpy as np
import orbax.checkpoint as ocp

from anp_jax import config as config_lib, models
from anp_jax.checkpoint import checksums, manager, reader, run_dir
from anp_jax.config import saved_run, strategy as strategy_lib, trust, urls
from anp_jax.data import vocabulary as vocabulary_lib
from anp_jax.parallel import mesh as mesh_lib, state as state_lib
from anp_jax.system import error_lines, files, mirror, remote
from anp_jax.training import objective as objective_lib

_STATE = 'state'
_USED = ('step', 'params', 'stats', 'average')
# Keys that may name a user's class that a checkpoint's network needs.
_NETWORK = 'model.head', 'model.name', 'strategy.name'


@dataclasses.dataclass(frozen=True)
class Trained:
  """A checkpoint's network.

  Attributes:
    folder: folder of the checkpoint.
    config: resolved config of the run.
    vocabulary: classes that the network was trained to name.
    step: number of updates that made it.
    params: tree of NumPy arrays: those that evaluation sees, so averaged ones
      where the run averages (config.ema), the mean over groups for `local_sgd`.
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
    """The meaning of the network's outputs."""
    return objective_lib.create(self.vocabulary, self.config)

  def model(self, platform: str) -> nn.Module:
    """The Flax module, for devices of a platform: 'cpu', 'gpu', 'tpu'."""
    return models.create(self.config, self.objective.head.outputs, platform)


def load(path: str) -> Trained:
  """Reads the network of a run.

  Args:
    path: a workdir or its `checkpoints`, for the newest; its `best`; or the folder of a step.

  Raises:
    ConfigError: if there is no checkpoint, it cannot be read whole, or it
      names a class that may not be imported, see `trust`.
  """
  folder = find(path)
  try:
    meta = ocp.JsonCheckpointHandler().restore(_orbax_path(folder, 'meta'))
    reader.check_whole(meta)
    saved_run.check_values(meta['config'])
    state = _read_state(folder)
  except Exception as e:  # noqa: BLE001 - whatever a broken folder raises
    raise config_lib.ConfigError(
      f'{folder} cannot be read whole: {error_lines.typed_line(e)}'
    ) from e
  config = config_lib.from_flat(trust.from_file(meta['config'], folder, _NETWORK))
  source = state['average'] or state
  trees = {'params': source['params'], 'stats': source['stats']}
  if strategy_lib.find(config).has_group_weights:
    trees = jax.tree.map(_mean_of_groups, trees)
  return Trained(folder, config, vocabulary(folder), int(state['step'].max()), **trees)


def find(path: str) -> str:
  """Returns the folder of a checkpoint; arguments and errors: see `load`."""
  path = urls.normalize(mirror.fetch_checkpoint(path))
  if not os.path.isdir(path):
    raise config_lib.ConfigError(
      f'{path}: expected the workdir of a run or one of its checkpoints'
      f'{saved_run.nearest_run(path)}'
    )
  if os.path.isdir(os.path.join(path, _STATE)):
    return path
  kind = os.path.basename(path)
  is_kind = kind in (manager.NEWEST, manager.BEST)
  folder = path if is_kind else os.path.join(path, manager.NEWEST)
  steps = saved_run.saved_steps(folder)
  if not steps:
    raise config_lib.ConfigError(f'{path} has no checkpoint')
  folders = [os.path.join(folder, str(step)) for step in steps]
  return min(folders, key=_score) if kind == manager.BEST else folders[-1]


def vocabulary(folder: str) -> vocabulary_lib.Vocabulary:
  """Returns the classes of the run, or the model of a run, of a checkpoint.

  Args:
    folder: folder of a checkpoint.

  Raises:
    ConfigError: if the run has not written them.
  """
  if file := saved_run.file_above(run_dir.LABELS_FILE, folder):
    return run_dir.labels(os.path.dirname(file))
  raise config_lib.ConfigError(
    f'{folder}: no {run_dir.LABELS_FILE} with the names of the classes '
    'above it; the run that made it writes one when it is resumed'
  )


def _orbax_path(folder, item):
  """The path of a checkpoint's item, for Orbax."""
  return remote.path(os.path.abspath(os.path.join(folder, item)))


def _read_state(folder):
  """Reads those parts of a TrainState that are used, as NumPy arrays."""
  path = _orbax_path(folder, _STATE)
  with contextlib.closing(ocp.PyTreeCheckpointHandler()) as handler:
    tree = handler.metadata(path).tree
    used = {name: tree['state'][name] for name in _USED}
    target = {'state': used, 'sums': tree['sums']}
    restored = handler.restore(
      path,
      args=ocp.args.PyTreeRestore(
        jax.tree.map(lambda _: 0, target),
        jax.tree.map(lambda _: ocp.RestoreArgs(np.ndarray), target),
        partial_restore=True,
      ),
    )
  _check_sums(restored, tree['state'])
  return restored['state']


def _check_sums(restored, tree):
  """Compares the leaves that were read with the sums of all that were saved."""
  sums = iter(restored['sums'])  # in the order of TrainState's fields
  for field in dataclasses.fields(state_lib.TrainState):
    count = len(jax.tree.leaves(tree[field.name]))
    field_sums = list(itertools.islice(sums, count))
    leaves = jax.tree_util.tree_leaves_with_path(restored['state'].get(field.name, {}))
    for (path, leaf), saved in zip(leaves, field_sums):
      if checksums.of_array(leaf) != saved:
        name = f'{field.name}/{mesh_lib.path_name(path)}'
        raise ValueError(f'the bytes of {name} are not those that were saved')


def _score(folder):
  """A key that sorts best checkpoints from the best on."""
  path = os.path.join(folder, 'metrics', 'metrics')
  try:
    ((name, value),) = files.read_json(path, {}).items()
    return manager.sort_key(name, value)
  except (OSError, ValueError, AttributeError, TypeError):
    raise config_lib.ConfigError(f'{path} is damaged: expected the value of a metric') from None


def _mean_of_groups(leaf):
  """The mean over groups, as `parallel.local` scores them."""
  if np.issubdtype(leaf.dtype, np.integer):
    return leaf.max(0)
  return leaf.mean(0, np.float64).astype(leaf.dtype)
