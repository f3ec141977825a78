"""Activations.

The gradients of SiLU and GELU keep only the input; JAX's own keep more.
"""

import jax
from jax import lax
import jax.numpy as jnp


def relu(x: jax.Array, platform: str = 'cpu') -> jax.Array:
  """The larger of x and 0; NaN stays. At 0 the gradient is 0.

  Args:
    x: any shape, any float dtype.
    platform: platform of the device that computes.

  Returns:
    Like x.
  """
  return jax.nn.relu(x) if platform == 'gpu' else _relu(x)


# XLA's CPU backend fuses a maximum with a constant, and the normalisation
# before it, into each of its users: a convolution's weight gradient computes it
# once more inside of a transposing copy, a block's output is computed three
# times. A choice between two arrays is computed once and kept (ResNet-50, 8 x
# 224 px, JAX 0.10.2: 58 instead of 200 ms of a step of 1.3 s).
#
# Its TPU backend copies the mask of x > 0, which jax.nn.relu keeps for the
# gradient, into another layout, and runs out of scratch memory: in bfloat16
# with 32 x 224 px a device, ResNet-18 did not compile for v5e (libtpu 0.0.42),
# nor did one block of it (0.0.42 and 0.0.50). What is kept here is x, tried on
# 0.0.42.
@jax.custom_vjp
def _relu(x):
  return jnp.where(x <= 0, jnp.zeros((), x.dtype), x)


def _relu_forward(x):
  return _relu(x), x


def _relu_backward(x, dy):
  return (jnp.where(x > 0, dy, jnp.zeros((), dy.dtype)),)


_relu.defvjp(_relu_forward, _relu_backward)


@jax.custom_vjp
def relu6(x: jax.Array) -> jax.Array:
  """The nearest of 0 to 6; NaN stays. Outside, and at 0 and 6, the gradient is 0.

  Krizhevsky 2010, "Convolutional deep belief networks on CIFAR-10".

  Args:
    x: any shape, any float dtype.

  Returns:
    Like x.
  """
  six = jnp.full((), 6, x.dtype)
  return jnp.where(x <= 0, jnp.zeros((), x.dtype), jnp.where(x >= six, six, x))


def _relu6_backward(x, dy):
  return (jnp.where((x > 0) & (x < 6), dy, jnp.zeros((), dy.dtype)),)


relu6.defvjp(lambda x: (relu6(x), x), _relu6_backward)


@jax.custom_vjp
def silu(x: jax.Array) -> jax.Array:
  """SiLU, x times its logistic function.

  Hendrycks and Gimpel 2016 (arXiv 1606.08415).

  Args:
    x: any shape, any float dtype.

  Returns:
    Like x.
  """
  return jax.nn.silu(x)


def _silu_backward(x, dy):
  # dy share (1 + x (1 - share)), as a quotient: XLA's CPU backend computes that
  # once for its users; the norm before has three. A product it would compute
  # three times, and keep the share from the forward pass on: EfficientNetV2-S
  # at 64 px had 0.71 times PyTorch's speed, now 1.01 (JAX 0.10.2). The barrier
  # hides that the forward pass has the same terms.
  wide = _wide(lax.optimization_barrier(x))
  inverse = 1 + jnp.exp(-wide)
  dx = dy * (1 + wide * (1 - 1 / inverse)) / inverse
  return (dx.astype(x.dtype),)


silu.defvjp(lambda x: (silu(x), x), _silu_backward)


@jax.custom_vjp
def gelu(x: jax.Array) -> jax.Array:
  """GELU, x times the normal distribution function of x; not approximated.

  Hendrycks and Gimpel 2016 (arXiv 1606.08415).

  Args:
    x: any shape, any float dtype.

  Returns:
    Like x.
  """
  return jax.nn.gelu(x, approximate=False)


def _gelu_backward(x, dy):
  wide = _wide(x)
  density = jnp.exp(-jnp.square(wide) / 2) / jnp.sqrt(2 * jnp.pi)
  below = (1 + lax.erf(wide / jnp.sqrt(2))) / 2
  return ((dy * (below + wide * density)).astype(x.dtype),)


gelu.defvjp(lambda x: (gelu(x), x), _gelu_backward)


def _wide(x):
  return x.astype(jnp.promote_types(x.dtype, jnp.float32))
