"""The contestants of `step.py`: our step, and its peers in Flax and PyTorch.

The peers' networks, loss and update are the usual ones of each library. A
library is imported only where one of its steps is made, so that a worker holds
one of them in memory and not all.
"""

from collections.abc import Callable
import functools
import os
import types
from typing import Any
from typing import NamedTuple

_ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', '..')
# Of all contestants, ours too.
RATE, MOMENTUM, DECAY = 1e-3, 0.9, 5e-4
_MEAN = (123.68, 116.78, 103.94)
_STD = (58.4, 57.1, 57.4)


class Contestant(NamedTuple):
  """A training step that is ready to run.

  Attributes:
    run: runs that many steps and waits for the last; the first one compiles.
    device_memory: bytes, the most that the accelerator held; 0 on a CPU.
    device: the accelerator's name, or 'cpu'.
  """

  run: Callable[[int], None]
  device_memory: Callable[[], int]
  device: str


def our_maker(cache: str) -> Callable:
  """Ours: imports what it takes; returns what makes the step of a case.

  Args:
    cache: folder of the persistent compilation cache.
  """
  import jax

  from anp_jax import models
  from anp_jax.config import strategy as strategy_lib
  from anp_jax.data import sources
  from anp_jax.data.input import stream as stream_lib
  from anp_jax.parallel import mesh as mesh_lib
  from anp_jax.parallel import state as state_lib
  from anp_jax.system import compile_cache
  from anp_jax.training import objective as objective_lib
  from anp_jax.training import optimizer as optimizer_lib
  from anp_jax.training import step as step_lib

  def make(case):
    config = _config(case, cache)
    compile_cache.enable(config)
    mesh = mesh_lib.create(config, jax.devices()[:1])
    source = sources.open_source(config, training=True)
    objective = objective_lib.create(source.vocabulary, config)
    schedule_of = (config, case.batch, len(source), 10**6)
    optimizer = optimizer_lib.create(*schedule_of)
    net = models.create(
      config, objective.outputs, mesh_lib.platform(mesh), mesh_lib.DATA
    )
    # Training is of RGB; a gray image is one channel of it here.
    channels = types.SimpleNamespace(
      init=lambda keys, x, train: net.init(keys, x[..., : case.channels], train)
    )
    init = state_lib.Init(channels, optimizer, config)
    abstract_state = state_lib.abstract(init, config, mesh)
    specs = jax.tree.map(lambda s: s.sharding.spec, abstract_state.params)
    step = step_lib.TrainStep(
      config=config,
      mesh=mesh,
      model=net,
      objective=objective,
      optimizer=optimizer,
      schedule=optimizer_lib.schedule(*schedule_of),
      strategy_step=strategy_lib.find(config).build(config, specs),
      abstract_single=abstract_state,
    ).jitted()
    stream = stream_lib.Stream(config, mesh_lib.batch_sharding(mesh))
    feed = stream.train(source, case.batch, 0)
    batch = next(feed)
    feed.close()
    batch['image'] = batch['image'][..., : case.channels]
    state = state_lib.create(init, abstract_state)
    return jax_contestant(_ahead(step), state, batch)

  return make


def _ahead(step):
  """Compiles a step at its first call, as training does."""
  from anp_jax.system import compile_cache

  programs = []

  def call(state, batch):
    if not programs:
      programs.append(step.lower(state, batch).compile())
      compile_cache.release_memory()
    return programs[0](state, batch)

  return call


def _config(case, cache):
  from anp_jax import config as config_lib
  from anp_jax.config import command_line

  spec = os.path.join(_ROOT, 'configs', 'resnet_anp.py')
  config = command_line.load(
    spec,
    command_line.applying(
      spec,
      {
        'batch_size': str(case.batch),
        'compile_cache.dir': cache,
        'data.image_size': str(case.side),
        'data.resize': str(case.side),
        'data.source': 'synthetic',
        'data.synthetic_classes': str(case.classes),
        'model.dtype': case.dtype,
        'model.name': case.model,
        'model.norm_group': '0',
        'optimizer.learning_rate': str(RATE),
        'optimizer.momentum': str(MOMENTUM),
        'optimizer.name': 'momentum',
        'optimizer.weight_decay': str(DECAY),
        'schedule.name': 'constant',
        'schedule.warmup': '0 steps',
      },
    ),
  )
  return config_lib.replaced(
    config,
    {
      'data.mean': config.data.mean[: case.channels],
      'data.std': config.data.std[: case.channels],
    },
  )


