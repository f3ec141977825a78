"""The convolutions of a network, as its layers call them."""

from collections.abc import Callable
import dataclasses

from flax import linen as nn
import jax
from jax import lax

from anp_jax.models import layers

# Modules whose layers have other kernels than their parameters.
_MAKERS = (nn.SpectralNorm, nn.WeightNorm)


def computed_by(handle: Callable):
  """In this context, `handle` computes the convolutions of applied models.

  Of one whose kernel is made of several parameters, such as nn.WeightNorm's,
  the gradients of all of these would need the whole kernel's: not handled.

  Args:
    handle: called (path, convolve, x, kernel) for each convolution of one
      group; path is its layer's, as 'stage1_block1/conv1'; convolve(x, kernel,
      platform=None) the result, lowered for another platform than the
      program's where one is named. Gives the result.

  Returns:
    A context manager.
  """
  inside = []  # modules that make kernels, from the outermost

  def intercept(following, arguments, keywords, context):
    module, method = context.module, context.method_name
    if isinstance(module, _MAKERS) and method == '__call__':
      inside.append(module)
      try:
        return following(*arguments, **keywords)
      finally:
        inside.pop()
    if inside:
      return following(*arguments, **keywords)
    path = '/'.join(module.path)
    if isinstance(module, layers.Conv) and method == 'convolve':
      x, kernel, padding = arguments
      # As the method does, for use outside of the module too.
      stride, here = module.stride, module.platform

      def lowered(x, kernel, platform=None):
        return layers.convolve(x, kernel, stride, padding, platform or here)

      return handle(path, lowered, x, kernel)
    if not isinstance(module, nn.Conv) or method != '__call__':
      return following(*arguments, **keywords)
    # A user's own network: Flax's layer has a field for what convolves.
    own = module.conv_general_dilated
    whole = own or lax.conv_general_dilated

    def convolve(x, kernel, *more, feature_group_count=1, **settings):
      def one(x, kernel, platform=None):
        del platform  # Flax's is the same on all
        return whole(
          x, kernel, *more, feature_group_count=feature_group_count, **settings
        )

      if feature_group_count > 1:  # a feature sees some of the channels
        return one(x, kernel)
      return handle(path, one, x, kernel)

    object.__setattr__(module, 'conv_general_dilated', convolve)
    try:
      return following(*arguments, **keywords)
    finally:  # the layer may be called again
      object.__setattr__(module, 'conv_general_dilated', own)

  return nn.intercept_methods(intercept)


@dataclasses.dataclass(frozen=True)
class Call:
  """One convolution of a network's forward pass.

  Attributes:
    layer: path of its layer; one that is used twice has two calls.
    convolve: (x, kernel, platform=None) -> y.
    x, kernel, y: jax.ShapeDtypeStruct, of one device's images.
    from_images: whether no gradient of x is asked for.
  """

  layer: str
  convolve: Callable
  x: jax.ShapeDtypeStruct
  kernel: jax.ShapeDtypeStruct
  y: jax.ShapeDtypeStruct
  from_images: bool

  @property
  def features(self) -> int:
    """Of the result."""
    return self.kernel.shape[-1]


def find(model, variables, images) -> list[Call]:
  """The convolutions of a model, in the order in which they are called.

  Args:
    model: Flax module called (images, train).
    variables: of the model, or their shapes.
    images: jax.ShapeDtypeStruct (batch, height, width, 3), normalised.
  """
  calls = []

  def note(path, convolve, x, kernel):
    y = convolve(x, kernel)
    x, kernel, out = (jax.ShapeDtypeStruct(a.shape, a.dtype)
                      for a in (x, kernel, y))  # fmt: skip
    # The first one called reads the images.
    calls.append(Call(path, convolve, x, kernel, out, not calls))
    return y

  with computed_by(note):
    jax.eval_shape(lambda v, x: model.apply(v, x, False), variables, images)
  return calls
