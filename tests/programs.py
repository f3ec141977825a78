"""Programs of tiny networks on this machine's first devices, and their batches."""

import jax
import numpy as np

from anp_jax.data import vocabulary as vocabulary_lib
from anp_jax.parallel import division, mesh as mesh_lib
from anp_jax.training import build as build_lib, objective as objective_lib, run_spec

NAMES = tuple(f'{a}_{n}' for a in 'abc' for n in 'wxyz')


def objective(config, names=NAMES):
  return objective_lib.create(vocabulary_lib.Vocabulary(names), config)


def build(config, devices, names=NAMES):
  """The program of a config whose batch divides over the devices."""
  mesh = mesh_lib.create(config, jax.devices()[:devices])
  division.check(config, config.batch_size, mesh)
  losses = objective(config, names)
  return build_lib.create(run_spec.RunSpec(config, mesh, losses, config.batch_size, 640))


def train(program, batches, step=None):
  """The state after the batches, and the values of each; `step`: the program's, compiled."""
  state, values = program.new_state(), []
  for batch in batches:
    with jax.transfer_guard('disallow'):
      state, values_of_step = (step or program.train_step)(state, batch)
    values.append(values_of_step)
  return state, np.stack(values)


def batch(seed, size=16, side=8, classes=12):
  """Noise, the same for each seed."""
  random = np.random.default_rng(seed)
  return {
    'image': random.integers(0, 256, (size, side, side, 3), np.uint8),
    'label': random.integers(0, classes, size, np.int32),
    'row': np.arange(size, dtype=np.int32),
    'weight': np.ones(size, np.float32),
    'vote': np.zeros(size, np.int32),
  }


def mapped(function, mesh, in_specs, out_specs):
  """The program of what each device computes of its part; what it sends is not checked."""
  return jax.jit(mesh_lib.mapped(function, mesh, in_specs, out_specs))


def put(arrays, mesh):
  return jax.device_put(arrays, mesh_lib.batch_sharding(mesh))