def flax_step(case) -> Contestant:
  """Stock Flax: its own layers, one jit, the state donated."""
  import jax
  import jax.numpy as jnp
  import optax

  net = flax_network(case)
  pixels, names = jax.random.split(jax.random.key(0))
  shape = (case.batch, case.side, case.side, case.channels)
  images = jax.random.bits(pixels, shape, jnp.uint8)
  labels = jax.random.randint(names, (case.batch,), 0, case.classes)
  optimizer = optax.chain(
    optax.add_decayed_weights(
      DECAY, lambda params: jax.tree.map(lambda p: p.ndim > 1, params)
    ),
    optax.sgd(RATE, MOMENTUM),
  )

  def normalised(images):
    mean, std = (jnp.array(c[: case.channels]) for c in (_MEAN, _STD))
    return ((images.astype('float32') - mean) / std).astype(case.dtype)

  @jax.jit
  def create():
    variables = dict(net.init(jax.random.key(0), normalised(images[:1]), False))
    params = variables.pop('params')
    return params, variables, optimizer.init(params)

  @functools.partial(jax.jit, donate_argnums=0)
  def step(state, images, labels):
    params, stats, moments = state

    def loss_fn(params):
      logits, new_stats = net.apply(
        {'params': params, **stats},
        normalised(images),
        True,
        mutable=['batch_stats'],
      )
      losses = optax.softmax_cross_entropy_with_integer_labels(
        logits.astype('float32'), labels
      )
      return losses.mean(), new_stats

    (loss, stats), gradients = jax.value_and_grad(loss_fn, has_aux=True)(params)
    updates, moments = optimizer.update(gradients, moments, params)
    return (optax.apply_updates(params, updates), stats, moments), loss

  return jax_contestant(step, create(), images, labels)


def jax_contestant(step, state, *batch) -> Contestant:
  """A step in JAX, (state, *batch) -> (state, values), and its first state."""
  import jax

  device = jax.devices()[0]
  states = [state]

  def run(steps):
    for _ in range(steps):
      states[0], values = step(states[0], *batch)
    jax.block_until_ready((states[0], values))

  def device_memory():
    return (device.memory_stats() or {}).get('peak_bytes_in_use', 0)

  on_cpu = device.platform == 'cpu'
  return Contestant(run, device_memory, 'cpu' if on_cpu else device.device_kind)


def flax_network(case):
  """The case's network of stock layers, called (images, train)."""
  from flax import linen as nn

  conv = functools.partial(nn.Conv, dtype=case.dtype)
  dense = functools.partial(nn.Dense, dtype=case.dtype)
  # Caffe's pools have windows that the far edge cuts off: one pixel more.
  edge = ((0, 1), (0, 1))

  def lenet(x):
    for features in (20, 50):
      x = conv(features, (5, 5), padding='VALID')(x)
      x = nn.max_pool(x, (2, 2), (2, 2))
    return dense(case.classes)(nn.relu(dense(500)(x.reshape(len(x), -1))))

  def response(x):
    mean = nn.avg_pool(x * x, (3, 3), padding='SAME')
    return x * (1 + 5e-5 * mean) ** -0.75

  def mean_pool(x):
    return nn.avg_pool(x, (3, 3), (2, 2), edge, count_include_pad=False)

  def cifar10_full(x):
    x = nn.max_pool(conv(32, (5, 5))(x), (3, 3), (2, 2), edge)
    x = response(nn.relu(x))
    x = response(mean_pool(nn.relu(conv(32, (5, 5))(x))))
    x = mean_pool(nn.relu(conv(64, (5, 5))(x)))
    return dense(case.classes)(x.reshape(len(x), -1))

  def resnet50(x, train):
    bare = functools.partial(conv, use_bias=False)
    norm = functools.partial(
      nn.BatchNorm, not train, momentum=0.9, dtype=case.dtype
    )
    around = ((1, 1), (1, 1))
    x = bare(64, (7, 7), 2, ((3, 3), (3, 3)))(x)
    x = nn.max_pool(nn.relu(norm()(x)), (3, 3), (2, 2), around)
    for stage, blocks in enumerate((3, 4, 6, 3)):
      for block in range(blocks):
        inside, stride = 64 * 2**stage, 2 if stage and not block else 1
        y = nn.relu(norm()(bare(inside, (1, 1))(x)))
        y = nn.relu(norm()(bare(inside, (3, 3), stride, around)(y)))
        y = norm()(bare(4 * inside, (1, 1))(y))
        if not block:
          x = norm()(bare(4 * inside, (1, 1), stride)(x))
        x = nn.relu(x + y)
    return dense(case.classes)(x.mean((1, 2)))

  class Network(nn.Module):
    @nn.compact
    def __call__(self, images, train: bool):
      if case.model == 'resnet50':
        return resnet50(images, train)
      return {'lenet': lenet, 'cifar10_full': cifar10_full}[case.model](images)

  return Network()


