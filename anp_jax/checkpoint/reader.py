"""Reads a checkpoint, and checks that it belongs to this run and is whole."""

from collections.abc import Callable
import contextlib
import dataclasses
import json
import os
from typing import Any

from etils import epath
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import orbax.checkpoint as ocp

from anp_jax import config as config_lib
from anp_jax.checkpoint import checksums
from anp_jax.config import urls
from anp_jax.parallel import mesh as mesh_lib
from anp_jax.system import error_lines

_CHECKSUM = 'checksum'


class CorruptCheckpointError(Exception):
  """A checkpoint that cannot be read back as it was written."""


@dataclasses.dataclass
class Reader:
  """Reads the checkpoints of one run.

  Attributes:
    workdir: folder of the run; where it is a mirror, the store's folder.
    config: resolved config, stored with every checkpoint.
    fingerprint: fingerprint of the training data, stored and compared; None: the
      folders are only read, as a run may be saving there, and any data may be
      scored.
    abstract_state: TrainState of jax.ShapeDtypeStruct with shardings: what a
      restore gives, whatever topology wrote it.
    gather: function that is called with a JSON value and returns that of every
      process.
    saved_config: flat config of the checkpoint that was read; {} before.
  """

  workdir: str
  config: ml_collections.ConfigDict
  fingerprint: dict | None
  abstract_state: Any
  gather: Callable[[Any], list] = lambda value: [value]
  saved_config: dict[str, Any] = dataclasses.field(default_factory=dict, init=False)

  def __post_init__(self):
    """Finds the folder."""
    # In a store, Orbax works where it is.
    self.workdir = urls.remote_url(os.path.abspath(self.workdir))

  def read(self, folder: epath.Path) -> Any:
    """Returns the state of a checkpoint, on every process or on none.

    Args:
      folder: folder of the checkpoint.

    Raises:
      ConfigError: if it belongs to another run.
      CorruptCheckpointError: if it is not whole, or a process cannot read it.
    """
    # Orbax's manager would have the others wait for a process that cannot
    # read.
    with contextlib.closing(ocp.StandardCheckpointHandler()) as handler:
      self._on_all(self._check_run, handler, folder)
      restored = self._on_all(self._arrays, handler, folder)
    self._on_all(_check_sums, restored)
    return restored['state']

  def _on_all(self, call, *arguments):
    """Calls a function; an error on one process is raised on all."""
    result, problem = None, ''
    try:
      result = call(*arguments)
    except CorruptCheckpointError as e:
      problem = str(e)
    problems = self.gather(problem)
    for rank, text in enumerate(problems):
      if text:
        raise CorruptCheckpointError(text if all(problems) else f'rank {rank}: {text}')
    return result

  def _check_run(self, handler, folder):
    try:
      saved = ocp.JsonCheckpointHandler().restore(folder / 'meta')
      tree = handler.metadata(folder / 'state').tree['state']
    except Exception as e:  # noqa: BLE001 - whatever a broken folder raises
      raise CorruptCheckpointError(describe(e)) from e
    check_whole(saved)
    self._check_meta(saved)
    self._check_shapes(tree)

  def _arrays(self, handler, folder):
    leaves = jax.tree.leaves(self.abstract_state)
    sums = jax.ShapeDtypeStruct(
      (len(leaves),), jnp.uint32, sharding=mesh_lib.replicated(leaves[0].sharding.mesh)
    )
    target = {'state': self.abstract_state, 'sums': sums}
    try:
      return handler.restore(folder / 'state', args=ocp.args.StandardRestore(target))
    except Exception as e:  # noqa: BLE001
      raise CorruptCheckpointError(describe(e)) from e

  def _check_meta(self, saved):
    free = () if self.fingerprint else ('data',)
    # Those are the run's since --change, whose word is the run's config file.
    changeable = config_lib.changeable(self.config)
    difference = config_lib.difference(saved['config'], self.config, (*free, *changeable))
    if difference:
      resumable = (*free, *config_lib.resumable(self.config))
      raise config_lib.ConfigError(
        f'{self.workdir}: {difference}; only these keys may change: '
        f'{", ".join(resumable)}. Another --workdir starts a new run'
      )
    self.saved_config = saved['config']
    for key, value in (self.fingerprint or {}).items():
      if saved['data'].get(key, value) != value:  # an earlier version may not have kept it
        raise config_lib.ConfigError(
          f'{self.workdir}: the training data differ in {key!r}: '
          f'{value!r}, but the run was started with {saved["data"][key]!r}'
        )

  def _check_shapes(self, tree):
    """Compares shapes before the restore: Orbax answers a mismatch with a flood."""
    saved, expected = _shapes(tree), _shapes(self.abstract_state)
    for name in sorted(saved.keys() | expected.keys()):
      if saved.get(name) != expected.get(name):
        raise config_lib.ConfigError(
          f'{self.workdir}: {name} has shape {expected.get(name)}, but '
          f'{saved.get(name)} in the checkpoint; did the model change?'
        )


def meta(
  config: ml_collections.ConfigDict, fingerprint: dict | None, versions: dict[str, str]
) -> dict:
  """Returns what is stored with a checkpoint's state, and its checksum.

  Args:
    config: the run's config.
    fingerprint: fingerprint of the training data.
    versions: versions of the packages that compute, by name.
  """
  values = {'config': config_lib.flat(config), 'data': fingerprint, 'packages': versions}
  values = json.loads(json.dumps(values))  # lists in place of tuples
  return {**values, _CHECKSUM: checksums.of_json(values)}


def check_whole(saved: dict) -> None:
  """Refuses metadata that differ from what was saved.

  Args:
    saved: values that `meta` gave, read back.

  Raises:
    CorruptCheckpointError: if it is not whole.
  """
  values = dict(saved) if isinstance(saved, dict) else {}
  if values.pop(_CHECKSUM, '') != checksums.of_json(values):
    raise CorruptCheckpointError('the bytes of its metadata are not those that were saved')


def describe(error: BaseException) -> str:
  """Describes an error of a disk for people."""
  if 'No space left on device' in str(error):
    return 'no space is left on the disk'
  return error_lines.typed_line(error)[:200]


def _check_sums(restored):
  saved = jax.device_get(restored['sums'])
  computed = jax.device_get(checksums.of_tree(restored['state']))
  if not np.array_equal(saved, computed):
    names = list(mesh_lib.leaves_by_name(restored['state']))
    name = names[int(np.argmax(saved != computed))]
    raise CorruptCheckpointError(f'the bytes of {name} are not those that were saved')


def _shapes(tree):
  return {name: tuple(leaf.shape) for name, leaf in mesh_lib.leaves_by_name(tree).items()}
