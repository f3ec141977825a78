"""Networks whose convolutions are split or not, and their cost models."""

import functools

import jax
import numpy as np

from anp_jax import config as config_lib
from anp_jax.parallel import division, mesh as mesh_lib
from anp_jax.runtimes.calibration import costs as costs_lib, rounds, workloads
from anp_jax.system import stopwatch
from anp_jax.tools.portability import compiled_collectives
from anp_jax.training import build as build_lib, run_spec
from tests import builders, launching, programs

BATCH, SIDE, DECAY, CLIP = 16, 8, 1e-3, 0.3
# float64 rounds at 1e-16; sums in another order differ by some 1e-14.
TIGHT = 1e-11
FLOAT32 = {
  'model.dtype': 'float32',
  'model.param_dtype': 'float32',
  'strategy.reduce_dtype': 'float32',
}

SYNTHETIC = {
  'data.source': 'synthetic',
  'data.synthetic_classes': '12',
  'data.synthetic_examples': '64',
  'log.tensorboard': 'False',
}

# Networks that are built and trained here.


def mesh(data, model):
  """A mesh of this machine's first devices."""
  config = config_lib.base()
  config.mesh.data, config.mesh.model = data, model
  return mesh_lib.create(config, jax.devices()[: data * model])


def spec(config, mesh, examples=80, offload_devices=()):
  """The run of a config with 12 classes."""
  objective = programs.objective(config)
  return run_spec.RunSpec(
    config, mesh, objective, config.batch_size, examples, tuple(offload_devices)
  )


def config(name, **overrides):
  """The config of a strategy on a tiny network in float64."""
  return builders.config(
    {
      'batch_size': BATCH,
      'duration': '1000 steps',
      'data.image_size': SIDE,
      'data.resize': SIDE,
      'model.name': 'tests.user_network:SmallNet',
      **launching.FLOAT64,
      'model.norm_group': 2,
      'optimizer.name': 'momentum',
      'optimizer.weight_decay': DECAY,
      'optimizer.clip_norm': CLIP,
      'schedule.name': 'constant',
      'strategy.name': name,
      **overrides,
    }
  )


def build(name, data, model, offload_devices=(), **overrides):
  """The program of a tiny network in float64, and its mesh."""
  keys = {'mesh.data': data, 'mesh.model': model, **overrides}
  network, devices = config(name, **keys), mesh(data, model)
  division.check(network, BATCH, devices)
  return build_lib.create(spec(network, devices, 640, offload_devices)), devices


def batch(mesh, step):
  """Noise, for each step always the same."""
  return programs.put(programs.batch(step, BATCH, SIDE), mesh)


def train(program, mesh, steps=4):
  """The state after some steps, and the values of each."""
  return programs.train(program, (batch(mesh, step) for step in range(steps)))


def sent_by_150x800(**settings):
  """The collectives of a step of 150 and 800 kernels, 8 images, two devices.

  Args:
    **settings: keys of config.strategy.
  """
  config = builders.load('configs/channel_split_cifar10.py:150x800', {'batch_size': '8'})
  config.strategy.update(settings)
  devices = mesh(1, 2)
  program = build_lib.create(spec(config, devices, 80))
  compiled = program.train_step.lower(
    program.abstract_state, build_lib.abstract_batch(config, devices, 8)
  ).compile()
  return compiled_collectives.compiled(compiled.as_text())


def assert_same(trees, expected, tolerance=TIGHT):
  """Compares two trees leaf by leaf."""
  leaves = jax.tree_util.tree_leaves_with_path(expected)
  for (path, b), a in zip(leaves, jax.tree.leaves(trees), strict=True):
    np.testing.assert_allclose(
      np.asarray(a), np.asarray(b), rtol=tolerance, atol=tolerance, err_msg=mesh_lib.path_name(path)
    )


def assert_trains_as_unsplit(program, mesh, **overrides):
  """Compares steps and an evaluation with those of one device, nothing split.

  Args:
    program: that train with split convolutions.
    mesh: mesh of the program.
    **overrides: keys of the network's config.
  """
  state, values = train(program, mesh)
  expected, expected_values, expected_scores = _unsplit(*overrides.items())
  assert_same(program.checkpoint_layout.pack(state), expected)
  assert_same(values, expected_values)
  evaluated = program.eval_state_fn(state)
  scores = program.eval_step(evaluated.params, evaluated.stats, batch(mesh, 9))
  assert_same(scores, expected_scores)


