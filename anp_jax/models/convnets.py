"""Plain convolutional networks: three of Caffe's, one of a paper.

Caffe's small examples run on a laptop in minutes. The config has what is not part of a network:
Caffe's solvers give biases twice the learning rate, and CIFAR-10's classifier 250
times the weight decay (`optimizer.multipliers` and `decay_multipliers`). Caffe also
has a spread of initial weights for each layer; here kernels start as everywhere in
this package, and biases at zero.
"""

import functools

from flax import linen as nn
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from anp_jax.models import layers
from anp_jax.models.layers import example_randomness


class _Network(layers.Network):
  """The layers of a network."""

  def _conv(self, features, padding, name, size=5, **fields):
    fields |= dict(dtype=self.dtype, param_dtype=self.param_dtype, platform=self.platform)
    return layers.Conv(features, size, padding=padding, use_bias=True, name=name, **fields)

  def _hidden(self, x, features, name):
    """A fully connected layer with a ReLU, of a map or of vectors."""
    types = dict(dtype=self.dtype, param_dtype=self.param_dtype)
    he = layers.Initializer('truncated_normal', 2.0, 'fan_in')  # arXiv 1502.01852
    dense = nn.Dense(features, kernel_init=he, bias_init=layers.ZEROS, name=name, **types)
    return layers.relu(dense(x.reshape(x.shape[0], -1)), self.platform)

  def _head(self, x):
    return layers.head(self, layers.Initializer('normal', 0.01))(x.reshape(x.shape[0], -1))


class LeNet(_Network):
  """The network of Caffe's MNIST example, after LeCun et al. 1998.

  Two 5x5 convolutions without padding, of 20 and 50 features, each followed by
  a maximum over 2x2; 500 hidden units with a ReLU; linear classifier. As in the
  original no other layer has a nonlinearity. For 28x28 gray images and 10 classes
  it has 431,080 parameters; for RGB, which training reads, 1,000 more.
  """

  @nn.compact
  def __call__(self, images, train: bool):
    """(batch, height, width, channels) normalised to logits (batch, classes).

    Raises:
      ConfigError: for images under 15 pixels a side.
    """
    del train
    self.check_side(images, 15, 'lenet')
    x = images
    for i, features in enumerate((20, 50), 1):
      x = self._conv(features, 'VALID', f'conv{i}')(x)
      x = pool(x, 'max', 2, 2, self.platform)
    return self._head(self._hidden(x, 500, 'hidden'))


class Cifar10Full(_Network):
  """The "full" network of Caffe's CIFAR-10 example, after cuda-convnet.

  Three 5x5 convolutions of 32, 32 and 64 features, each followed by a pool of
  3x3 at every second pixel: the first a maximum (and then the ReLU), the others
  a mean (after the ReLU). Local response normalisation follows the first two
  pools. Linear classifier. For 32x32 colour images and 10 classes it has 89,578
  parameters.

  The response normalisation is the original's, constants too, and was tuned for
  pixels of 0 to 255 less their mean, that is config.data.std=(1, 1, 1). On
  images of unit spread it does next to nothing until activations have grown.
  """

  @nn.compact
  def __call__(self, images, train: bool):
    """(batch, height, width, channels) normalised to logits (batch, classes).

    Raises:
      ConfigError: for images under 12 pixels a side.
    """
    del train
    self.check_side(images, 12, 'cifar10_full')
    x = self._conv(32, 2, 'conv1')(images)
    x = layers.relu(pool(x, 'max', 3, 2, self.platform), self.platform)
    x = normalise_response(x, platform=self.platform)
    x = layers.relu(self._conv(32, 2, 'conv2')(x), self.platform)
    x = pool(x, 'mean', 3, 2, self.platform)
    x = normalise_response(x, platform=self.platform)
    x = layers.relu(self._conv(64, 2, 'conv3')(x), self.platform)
    x = pool(x, 'mean', 3, 2, self.platform)
    return self._head(x)


class TwoConvolutions(_Network):
  """Two wide convolutions: the networks of Marques et al. (arXiv 1712.02546).

  Their number of kernels is the paper's, from 50 and 500 to 500 and 1,500, and
  so is that convolutions are most of the work. What else there is, is chosen
  here: 5x5 pixels, each followed by a ReLU and a maximum over 2x2; linear
  classifier. For 32x32 images and 10 classes the largest has 19,749,510
  parameters.

  Attributes:
    kernels: features of the two convolutions.
  """

  kernels: tuple[int, int] = (500, 1500)

  @nn.compact
  def __call__(self, images, train: bool):
    """Normalised (batch, height, width, channels) to (batch, classes)."""
    del train
    x = images
    for i, features in enumerate(self.kernels, 1):
      x = layers.relu(self._conv(features, 2, f'conv{i}')(x), self.platform)
      x = pool(x, 'max', 2, 2, self.platform)
    return self._head(x)


