"""Devices: the mesh of a run, and how arrays lie on it."""

import re

import jax
from jax import sharding as jsharding
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


def create(config, devices=None, hosts=('',)) -> jsharding.Mesh:
  """The mesh of config.mesh over all devices of all processes.

  Devices of one host stand side by side, whatever order its processes were
  numbered in: neighbours on the inner axis, 'model', then share a host, and so
  does a group that is no larger than one.

  Args:
    config: the run's config; -1 stands for all devices that remain.
    devices: list of devices; None: jax.devices().
    hosts: the host of each process, by index.

  Returns:
    A mesh with the axes 'group', 'data' and 'model'. There is one group, but
    where the strategy has each group train weights of its own.

  Raises:
    ConfigError: if the counts do not fit the devices, or JAX has processes
      that `hosts` does not name.
  """
  if devices is None:
    # A TPU pod is one to JAX, whatever its workers were told of each other.
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
  """'cpu', 'gpu' or 'tpu': what the mesh's devices are."""
  return mesh.devices.flat[0].platform


def batch_devices(mesh: jsharding.Mesh) -> int:
  """How many parts the mesh divides the batch into."""
  return mesh.shape[GROUP] * mesh.shape[DATA]


def batch_sharding(mesh: jsharding.Mesh) -> jsharding.NamedSharding:
  """The sharding of arrays whose leading axis is the global batch."""
  return jsharding.NamedSharding(mesh, P(BATCH))


def replicated(mesh: jsharding.Mesh) -> jsharding.NamedSharding:
  """The sharding of arrays that every device holds whole."""
  return jsharding.NamedSharding(mesh, P())


def path_name(path) -> str:
  """A pytree path as text: 'stage1_block1/conv1/kernel'."""
  return '/'.join(str(getattr(k, 'key', getattr(k, 'name', getattr(k, 'idx', k)))) for k in path)


def parameter_name(path, names) -> str | None:
  """Which parameter a leaf of a state is like: its path ends in that one's.

  Args:
    path: of the leaf, in any tree that repeats the parameters' under a longer
      path, as optimizer moments and averages do.
    names: of parameters.

  Returns:
    The longest that fits; None: there is none.
  """
  parts = path_name(path).split('/')
  ends = ('/'.join(parts[i:]) for i in range(len(parts)))
  return next((end for end in ends if end in names), None)


def param_specs(rules, params, mesh: jsharding.Mesh):
  """How each parameter lies on the mesh, by the first rule that matches.

  The rules are those of big_vision: an ordered list of (regex, name), the
  regex searched for in the parameter's path.

  Args:
    rules: pairs of regex and 'replicate' or 'fsdp'.
    params: pytree of arrays or shapes.
    mesh: of the run.

  Returns:
    Pytree of PartitionSpec, like params.

  Raises:
    ConfigError: for a parameter that no rule matches.
  """

  def spec(path, leaf):
    name = path_name(path)
    for pattern, rule in rules:
      if re.search(pattern, name):
        return _fsdp(leaf.shape, mesh) if rule == 'fsdp' else P()
    raise config_lib.ConfigError(f'config.sharding: no rule matches the parameter {name}')

  return jax.tree_util.tree_map_with_path(spec, params)


def state_specs(state, specs):
  """Specs of a whole state: a leaf that is like a parameter lies like it.

  Optimizer moments and averages repeat the parameters' tree under a longer
  path, so a leaf whose path ends in a parameter's path, with the same number
  of axes, takes the parameter's spec; everything else is replicated.

  Args:
    state: pytree of arrays or shapes.
    specs: of the parameters, from `param_specs`.

  Returns:
    Pytree of PartitionSpec, like state.
  """
  spec_of = {
    path_name(path): spec
    for path, spec in jax.tree_util.tree_leaves_with_path(specs, is_leaf=lambda s: isinstance(s, P))
  }

  def find(path, leaf):
    spec = spec_of.get(parameter_name(path, spec_of), P())
    return spec if len(spec) <= len(leaf.shape) else P()

  return jax.tree_util.tree_map_with_path(find, state)


def shardings(specs, mesh: jsharding.Mesh):
  """PartitionSpecs as NamedShardings, leaf by leaf."""
  return jax.tree.map(
    lambda s: jsharding.NamedSharding(mesh, s), specs, is_leaf=lambda s: isinstance(s, P)
  )


def _fsdp(shape, mesh):
  """Divides the longest axis that the data axis of the mesh divides."""
  count = mesh.shape[DATA]
  axes = [i for i, n in enumerate(shape) if n % count == 0 and n >= count]
  if not axes or count == 1:
    return P()
  longest = max(axes, key=lambda i: shape[i])
  return P(*([None] * longest), DATA)
