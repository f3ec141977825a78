"""A network's convolutions: their list, and a hook for a strategy to compute them."""

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
from typing import Any

from flax import linen as nn
import jax
from jax import lax

from anp_jax.models import layers
from anp_jax.models.layers import channelwise

# Modules that compute a layer's kernel from several parameters.
_KERNEL_MAKERS = (nn.SpectralNorm, nn.WeightNorm)


@contextlib.contextmanager
def computed_by(handler: Callable, by_channel: Callable | None = None) -> Iterator[None]:
  """In this context, `handler` computes the convolutions of applied models.

  It does not compute those whose kernel depends on several parameters, such as
  nn.WeightNorm's: the gradient of each would need that of the whole kernel.

  Args:
    handler: (path, convolve, x, kernel) -> y, called for each convolution of one
      group; path is its layer's, such as 'stage1_block1/conv1'; convolve is
      (x, kernel, platform=None) -> y, lowered for the program's platform or the
      one named.
    by_channel: computes channelwise functions, see
      `layers.channelwise.computed_by`; None: they are called directly.
  """
  kernel_makers = []  # modules that are being applied, from the outermost

  def intercept(following, arguments, keywords, context):
    module, method = context.module, context.method_name
    if isinstance(module, _KERNEL_MAKERS) and method == '__call__':
      kernel_makers.append(module)
      try:
        return following(*arguments, **keywords)
      finally:
        kernel_makers.pop()
    if kernel_makers:
      return following(*arguments, **keywords)
    # In a grouped convolution a feature depends on some of the channels only.
    if isinstance(module, layers.Conv) and method == 'convolve' and module.groups == 1:
      return _handle(handler, module, *arguments)
    if isinstance(module, nn.Conv) and method == '__call__':
      with _handling(handler, module):
        return following(*arguments, **keywords)
    return following(*arguments, **keywords)

  with contextlib.ExitStack() as stack:
    stack.enter_context(nn.intercept_methods(intercept))
    if by_channel is not None:
      stack.enter_context(channelwise.computed_by(by_channel))
    yield


@dataclasses.dataclass(frozen=True)
class Call:
  """One convolution of a network's forward pass.

  Attributes:
    layer: path of its layer; a layer that is used twice has two calls.
    convolve: (x, kernel, platform=None) -> y.
    x, kernel, y: shapes for one device's images.
    reads_images: whether x are the images, which need no gradient.
    gathered: shape of the last result of channelwise functions of y, such as a
      pool, before another function follows.
    reads: path of the layer whose `gathered` is x; '': none.
  """

  layer: str
  convolve: Callable
  x: jax.ShapeDtypeStruct
  kernel: jax.ShapeDtypeStruct
  y: jax.ShapeDtypeStruct
  reads_images: bool
  gathered: jax.ShapeDtypeStruct
  reads: str

  @property
  def features(self) -> int:
    """The number of output channels."""
    return self.kernel.shape[-1]


def find(model: nn.Module, variables: Any, images: jax.ShapeDtypeStruct) -> list[Call]:
  """The convolutions of a model, in the order in which they are called.

  Args:
    model: Flax module called as (images, train).
    variables: variables of the model, or their shapes.
    images: shape (batch, height, width, 3) of normalised images.
  """
  calls: list[Call] = []
  # By a map's id: the map, which keeps its id in use, and its call's index.
  places: dict[int, tuple[Any, int]] = {}

  def record(path, convolve, x, kernel):
    y = convolve(x, kernel)
    _, place = places.get(id(x), (None, None))
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (x, kernel, y)]
    places[id(y)] = y, len(calls)
    # The first one called reads the images.
    calls.append(
      Call(
        path,
        convolve,
        *shapes,
        reads_images=not calls,
        gathered=shapes[-1],
        reads='' if place is None else calls[place].layer,
      )
    )
    return y

  def follow(function, x, *arguments):
    result = function(x, *arguments)
    _, place = places.get(id(x), (None, None))
    if place is not None:
      y = result[0] if isinstance(result, tuple) else result
      places[id(y)] = y, place
      gathered = jax.ShapeDtypeStruct(y.shape, y.dtype)
      calls[place] = dataclasses.replace(calls[place], gathered=gathered)
    return result

  with computed_by(record, follow):
    jax.eval_shape(lambda v, x: model.apply(v, x, False), variables, images)
  return calls


def _handle(handler, module, x, kernel, padding, after=None):
  """The result of a `layers.Conv`, computed by the handler."""
  stride, default = module.stride, module.platform

  def convolve(x, kernel, platform=None):
    return layers.convolve(x, kernel, stride, padding, platform or default)

  y = handler('/'.join(module.path), convolve, x, kernel.astype(x.dtype))
  return y if after is None else after.follow(y)


@contextlib.contextmanager
def _handling(handler, module):
  """In this context, the handler computes a Flax layer of a user's network.

  Flax's layer has a field for the function that convolves.
  """
  path, field = '/'.join(module.path), module.conv_general_dilated
  general = field or lax.conv_general_dilated

  def convolve(x, kernel, *arguments, feature_group_count=1, **keywords):
    def convolve_on(x, kernel, platform=None):
      del platform  # Flax lowers alike for all platforms
      return general(x, kernel, *arguments, feature_group_count=feature_group_count, **keywords)

    if feature_group_count > 1:  # a feature depends on some of the channels only
      return convolve_on(x, kernel)
    return handler(path, convolve_on, x, kernel)

  object.__setattr__(module, 'conv_general_dilated', convolve)
  try:
    yield
  finally:  # the layer may be called again
    object.__setattr__(module, 'conv_general_dilated', field)
