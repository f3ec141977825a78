"""Layers that are computed by batch: each device has its own rows.

The first layers of a plan, with large maps and small kernels, may divide the
batch in place of the channels, as Krizhevsky 2014 (arXiv 1404.5997) divides the
convolutions of a network, but not its dense layers. Where they end, the devices
give each other their rows; from there on all have the whole batch. In the
backward pass each takes the gradient of its own rows; where a layer split by
channels reads them, each is sent it by all others.

Or all layers are, in parts that may be unlike (`computed`).

Gradients are by hand, as in `operation`. What all devices compute alike counts
once for each of them, so a device's loss counts for its share, `shared`: then
gradients of weights are sums over the devices, before and after the place.
"""

from collections.abc import Callable, Collection, Sequence
import contextlib

from flax import linen as nn
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from anp_jax import config as config_lib
from anp_jax.models import layers as layers_lib
from anp_jax.parallel import mesh as mesh_lib

_AXIS = mesh_lib.MODEL


class Rows:
  """The rows of one forward pass while it is traced.

  Attributes:
    layers: paths; they are computed by batch.
    are_joined: whether they have ended.
  """

  def __init__(self, layers: Collection[str], is_of_rows: bool = False):
    """Begins a pass.

    Args:
      layers: paths; they are computed by batch.
      is_of_rows: whether all of the pass is, of a device's rows alone.
    """
    self.layers = layers
    self.are_joined = not (layers or is_of_rows)
    self._batch = None
    self._joined = None  # the last map of a device's rows, and that of all

  def operand(self, layer: str, x, is_split: bool):
    """What a layer's convolution reads, in place of x.

    Args:
      layer: path.
      x: (batch, height, width, channels), or a device's rows of it.
      is_split: whether the devices compute channels of the layer.

    Returns:
      The operand; whether its gradient is summed over the devices already.

    Raises:
      ValueError: if the layer is computed by batch, and comes after others; or
        if it reads another map than the first one after them.
    """
    if self._batch is None:
      self._batch = x.shape[0]
    # The batches of an evaluation may be of any size.
    if not self.layers or not divides(lax.axis_size(_AXIS), self._batch):
      return x, False
    if layer in self.layers:
      if self.are_joined:
        raise ValueError(f'{layer} is used after them')
      return (own(x) if x.shape[0] == self._batch else x), False
    self.are_joined = True
    if x.shape[0] == self._batch:
      return x, False
    if self._joined is None:
      self._joined = x, _gathered(lax.stop_gradient(x))
    part, gathered = self._joined
    if x is not part:
      raise ValueError(f'{layer} reads another map of those before')
    return (_split_operand if is_split else _operand)(x, gathered), is_split


@contextlib.contextmanager
def checked(rows: Rows):
  """In this context, the network is applied to which the rows belong.

  Raises:
    ConfigError: if it uses more than one map of those before the place where
      layers by batch end, or something before it needs the whole batch.
  """
  if rows.are_joined:
    yield
    return

  def refuse(following, arguments, keywords, context):
    result, module = following(*arguments, **keywords), context.module
    if rows.are_joined or context.method_name != '__call__':
      return result
    if isinstance(module, nn.BatchNorm) or (
      isinstance(module, layers_lib.BatchNorm) and not module.group
    ):
      raise ValueError('a batch norm is over the whole batch')
    # Of rows alone, it draws by the first of them.
    unchanged = any(result is x for x in (*arguments, *keywords.values()))
    if isinstance(module, nn.Dropout) and not unchanged and rows.layers:
      raise ValueError('dropout would leave out the same of all parts')
    return result

  try:
    with nn.intercept_methods(refuse):
      yield
  except (TypeError, ValueError) as error:
    reason = str(error).strip().splitlines()[0]
    raise config_lib.ConfigError(
      f'config.strategy.plan: the network cannot divide its batch like that: {reason}'
    ) from error


def divides(devices: int, batch: int) -> bool:
  """Whether so many devices may divide a batch.

  Each has two rows or more: a map of one would be broadcast to those of all,
  where a network adds them, and nobody would see the mistake.
  """
  return batch % devices == 0 and batch >= 2 * devices


def own(x):
  """This device's rows (batch / devices, ...) of an array (batch, ...)."""
  rows = x.shape[0] // lax.axis_size(_AXIS)
  return lax.dynamic_slice_in_dim(x, lax.axis_index(_AXIS) * rows, rows)


def computed(compute: Callable, batch, counts: Sequence[int]):
  """compute(this device's rows of a batch); zeros for a device without any.

  Args:
    compute: batch -> pytree of arrays, whose shapes do not depend on the rows.
      Devices of unlike numbers run unlike programs: no collective is in it
      that is of both.
    batch: pytree of arrays (rows, ...), the same on all devices of the axis.
    counts: rows of each device of the axis.
  """
  device, sizes = lax.axis_index(_AXIS), sorted(set(counts))
  begin = jnp.asarray(np.cumsum([0, *counts[:-1]]))[device]

  def program(size):
    def compute_rows(batch):
      if not size:
        shapes = jax.eval_shape(compute, batch)
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
      return compute(jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, begin, size), batch))

    return compute_rows

  if len(sizes) == 1:
    return program(sizes[0])(batch)
  choice = jnp.asarray([sizes.index(n) for n in counts])[device]
  return lax.switch(choice, [program(size) for size in sizes], batch)


@jax.custom_vjp
def shared(x):
  """x, which all devices have; its gradient is shared out among them."""
  return x


@jax.custom_vjp
def _operand(part, gathered):
  """`gathered`, which all devices compute the same from."""
  del part
  return gathered


@jax.custom_vjp
def _split_operand(part, gathered):
  """`gathered`, of whose gradient each device has that of its channels."""
  del part
  return gathered


def share(x):
  """A device's share of what all have: x / devices."""
  return x / lax.axis_size(_AXIS)


def _operand_backward(_, dy):
  return own(dy) * lax.axis_size(_AXIS), jnp.zeros_like(dy)


def _split_operand_backward(_, dy):
  devices = lax.axis_size(_AXIS)
  for_each = dy.reshape(devices, -1, *dy.shape[1:])
  parts = lax.all_to_all(for_each, _AXIS, 0, 0)
  # They travel in their dtype, to which each device rounded them.
  wide = jnp.promote_types(dy.dtype, jnp.float32)
  total = parts.astype(wide).sum(0) * devices
  return total.astype(dy.dtype), jnp.zeros_like(dy)


shared.defvjp(lambda x: (shared(x), None), lambda _, dy: (share(dy),))
_operand.defvjp(lambda *args: (_operand(*args), None), _operand_backward)
_split_operand.defvjp(lambda *args: (_split_operand(*args), None), _split_operand_backward)


def _gathered(part):
  return lax.all_gather(part, _AXIS, tiled=True)
