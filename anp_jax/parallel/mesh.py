"""The mesh of a run, and the sharding of arrays over it."""

from collections.abc import Callable, Collection, Sequence
import re
from typing import Any

import jax
from jax import sharding as jsharding
from ml_collections import ConfigDict
import numpy as np

from anp_jax import config as config_lib
from anp_jax.config import strategy as strategy_lib
from anp_jax.costs import mesh_shape

P = jsharding.PartitionSpec
GROUP = 'group'
DATA = 'data'
MODEL = 'model'
# The axes that divide the batch, each group's part over the group's devices.
BATCH = (GROUP, DATA)


def create(
  config: ConfigDict, devices: Sequence[jax.Device] | None = None, hosts: Sequence[str] = ('',)
) -> jsharding.Mesh:
  """The mesh of config.mesh over all devices of all processes.

  Devices of one host are adjacent in any numbering of the processes, so that
  neighbours on the inner axis, 'model', share a host, and so does a group that is
  no larger than a host.

  Args:
    config: config of the run; -1 in config.mesh stands for all remaining devices.
    devices: devices of the mesh; None: jax.devices().
    hosts: host of each process, by index.

  Returns:
    A mesh with the axes 'group', 'data' and 'model'. There is one group unless
    the strategy trains weights for each group.

  Raises:
    ConfigError: if the counts do not fit the devices, or JAX has processes
      that `hosts` does not name.
  """
  if devices is None:
    # JAX joins all hosts of a TPU pod, even without --coordinator.
    if jax.process_count() > len(hosts):
      raise config_lib.ConfigError(
        f'JAX computes with {jax.process_count()} processes, but this one was '
        f'told of {len(hosts)}: give --coordinator, --num_processes and '
        '--process_id'
      )
    devices = jax.devices()
  if len(set(hosts)) > 1:
    devices = sorted(devices, key=lambda d: (hosts.index(hosts[d.process_index]), d.process_index))
  data, model = mesh_shape.shape(config, len(devices), devices[0].platform)
  groups = strategy_lib.find(config).groups(config, data)
  shape = {GROUP: groups, DATA: data // groups, MODEL: model}
  return jsharding.Mesh(
    np.array(devices).reshape(list(shape.values())),
    tuple(shape),
    axis_types=(jsharding.AxisType.Auto,) * len(shape),
  )


def platform(mesh: jsharding.Mesh) -> str:
  """The platform of the mesh's devices: 'cpu', 'gpu' or 'tpu'."""
  return mesh.devices.flat[0].platform


def batch_devices(mesh: jsharding.Mesh) -> int:
  """The number of parts into which the mesh divides the batch."""
  return mesh.shape[GROUP] * mesh.shape[DATA]


def batch_sharding(mesh: jsharding.Mesh) -> jsharding.NamedSharding:
  """The sharding of arrays whose leading axis is the global batch."""
  return jsharding.NamedSharding(mesh, P(BATCH))


def replicated(mesh: jsharding.Mesh) -> jsharding.NamedSharding:
  """The sharding of arrays that every device holds whole."""
  return jsharding.NamedSharding(mesh, P())


def mapped(function: Callable, mesh: jsharding.Mesh, in_specs: Any, out_specs: Any) -> Callable:
  """A function of each device's parts, mapped over the mesh; not jitted."""
  # Unchecked, so that a user's module may scan over constants; communication is
  # explicit in the strategy, and tests read it from the compiled program.
  return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def mesh_of(abstract_tree: Any) -> jsharding.Mesh:
  """The mesh of a pytree of jax.ShapeDtypeStruct with shardings."""
  return jax.tree.leaves(abstract_tree)[0].sharding.mesh


def path_name(path: tuple[Any, ...]) -> str:
  """A pytree path as text: 'stage1_block1/conv1/kernel'."""
  return jax.tree_util.keystr(path, simple=True, separator='/')


def leaves_by_name(tree: Any) -> dict[str, Any]:
  """Returns the leaves of a pytree by `path_name`, in their order."""
  return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def map_by_name(function: Callable, *trees: Any) -> Any:
  """jax.tree.map of function(path_name, *leaves)."""
  return jax.tree_util.tree_map_with_path(
    lambda path, *leaves: function(path_name(path), *leaves), *trees
  )


def parameter_name(name: str, names: Collection[str]) -> str | None:
  """The parameter whose sharding a leaf of a state has.

  Optimizer moments and averages repeat the parameters' tree under a longer path.

  Args:
    name: path of the leaf.
    names: paths of the parameters.

  Returns:
    The longest of `names` that is an end of the path; None: there is none.
  """
  parts = name.split('/')
  ends = ('/'.join(parts[i:]) for i in range(len(parts)))
  return next((end for end in ends if end in names), None)


def param_specs(rules: Sequence[tuple[str, str]], params: Any, mesh: jsharding.Mesh) -> Any:
  """The sharding of each parameter, by the first rule that matches.

  The rules are those of big_vision: an ordered list of (regex, name), the
  regex searched for in the parameter's path.

  Args:
    rules: pairs of regex and 'replicate' or 'fsdp'.
    params: pytree of arrays or shapes.
    mesh: mesh of the run.

  Returns:
    Pytree of PartitionSpec, like params.

  Raises:
    ConfigError: if no rule matches a parameter.
  """

  def spec(name, leaf):
    for pattern, rule in rules:
      if re.search(pattern, name):
        return _fsdp(leaf.shape, mesh) if rule == 'fsdp' else P()
    raise config_lib.ConfigError(f'config.sharding: no rule matches the parameter {name}')

  return map_by_name(spec, params)


def state_specs(state: Any, specs: Any) -> Any:
  """Specs of a whole state: optimizer moments and averages lie like parameters.

  Args:
    state: pytree of arrays or shapes.
    specs: specs of the parameters, from `param_specs`.

  Returns:
    Pytree of PartitionSpec, like state: that of `parameter_name` if it has no
    more axes than the leaf, else replicated.
  """
  spec_of = leaves_by_name(specs)

  def spec(name, leaf):
    result = spec_of.get(parameter_name(name, spec_of), P())
    return result if len(result) <= len(leaf.shape) else P()

  return map_by_name(spec, state)


def shardings(specs: Any, mesh: jsharding.Mesh) -> Any:
  """PartitionSpecs as NamedShardings, leaf by leaf."""
  return jax.tree.map(lambda spec: jsharding.NamedSharding(mesh, spec), specs)


def _fsdp(shape, mesh):
  """Divides the longest axis that the data axis of the mesh divides."""
  count = mesh.shape[DATA]
  axes = [i for i, n in enumerate(shape) if n % count == 0 and n >= count]
  if not axes or count == 1:
    return P()
  longest = max(axes, key=lambda i: shape[i])
  return P(*([None] * longest), DATA)
