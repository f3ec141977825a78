"""Maps whose channels are divided over devices, and channelwise functions of them.

A network's code receives whole arrays, so that it may do anything with them. For
each gathered array this device's channels are remembered: a function of
`layers.channelwise` is applied to them, and its result is gathered in turn. XLA
removes a gather whose result is not used.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from anp_jax.parallel.channel_split import split_operation


class Parts:
  """The maps of one forward pass while it is traced."""

  def __init__(self):
    # By a map's id: the map, which keeps its id in use; this device's channels
    # of it; the number of channels of each device.
    self._parts: dict[int, tuple[jax.Array, jax.Array, tuple[int, ...]]] = {}

  def convolve(
    self, convolve: Callable, x: jax.Array, kernel: jax.Array, counts: tuple
  ) -> jax.Array:
    """A convolution: each device computes its features, and all are gathered.

    Arguments are those of `split_operation.own_features`.
    """
    entry = self._parts.get(id(x))
    if entry:
      gathered, part, channels = entry
      x = split_operation.operand(part, lax.stop_gradient(gathered), channels)
    part = split_operation.own_features(convolve, x, kernel, counts, entry is None)
    return self._whole(part, counts)

  def apply(self, function: Callable, x: jax.Array, *arguments: Any) -> Any:
    """function(x, *arguments), computed on the devices that have the channels of x.

    Arguments and result are those of `layers.by_channel`.
    """
    entry = self._parts.get(id(x))
    if entry is None:
      return function(x, *arguments)
    _, part, counts = entry
    result = function(part, *self._own_arguments(arguments, counts))
    if not isinstance(result, tuple):
      return self._whole(result, counts)
    first, *rest = result
    # In one collective: they are small, and each collective costs a latency.
    rest = split_operation.whole(jnp.stack(rest), counts)
    return self._whole(first, counts), *rest

  def _own_arguments(self, arguments, counts):
    """The arguments, with this device's channels of arrays."""
    result = list(arguments)
    alike: dict = {}  # indices of arrays that are cut together, by shape and dtype
    for i, x in enumerate(arguments):
      if not isinstance(x, jax.Array):
        continue
      entry = self._parts.get(id(x))
      if entry and entry[2] == counts:
        result[i] = entry[1]
      else:
        alike.setdefault((x.shape, x.dtype), []).append(i)
    for indices in alike.values():
      stacked = jnp.stack([arguments[i] for i in indices])
      cut = split_operation.own_part(stacked, counts)
      for i, part in zip(indices, cut, strict=True):
        result[i] = part
    return result

  def _whole(self, part, counts):
    gathered = split_operation.whole(part, counts)
    self._parts[id(gathered)] = gathered, part, counts
    return gathered
