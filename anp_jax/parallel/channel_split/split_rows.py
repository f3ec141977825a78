"""Layers that are computed by batch: each device computes its rows.

The first layers of a plan, with large maps and small kernels, may divide the
batch in place of the channels, as Krizhevsky 2014 (arXiv 1404.5997) divides the
convolutions of a network, but not its dense layers. After them the devices gather
their rows, and all have the whole batch. In the backward pass each device takes the
gradient of its rows; if a layer that is split by channels reads them, the others
send it.

Gradients are written by hand, as in `split_operation`. All devices compute the same
loss, so each takes an equal share of it, `shared`: then gradients of weights are
sums over the devices, before and after the gather.
"""

from collections.abc import Collection, Iterator
import contextlib

from flax import linen as nn
import jax
from jax import lax
import jax.numpy as jnp

from anp_jax import config as config_lib
from anp_jax.models import layers as layers_lib
from anp_jax.parallel import mesh as mesh_lib

_AXIS = mesh_lib.MODEL


class Rows:
  """The rows of one forward pass while it is traced.

  Attributes:
    layers: paths of the layers that are computed by batch.
    are_joined: whether the rows have been gathered.
  """

  def __init__(self, layers: Collection[str]):
    """Begins a pass; `layers` are paths, of the layers that are computed by batch."""
    self.layers = layers
    self.are_joined = not layers
    self._batch = 0  # 0: no convolution yet
    # The last map of a device's rows, and the map of all rows.
    self._joined: tuple[jax.Array, jax.Array] | None = None

  def operand(self, layer: str, x: jax.Array, is_split: bool) -> tuple[jax.Array, bool]:
    """The array that a layer's convolution reads in place of x.

    Args:
      layer: path of the layer.
      x: (batch, height, width, channels), or a device's rows of it.
      is_split: whether the layer is split by channels.

    Returns:
      The operand; whether its gradient is summed over the devices already.

    Raises:
      ValueError: if a layer by batch follows other layers, or if a layer after
        them reads another map than the first one.
    """
    self._batch = self._batch or x.shape[0]
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
def checked(rows: Rows) -> Iterator[None]:
  """In this context, the network of the rows is applied.

  Raises:
    ConfigError: if a layer before the gather needs the whole batch, or layers after
      it read more than one map from before.
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
    # Dropout draws by the first row.
    unchanged = any(result is x for x in (*arguments, *keywords.values()))
    if isinstance(module, nn.Dropout) and not unchanged:
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
  """Whether `devices` devices may divide a batch.

  Each needs two rows or more: a network that adds a map of one row to a map of all
  would broadcast it without an error.
  """
  return batch % devices == 0 and batch >= 2 * devices


def own(x: jax.Array) -> jax.Array:
  """This device's rows (batch / devices, ...) of an array (batch, ...)."""
  rows = x.shape[0] // lax.axis_size(_AXIS)
  return lax.dynamic_slice_in_dim(x, lax.axis_index(_AXIS) * rows, rows)


@jax.custom_vjp
def shared(x: jax.Array) -> jax.Array:
  """x, which all devices have; each has its share of the gradient."""
  return x


@jax.custom_vjp
def _operand(part, gathered):
  """`gathered`, as the operand of a layer that all devices compute in full."""
  del part
  return gathered


@jax.custom_vjp
def _split_operand(part, gathered):
  """`gathered`, as the operand of a layer that is split by channels."""
  del part
  return gathered


def share(x: jax.Array) -> jax.Array:
  """A device's share of an array that all devices have: x / devices."""
  return x / lax.axis_size(_AXIS)


def _operand_backward(_, dy):
  return own(dy) * lax.axis_size(_AXIS), jnp.zeros_like(dy)


def _split_operand_backward(_, dy):
  devices = lax.axis_size(_AXIS)
  for_each = dy.reshape(devices, -1, *dy.shape[1:])
  parts = lax.all_to_all(for_each, _AXIS, 0, 0)
  # Sent in their dtype, to which each device rounded them, and added wider.
  wide = jnp.promote_types(dy.dtype, jnp.float32)
  total = parts.astype(wide).sum(0) * devices
  return total.astype(dy.dtype), jnp.zeros_like(dy)


shared.defvjp(lambda x: (shared(x), None), lambda _, dy: (share(dy),))
_operand.defvjp(lambda *args: (_operand(*args), None), _operand_backward)
_split_operand.defvjp(lambda *args: (_split_operand(*args), None), _split_operand_backward)


def _gathered(part):
  return lax.all_gather(part, _AXIS, tiled=True)
