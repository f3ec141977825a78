"""A network trained for a few steps, its convolutions split or not."""

import jax
import numpy as np

from anp_jax import config as config_lib
from anp_jax.config import validation
from anp_jax.data import vocabulary as vocabulary_lib
from anp_jax.parallel import division
from anp_jax.parallel import mesh as mesh_lib
from anp_jax.parallel import state as state_lib
from anp_jax.training import build
from anp_jax.training import objective as objective_lib
from anp_jax.training import run_spec

BATCH, SIDE = 16, 8
# float64 rounds at 1e-16; sums in another order differ by some 1e-14.
TIGHT = 1e-11
NAMES = tuple(f'{a}_{n}' for a in 'abc' for n in 'wxyz')


def parts(name, data, model, helpers=(), **overrides):
  """`assembly.Assembly` of a tiny network in float64, and its mesh."""
  config = config_lib.base()
  config.update_from_flattened_dict(
    {
      'batch_size': BATCH,
      'duration': '1000 steps',
      'data.image_size': SIDE,
      'data.resize': SIDE,
      'model.name': 'tests.user_network:SmallNet',
      'model.dtype': 'float64',
      'model.param_dtype': 'float64',
      'model.norm_group': 2,
      'mesh.data': data,
      'mesh.model': model,
      'optimizer.name': 'momentum',
      'optimizer.weight_decay': 1e-3,
      'optimizer.clip_norm': 0.3,
      'schedule.name': 'constant',
      'strategy.name': name,
      'strategy.reduce_dtype': 'float64',
      **overrides,
    }
  )
  validation.validate(config)
  mesh = mesh_lib.create(config, jax.devices()[: data * model])
  division.check(config, BATCH, mesh)
  objective = objective_lib.create(vocabulary_lib.Vocabulary(NAMES), config)
  made = build.create(
    run_spec.RunSpec(config, mesh, objective, BATCH, 640, tuple(helpers))
  )
  return made, mesh


def batch(mesh, step):
  """Noise, of step s always the same."""
  random = np.random.default_rng(step)
  made = {
    'image': random.integers(0, 256, (BATCH, SIDE, SIDE, 3), np.uint8),
    'label': random.integers(0, len(NAMES), BATCH).astype(np.int32),
    'row': np.arange(BATCH, dtype=np.int32),
    'weight': np.ones(BATCH, np.float32),
    'vote': np.zeros(BATCH, np.int32),
  }
  return jax.device_put(made, mesh_lib.batch_sharding(mesh))


def trained(parts, mesh, steps=4):
  """The state after some steps, and the values of each."""
  state = state_lib.create(parts.init_fn, parts.abstract_state)
  values = []
  for step in range(steps):
    state, found = parts.train_step(state, batch(mesh, step))
    values.append(found)
  return state, np.stack(values)


def same(found, want, tolerance):
  """Compares two trees leaf by leaf."""
  names = jax.tree_util.tree_leaves_with_path(want)
  for (path, b), a in zip(names, jax.tree.leaves(found), strict=True):
    np.testing.assert_allclose(
      np.asarray(a), np.asarray(b), rtol=tolerance, atol=tolerance,
      err_msg=mesh_lib.path_name(path),
    )  # fmt: skip