def torch_step(case, compiled: bool, on_gpu: bool) -> Contestant:
  """PyTorch: channels last, bfloat16 by autocast, the fused optimizer.

  Args:
    case: what is trained.
    compiled: whether forward, loss and backward go through torch.compile; on a
      GPU with mode='max-autotune'.
    on_gpu: where JAX computes too; RuntimeError where PyTorch has no GPU.
  """
  import torch

  if on_gpu and not torch.cuda.is_available():
    raise RuntimeError('this PyTorch has no GPU')
  place = 'cuda' if on_gpu else 'cpu'
  torch.manual_seed(0)
  torch.backends.cudnn.benchmark = True
  # What JAX's default precision is on a GPU.
  torch.set_float32_matmul_precision('high')
  last = torch.channels_last
  net = torch_network(case).to(place, memory_format=last).train()
  shape = (case.batch, case.channels, case.side, case.side)
  images = torch.randint(0, 256, shape, dtype=torch.uint8, device=place)
  images = images.to(memory_format=last)
  labels = torch.randint(0, case.classes, (case.batch,), device=place)
  mean, std = (
    torch.tensor(c[: case.channels], device=place)[:, None, None]
    for c in (_MEAN, _STD)
  )
  kernels = [p for p in net.parameters() if p.ndim > 1]
  vectors = [p for p in net.parameters() if p.ndim == 1]
  optimizer = torch.optim.SGD(
    [{'params': kernels, 'weight_decay': DECAY}, {'params': vectors}],
    RATE, MOMENTUM, fused=True,
  )  # fmt: skip

  def loss_of(images, labels):
    narrow = case.dtype == 'bfloat16'
    with torch.autocast(place, torch.bfloat16, enabled=narrow):
      logits = net((images.float() - mean) / std)
    return torch.nn.functional.cross_entropy(logits.float(), labels)

  if compiled:
    loss_of = torch.compile(loss_of, mode='max-autotune' if on_gpu else None)

  def run(steps):
    for _ in range(steps):
      optimizer.zero_grad()
      loss_of(images, labels).backward()
      optimizer.step()
    if on_gpu:
      torch.cuda.synchronize()

  if on_gpu:
    name = torch.cuda.get_device_name()
    return Contestant(run, torch.cuda.max_memory_allocated, name)
  return Contestant(run, int, 'cpu')


def torch_network(case) -> Any:
  """The case's network as a torch.nn.Module."""
  from torch import nn

  if case.model == 'resnet50':
    return _torch_resnet50(case)
  if case.model == 'lenet':
    side = case.side
    for _ in range(2):
      side = -(-(side - 4) // 2)
    return nn.Sequential(
      nn.Conv2d(case.channels, 20, 5),
      nn.MaxPool2d(2, ceil_mode=True),
      nn.Conv2d(20, 50, 5),
      nn.MaxPool2d(2, ceil_mode=True),
      nn.Flatten(),
      nn.Linear(50 * side**2, 500),
      nn.ReLU(),
      nn.Linear(500, case.classes),
    )
  side = case.side
  for _ in range(3):
    side = -(-(side - 1) // 2)
  return nn.Sequential(
    nn.Conv2d(case.channels, 32, 5, padding=2),
    nn.MaxPool2d(3, 2, ceil_mode=True),
    nn.ReLU(),
    _torch_response(),
    nn.Conv2d(32, 32, 5, padding=2),
    nn.ReLU(),
    nn.AvgPool2d(3, 2, ceil_mode=True),
    _torch_response(),
    nn.Conv2d(32, 64, 5, padding=2),
    nn.ReLU(),
    nn.AvgPool2d(3, 2, ceil_mode=True),
    nn.Flatten(),
    nn.Linear(64 * side**2, case.classes),
  )


def _torch_response():
  from torch import nn

  class Response(nn.Module):
    def forward(self, x):
      mean = nn.functional.avg_pool2d(x * x, 3, 1, 1)
      return x * (1 + 5e-5 * mean) ** -0.75

  return Response()


def _torch_resnet50(case):
  from torch import nn

  def convolution(inputs, features, size, stride=1):
    padding = (size - 1) // 2
    return (
      nn.Conv2d(inputs, features, size, stride, padding, bias=False),
      nn.BatchNorm2d(features),
    )

  class Block(nn.Module):
    def __init__(self, inputs, inside, stride):
      super().__init__()
      self.body = nn.Sequential(
        *convolution(inputs, inside, 1),
        nn.ReLU(inplace=True),
        *convolution(inside, inside, 3, stride),
        nn.ReLU(inplace=True),
        *convolution(inside, 4 * inside, 1),
      )
      self.shortcut = nn.Identity()
      if inputs != 4 * inside:
        self.shortcut = nn.Sequential(
          *convolution(inputs, 4 * inside, 1, stride)
        )

    def forward(self, x):
      return nn.functional.relu_(self.body(x) + self.shortcut(x))

  layers = [
    *convolution(case.channels, 64, 7, 2),
    nn.ReLU(inplace=True),
    nn.MaxPool2d(3, 2, 1),
  ]
  inputs = 64
  for stage, blocks in enumerate((3, 4, 6, 3)):
    for block in range(blocks):
      inside = 64 * 2**stage
      layers.append(Block(inputs, inside, 2 if stage and not block else 1))
      inputs = 4 * inside
  return nn.Sequential(
    *layers,
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(inputs, case.classes),
  )