def assert_same_weights(workdir, expected_workdir, key, tolerance=TIGHT):
  """Compares the weights of the newest checkpoints of two runs.

  Args:
    workdir: folder of a run of about ten steps.
    expected_workdir: folder of another one.
    key: name of a weight that both have.
    tolerance: share of the largest value of each; the default is for float64.
  """
  weights = launching.weights(workdir)
  expected = launching.weights(expected_workdir)
  assert weights.keys() == expected.keys() and key in expected
  for name, value in expected.items():
    # Sums in another order.
    scale = max(np.abs(value).max(initial=0), 1e-3)
    np.testing.assert_allclose(weights[name], value, 0, tolerance * scale, err_msg=name)


@functools.cache
def _unsplit(*overrides):
  """State, values and scores of a network on one device."""
  program, devices = build('sync', 1, 1, **dict(overrides))
  state, values = train(program, devices)
  scores = program.eval_step(state.params, state.stats, batch(devices, 9))
  return state, values, scores


# Networks that are measured.


def two_convolutions(**overrides):
  """The config of a small network of two convolutions, of 8 and 16 features."""
  return builders.load(
    'configs/channel_split_cifar10.py',
    {
      'model.kernels': '(8, 16)',
      'batch_size': '8',
      'data.image_size': '12',
      'data.resize': '12',
      'duration': '9 epochs',
      **overrides,
    },
  )


def layer(*rates, features=24, **sizes):
  """A layer of devices that compute so many features a second."""
  counts = (features // 4, features // 2, features)
  return costs_lib.Layer(
    features=features,
    alone=tuple(features / r for r in rates),
    counts=counts,
    seconds=tuple(tuple(n / r for n in counts) for r in rates),
    **{'output': 0, 'input': 0, 'kernel': 0, **sizes},
  )


def ring(devices, bandwidth, latency):
  """The cost of collectives in a ring: a sum is two gathers, each of devices - 1 messages."""
  gather = (devices - 1) * latency, (devices - 1) / devices / bandwidth
  return costs_lib.CollectiveCost(gather, (2 * gather[0], 2 * gather[1]))


def costs(layers, rest=1.0, **fields):
  """Costs of devices that take equally long for the rest.

  Args:
    layers: path to `layer`.
    rest: seconds of everything else.
    **fields: fields of `costs.Costs`.
  """
  devices = range(len(next(iter(layers.values())).alone))
  return costs_lib.Costs(
    names=tuple(f'device {d}' for d in devices),
    unsplit=tuple(rest + sum(layer.alone[d] for layer in layers.values()) for d in devices),
    layers=layers,
    **{'other_bytes': 0, 'link': costs_lib.NO_COLLECTIVES, **fields},
  )


def assert_times_of_two_convolutions(costs, rates, split):
  """Asserts that times are where they belong, of two micro-batches.

  Args:
    costs: costs of `two_convolutions`, whose second one takes 1000 s longer.
    rates: factor of each device's seconds.
    split: seconds that a split convolution takes longer on each device.
  """
  for path, extra, counts in (('conv1', 0, (2, 4, 8)), ('conv2', 1000, (4, 8, 16))):
    layer = costs.layers[path]
    np.testing.assert_allclose(layer.alone, [2 * r * (extra + counts[-1]) for r in rates])
    expected = [[2 * r * (extra + n + s) for n in counts] for r, s in zip(rates, split)]
    np.testing.assert_allclose(layer.seconds, expected)


def pretend_times(monkeypatch, **builders):
  """Has one round take the seconds of functions made by `lasting`.

  Args:
    monkeypatch: fixture of the test.
    **builders: in place of those of `calibration.workloads`.
  """
  monkeypatch.setattr(rounds, '_SECONDS', 0.0)
  monkeypatch.setattr(stopwatch, 'timed', lambda run: getattr(run, 'seconds', 0.0))
  for name, builder in builders.items():
    monkeypatch.setattr(workloads, name, builder)


def lasting(seconds):
  """A function that does nothing, and is said to take that many seconds."""
  run = lambda: None  # noqa: E731
  run.seconds = seconds
  return run
