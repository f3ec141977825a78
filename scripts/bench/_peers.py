"""The contestants of `step.py`: our step, and its peer in stock Flax.

Those in PyTorch are in `_torch_peers`. The peers' networks, loss and update are
the usual ones of each library. A library is imported only where one of its
steps is made, so that a worker holds one of them in memory and not all.
"""

from collections.abc import Callable
import contextlib
import functools
from typing import NamedTuple

from anp_jax.system import memory
from scripts.bench import _cases


class Contestant(NamedTuple):
  """A training step that is ready to run.

  Attributes:
    run: runs that many steps and waits for the last; the first one compiles.
    device_memory: bytes, the most that the accelerator held; 0 on a CPU.
    device: the accelerator's name, or 'cpu'.
    library: what computes convolutions in XLA's place; '' for nothing.
  """

  run: Callable[[int], None]
  device_memory: Callable[[], int]
  device: str
  library: str = ''


def our_maker(cache: str, cpu_library: str = 'auto') -> Callable:
  """Ours: imports what it takes; returns what makes the step of a case.

  Args:
    cache: folder of the persistent compilation cache.
    cpu_library: as config.model.cpu_library. oneDNN is opened here, as PyTorch
      opens its own when it is imported.
  """
  import jax

  from anp_jax import experiment
  from anp_jax.system import compile_cache, onednn

  library = None
  if jax.default_backend() == 'cpu' and cpu_library != 'xla':
    library = onednn.find()

  def make(case):
    config = _cases.config(case, cache, cpu_library)
    compile_cache.enable(config)
    opened = experiment.open(config, jax.devices()[:1])
    state, _ = opened.new_state()
    with contextlib.closing(opened.batches()) as feed:
      batch = next(feed)
    contestant = jax_contestant(_ahead(opened.program.train_step), state, batch)
    return contestant._replace(library=library.describe() if library else '')

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


def flax_step(case) -> Contestant:
  """Stock Flax: its own layers in the plain step."""
  import jax
  import jax.numpy as jnp

  from scripts.bench import _flax_networks

  pixels, names = jax.random.split(jax.random.key(0))
  shape = (case.batch, case.side, case.side, 3)
  images = jax.random.bits(pixels, shape, jnp.uint8)
  labels = jax.random.randint(names, (case.batch,), 0, case.classes)
  create, step = plain_step(case, _flax_networks.network(case))
  return jax_contestant(step, create(), images, labels)


def plain_step(case, net) -> tuple[Callable, Callable]:
  """A network's training step as Flax's users write it: one jit, the state donated.

  Args:
    case: what is trained.
    net: module, called (images, train).

  Returns:
    Jitted functions: () to the first state, and (state, images, labels) to the next state and
    the loss.
  """
  import jax
  import jax.numpy as jnp
  import optax

  optimizer = optax.chain(
    optax.add_decayed_weights(
      _cases.DECAY, lambda params: jax.tree.map(lambda p: p.ndim > 1, params)
    ),
    optax.sgd(_cases.RATE, _cases.MOMENTUM),
  )

  def normalised(images):
    mean, std = jnp.array(_cases.MEAN), jnp.array(_cases.STD)
    return ((images.astype('float32') - mean) / std).astype(case.dtype)

  @jax.jit
  def create():
    images = jnp.zeros((1, case.side, case.side, 3), case.dtype)
    variables = dict(net.init(jax.random.key(0), images, False))
    params = variables.pop('params')
    return params, variables, optimizer.init(params)

  @functools.partial(jax.jit, donate_argnums=0)
  def step(state, images, labels):
    params, stats, moments = state

    def loss_fn(params):
      logits, new_stats = net.apply(
        {'params': params, **stats}, normalised(images), True, mutable=['batch_stats']
      )
      losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype('float32'), labels)
      return losses.mean(), new_stats

    (loss, stats), gradients = jax.value_and_grad(loss_fn, has_aux=True)(params)
    updates, moments = optimizer.update(gradients, moments, params)
    return (optax.apply_updates(params, updates), stats, moments), loss

  return create, step


def jax_contestant(step, state, *batch) -> Contestant:
  """A step in JAX, (state, *batch) -> (state, values), and its first state."""
  import jax

  device = jax.devices()[0]
  states = [state]

  def run(steps):
    for _ in range(steps):
      states[0], values = step(states[0], *batch)
    jax.block_until_ready((states[0], values))

  device_memory = functools.partial(memory.of_device, device, 'peak_bytes_in_use')
  on_cpu = device.platform == 'cpu'
  return Contestant(run, device_memory, 'cpu' if on_cpu else device.device_kind)
