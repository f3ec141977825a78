"""Maps with each device's own channels, and what follows them.

All that a network sees is whole arrays, so that it may do with them what it
likes. Behind an array that was gathered stands what it was gathered from: a
function of the kind of `layers.channelwise` is applied to that, and its result
is gathered in turn. A gather that nobody uses is not done.
"""

from collections.abc import Callable

import jax
from jax import lax
import jax.numpy as jnp

from anp_jax.parallel.channel_split import split_operation


class Parts:
  """The maps of one forward pass while it is traced."""

  def __init__(self):
    # By a map's id: the map, which keeps its id in use; this device's channels
    # of it; how many each device has.
    self._parts = {}

  def convolve(self, convolve: Callable, x, kernel, counts: tuple[int, ...], *, sums: bool = True):
    """Convolves; each device computes its features, and gets all.

    Arguments are those of `split_operation.own_features`.
    """
    entry = self._parts.get(id(x))
    if entry:
      gathered, part, channels = entry
      x = split_operation.operand(part, lax.stop_gradient(gathered), channels)
    part = split_operation.own_features(convolve, x, kernel, counts, sums=sums and entry is None)
    return self._whole(part, counts)

  def apply(self, function: Callable, x, *arguments):
    """function(x, *arguments), where the channels of x are.

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
    # Together: they are small, and each collective costs a latency.
    rest = split_operation.whole(jnp.stack(rest), counts)
    return self._whole(first, counts), *rest

  def _own_arguments(self, arguments, counts):
    """The arguments, of arrays this device's channels."""
    result = list(arguments)
    alike = {}  # indices of arrays that are cut together, by shape and dtype
    for i, x in enumerate(arguments):
      if not isinstance(x, jax.Array):
        continue
      _, part, channels = self._parts.get(id(x), (None, None, None))
      if channels == counts:
        result[i] = part
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