class CaffeNet(_Network):
  """CaffeNet, Caffe's reference for ImageNet; with `norm_first` Caffe's AlexNet.

  Krizhevsky et al. 2012 on one device (Jia et al. 2014, arXiv 1408.5093). For
  images of 227x227 and 1,000 classes it has 60,965,224 parameters. DeepSentiBank
  (Chen et al. 2014, arXiv 1410.8586) and the detectors of MVSO (Jou et al. 2015,
  arXiv 1508.03868) are of this kind.

  Attributes:
    norm_first: whether the response normalisation comes before the pool.
    dropout: probability that a hidden number is set to zero; Caffe's is 0.5.
  """

  norm_first: bool = False
  dropout: float = 0.0

  @nn.compact
  def __call__(self, images, train: bool):
    """(batch, height, width, channels) normalised to logits (batch, classes).

    Raises:
      ConfigError: for images under 55 pixels a side.
    """
    self.check_side(images, 55, 'caffenet')
    relu = functools.partial(layers.relu, platform=self.platform)
    largest = functools.partial(pool, kind='max', window=3, stride=2, platform=self.platform)
    first, second = (
      (normalise_over_channels, largest) if self.norm_first else (largest, normalise_over_channels)
    )
    x = second(first(relu(self._conv(96, 0, 'conv1', 11, stride=4)(images))))
    x = second(first(relu(self._conv(256, 2, 'conv2', groups=2)(x))))
    x = relu(self._conv(384, 1, 'conv3', 3)(x))
    x = relu(self._conv(384, 1, 'conv4', 3, groups=2)(x))
    x = relu(self._conv(256, 1, 'conv5', 3, groups=2)(x))
    x = largest(x).transpose(0, 3, 1, 2)  # Caffe's order, in which fc6 has its weights
    for name in ('fc6', 'fc7'):
      x = self._hidden(x, 4096, name)
      if train and self.dropout:
        x = example_randomness.dropout(self, x, self.dropout)
    return self._head(x)


def pool(x: jax.Array, kind: str, window: int, stride: int, platform: str = 'cpu') -> jax.Array:
  """Pools as Caffe does: a window that the far edge cuts off counts too.

  Args:
    x: (batch, height, width, channels), any float dtype.
    kind: 'max' or 'mean'; a mean is over the pixels within the map.
    window: pixels a side.
    stride: pixels, at most `window`.
    platform: platform of the device that computes.

  Returns:
    (batch, height', width', channels), the dtype of x; height' is
    ceil((height - window) / stride) + 1.
  """
  shape = x.shape[1:3]
  pads = tuple((0, -(n - window) % stride) for n in shape)
  if kind == 'max':
    return layers.max_pool(x, window, stride, pads, platform)
  mean = layers.avg_pool(x, window, stride, pads, platform)
  if pads == ((0, 0), (0, 0)):
    return mean
  return mean * _share_of_window(shape, window, stride).astype(x.dtype)


@layers.by_channel
def normalise_response(x: jax.Array, platform: str = 'cpu') -> jax.Array:
  """Local response normalisation within each channel.

  x (1 + 5e-5 m)^-0.75, m being the mean of x^2 over the 3x3 pixels around,
  zeros beyond the edge. Krizhevsky et al. 2012 sum over channels instead.

  Args:
    x: (batch, height, width, channels), any float dtype.
    platform: platform of the device that computes.

  Returns:
    Like x.
  """
  return _damped(x, 5e-5, layers.avg_pool(jnp.square(x), 3, 1, 1, platform))


def normalise_over_channels(x: jax.Array) -> jax.Array:
  """Local response normalisation over neighbouring channels.

  x (1 + 1e-4 m)^-0.75, m being the mean of x^2 over a channel and two on each
  side, zeros beyond the edge; Caffe divides the sum of Krizhevsky et al. 2012 by
  the number of channels.

  Args:
    x: (batch, height, width, channels), any float dtype.

  Returns:
    Like x.
  """
  squares = jnp.pad(jnp.square(x), ((0, 0), (0, 0), (0, 0), (2, 2)))
  return _damped(x, 1e-4, sum(squares[..., i : i + x.shape[-1]] for i in range(5)) / 5)


def _damped(x, alpha, mean):
  """Divides x by (1 + alpha mean)^0.75."""
  # In bfloat16 nothing under 1/256 can be added to 1.
  wide = jnp.promote_types(x.dtype, jnp.float32)
  # Two roots are quicker than a power.
  root = lax.rsqrt(1 + alpha * mean.astype(wide))
  return (x.astype(wide) * root * jnp.sqrt(root)).astype(x.dtype)


def _share_of_window(shape, window, stride):
  """(height', width', 1): what a padded mean lacks where the edge cuts."""
  counts = [[min(window, n - i) for i in range(0, n - window + stride, stride)] for n in shape]
  return window**2 / np.multiply.outer(*counts)[..., None]
