"""Layers in NumPy and float64, with which the tests of layers compare."""

import functools

import jax
from jax import lax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from anp_jax.parallel import mesh as mesh_lib

P = jax.sharding.PartitionSpec


def values(seed, shape, dtype) -> np.ndarray:
  """Returns normal numbers of a dtype, bfloat16 too."""
  numbers = np.random.default_rng(seed).normal(size=shape)
  return numbers.astype(ml_dtypes.bfloat16 if dtype == 'bfloat16' else dtype)


def shapes(module, side=32):
  """Returns the shapes of a network's variables, for images of a side."""
  images = jax.ShapeDtypeStruct((1, side, side, 3), jnp.float32)
  return jax.eval_shape(functools.partial(module.init, train=False), jax.random.key(0), images)


def random_variables(shapes, gain=2.0, scales=(0.7, 1.3), seed=0):
  """Returns variables of these shapes at random: kernels that keep sizes, no bias of zero.

  Args:
    shapes: tree of structs, named as Flax does.
    gain: variance of a kernel's numbers, times its fan-in.
    scales: bounds of scales and variances.
    seed: seed of all numbers.
  """
  random = np.random.default_rng(seed)

  def leaf(path, struct):
    kind = path[-1].key
    if kind in ('scale', 'var'):
      value = random.uniform(*scales, struct.shape)
    elif kind == 'kernel':
      value = random.normal(size=struct.shape) * np.sqrt(gain / np.prod(struct.shape[:-1]))
    else:
      value = random.uniform(-0.5, 0.5, struct.shape)
    return value.astype(struct.dtype)

  return jax.tree_util.tree_map_with_path(leaf, shapes)


def with_gradients(function):
  """Returns the program of a function, called with dy first: y, and what it sends back of dy."""

  @jax.jit
  def compute(dy, *arguments):
    y, pull = jax.vjp(function, *arguments)
    return (y, *pull(dy))

  return compute


def assert_branch_is_scaled(apply, x):
  """Asserts that factors scale a block's branch: of two examples, one by 0 and one by 2.

  Args:
    apply: the block of factors, or of None.
    x: its two maps.
  """
  factor = np.array([0, 2], np.float32)[:, None, None, None]
  result, some = apply(None), apply(factor)
  np.testing.assert_array_equal(some[0], x[0])
  # float32 numbers of order ten.
  np.testing.assert_allclose(some[1] - x[1], 2 * (result - x)[1], 1e-4, 1e-4)
  assert np.abs(result - x).max() > 1e-3


def convolution(x, kernel, stride, pads, groups=1, dy=None):
  """Returns a convolution tap by tap; with dy a tuple of it, dx and dkernel."""
  x, kernel = np.float64(x), np.float64(kernel)
  padded = np.pad(x, ((0, 0), *pads, (0, 0)))
  rows, columns = (
    (n - k) // stride + 1 for n, k in zip(padded.shape[1:3], kernel.shape, strict=False)
  )
  padded = padded.reshape(*padded.shape[:3], groups, -1)
  kernels = kernel.reshape(*kernel.shape[:3], groups, -1)
  y = np.zeros((len(x), rows, columns, groups, kernels.shape[-1]))
  dpadded, dkernels = np.zeros(padded.shape), np.zeros(kernels.shape)
  wide = None if dy is None else np.float64(dy).reshape(y.shape)
  for i, j in np.ndindex(kernel.shape[:2]):
    last_row, last_column = i + (rows - 1) * stride, j + (columns - 1) * stride
    place = np.s_[:, i : last_row + 1 : stride, j : last_column + 1 : stride]
    y += np.einsum('bhwgc,cgf->bhwgf', padded[place], kernels[i, j], optimize=True)
    if dy is not None:
      dpadded[place] += np.einsum('bhwgf,cgf->bhwgc', wide, kernels[i, j], optimize=True)
      dkernels[i, j] = np.einsum('bhwgc,bhwgf->cgf', padded[place], wide, optimize=True)
  y = y.reshape(*y.shape[:3], -1)
  if dy is None:
    return y
  (top, bottom), (left, right) = pads
  dx = dpadded[:, top : dpadded.shape[1] - bottom, left : dpadded.shape[2] - right]
  return y, dx.reshape(x.shape), dkernels.reshape(kernel.shape)


def normalisation(x, scale, bias, group, dy=None, relu=False):
  """Returns y, the groups' statistics, and with dy dx, dscale and dbias.

  Gradients go through variance and mean apart, as Ioffe and Szegedy write them.
  """
  shape = x.shape
  x = np.float64(x).reshape(len(x) // group, -1, shape[-1])
  mean, var = x.mean(1, keepdims=True), x.var(1, keepdims=True)
  root = np.sqrt(var + 1e-5)
  unit = (x - mean) / root
  y = unit * scale + bias
  dy = np.float64(0 * y if dy is None else dy).reshape(x.shape)
  if relu:
    dy, y = np.where(y > 0, dy, 0), np.maximum(y, 0)
  dunit = dy * scale
  dvar = (dunit * (x - mean)).sum(1, keepdims=True) * -0.5 * root**-3
  dmean = -dunit.sum(1, keepdims=True) / root
  dx = dunit / root + (dvar * 2 * (x - mean) + dmean) / x.shape[1]
  gradients = dx.reshape(shape), (dy * unit).sum((0, 1)), dy.sum((0, 1))
  return y.reshape(shape), mean[:, 0], var[:, 0], *gradients


@functools.partial(jax.jit, static_argnums=0)
def norm_step(layer, x, scale, bias, dy):
  """Returns y, the gradients of x, scale and bias, and new statistics of a BatchNorm.

  Statistics were 0.5 and 2 before.
  """
  channels = x.shape[-1]
  stats = {'mean': jnp.full(channels, 0.5), 'var': jnp.full(channels, 2.0)}

  def apply(x, scale, bias):
    variables = {'params': {'scale': scale, 'bias': bias}, 'batch_stats': stats}
    y, new = layer.apply(variables, x, True, mutable=['batch_stats'])
    return y, new['batch_stats']

  y, pull, new = jax.vjp(apply, x, scale, bias, has_aux=True)
  return y, pull(dy), new


def divided_norm_step(layer, config, devices):
  """Returns `norm_step` with the batch divided among devices, called (x, scale, bias, dy)."""

  def shard(x, scale, bias, dy):
    y, (dx, *rest), new = norm_step(layer, x, scale, bias, dy)
    return y, (dx, *lax.psum(rest, 'data')), lax.pmean(new, 'data')

  rows = P(mesh_lib.DATA)
  mesh = mesh_lib.create(config, jax.devices()[:devices])
  in_specs, out_specs = (rows, P(), P(), rows), (rows, (rows, P(), P()), P())
  return jax.jit(
    jax.shard_map(shard, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
  )
