"""The cost of a config's training step on any device.

Everything is counted from abstract values: shapes are traced, nothing is
compiled and no array is made, so ResNet-50 takes seconds. The network is traced
with a GPU's lowering, whose convolutions are plain ones.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from anp_jax import config as config_lib, models
from anp_jax.config import data_keys, emulation_keys
from anp_jax.costs import work
from anp_jax.data import sources
from anp_jax.models.layers import example_randomness
from anp_jax.parallel import mesh as mesh_lib, state as state_lib
from anp_jax.parallel.channel_split import convolutions
from anp_jax.system import flops, memory
from anp_jax.tools.plan import memory_traffic
from anp_jax.training import objective as objective_lib, optimizer as optimizer_lib

# Images of the abstract step; what grows with the batch is divided by them.
_IMAGES = 32
# The embedded set, which takes seconds to build: training images and pairs.
_EMBEDDED = 9600, 60


def dtype(config: ml_collections.ConfigDict) -> str:
  """Returns the dtype of the computation; 'auto' is bfloat16, as on accelerators."""
  name = config.model.dtype
  return 'bfloat16' if name == 'auto' else name


def count(config: ml_collections.ConfigDict, examples: int = 0, classes: int = 0) -> work.Workload:
  """Counts what a step of a config costs.

  Args:
    config: resolved config.
    examples: images per epoch; 0: those of the config's data source.
    classes: outputs of a plain classifier; 0: those of the config's source.

  Raises:
    ConfigError: if the data source cannot be opened and no counts are named.
  """
  config = config_lib.replaced(config, {'model.dtype': dtype(config)})
  examples, outputs = _data(config, examples, classes)
  model = models.create(config, outputs, 'gpu')
  batch = config.batch_size or config.batch_size_per_device
  total = config_lib.steps(config.duration, batch, examples) * batch
  optimizer = optimizer_lib.create(config, batch, examples, total // batch)
  init = state_lib.Init(model, optimizer, config)
  state = jax.eval_shape(init)
  if emulation_keys.sleeps(config):
    layers = _slept_layers(config, state, init.forward_order)
    traffic, products = memory_traffic.Traffic(0, 0), 0
  else:
    layers = _layers(config, model, state, init.forward_order)
    jaxpr = _gradient(config, model, state)
    traffic, products = memory_traffic.count(jaxpr), flops.count(jaxpr)
  param_bytes, width = _bytes(state.params), jnp.dtype(config.model.dtype)
  # Each kernel is read forward and backward, and its gradient written; the
  # optimizer reads all state and writes it.
  kernel_bytes = 3 * _size(state.params) * width.itemsize
  image_bytes = max(traffic.size - kernel_bytes, 0) / _IMAGES
  return work.Workload(
    name=config.model.name,
    dtype=config.model.dtype,
    layers=layers,
    image_flops=products / _IMAGES,
    image_bytes=image_bytes,
    step_bytes=kernel_bytes + 2 * _bytes(state) + param_bytes,
    kernels=traffic.kernels,
    statistics=_size(state.stats),
    state_bytes=_bytes(state),
    param_bytes=param_bytes,
    examples=examples,
    total_images=total,
  )


def _data(config, examples, classes) -> tuple[int, int]:
  """Images an epoch, and outputs of the network."""
  if config.data.source.startswith(data_keys.FEATURES):
    raise config_lib.ConfigError(
      f'config.data.source={config.data.source!r}: plans are of networks that read images'
    )
  embedded = config.data.source == 'anp_shapes'
  if embedded and config.model.head == 'joint':
    examples, classes = examples or _EMBEDDED[0], classes or _EMBEDDED[1]
  if examples and classes:
    return examples, classes
  try:
    source = sources.open_source(config, training=True)
  except (config_lib.ConfigError, OSError) as e:
    raise config_lib.ConfigError(
      f'{e}; or name --examples=N (images an epoch) and --classes=N'
    ) from None
  objective = objective_lib.create(source.vocabulary, config)
  return examples or len(source), classes or objective.head.outputs


def _layers(config, model, state, order) -> tuple[work.Layer, ...]:
  """The layers with kernels; parameters without one belong to the last."""
  side = config.data.image_size
  images = jax.ShapeDtypeStruct((1, side, side, 3), config.model.dtype)
  variables = {'params': state.params, **state.stats}
  calls = {c.layer: c for c in convolutions.find(model, variables, images)}
  params = mesh_lib.leaves_by_name(state.params)
  layers = []
  for path in order:
    shape, numbers = params[path].shape, params[path].size
    name = path.removesuffix('/kernel')
    if name in calls:
      call = calls[name]
      places = math.prod(call.y.shape[:-1])
      layers.append(
        work.Layer(
          path,
          2 * places * numbers,
          numbers,
          call.x.size,
          call.y.size,
          True,
          call.gathered.size,
          call.reads and f'{call.reads}/kernel',
        )
      )
    elif len(shape) == 2 or not layers:
      inputs, outputs = (*shape, 1)[:2]
      layers.append(work.Layer(path, 2 * numbers, numbers, inputs, outputs, False))
    else:
      last = layers[-1]
      layers[-1] = dataclasses.replace(last, parameters=last.parameters + numbers)
  return tuple(layers)


def _slept_layers(config, state, order) -> tuple[work.Layer, ...]:
  """One layer for each array of parameters of an emulated network.

  Its gradients are there at the ends of config.emulate.pieces equal parts of
  the backward pass, see `models.emulated`. So all of a part's operations are
  those of its layer that the backward pass reaches first.
  """
  params = mesh_lib.leaves_by_name(state.params)
  pieces, count = config.emulate.pieces, len(order)
  layers, before = [], 0
  for place, path in enumerate(reversed(order), 1):
    piece = math.ceil(place * pieces / count)
    layers.append(work.Layer(path, (piece - before) / pieces, params[path].size, 0, 0, False))
    before = piece
  return tuple(reversed(layers))


def _gradient(config, model, state):
  """The jaxpr of the network's gradient for a batch of _IMAGES images."""
  group = getattr(config.model, 'norm_group', 0)
  side = config.data.image_size
  # Batch norm needs whole groups; one group is as many passes as any.
  if group and _IMAGES % group:
    model = model.clone(group=0) if hasattr(model, 'group') else model
  shape = _IMAGES, side, side, 3
  images = jax.ShapeDtypeStruct(shape, config.model.dtype)

  rows, key = np.arange(_IMAGES), jax.random.key(0)

  def loss(params, stats, x):
    outputs, new = model.apply(
      {'params': params, example_randomness.EXAMPLE: {'row': rows}, **stats},
      x,
      True,
      mutable=list(stats),
      rngs={'dropout': key, example_randomness.EXAMPLE: key},
    )
    # As a cross entropy does, it reads the outputs twice.
    return jax.nn.logsumexp(outputs.astype(jnp.float32)), new

  gradient = jax.grad(loss, has_aux=True)
  return jax.make_jaxpr(gradient)(state.params, state.stats, images)


def _size(tree) -> int:
  return sum(leaf.size for leaf in jax.tree.leaves(tree))


def _bytes(tree) -> int:
  return sum(map(memory.of_array, jax.tree.leaves(tree)))
