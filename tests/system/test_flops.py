"""flops: closed forms, through every construct that holds a program."""

import functools

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from anp_jax import models
from anp_jax.system import flops

_SQUARE = jax.ShapeDtypeStruct((7, 7), 'float32')
_PRODUCT = 2 * 7**3  # of two of them


def _convolution(stride=1, padding='VALID', lhs=1, groups=1):
  def f(x, w):
    return lax.conv_general_dilated(
      x, w, (stride, stride), padding, (lhs, lhs), (1, 1), ('NHWC', 'HWIO', 'NHWC'), groups
    )

  return f


@pytest.mark.parametrize(
  'function, shapes, want',
  [
    (jnp.matmul, [(5, 7), (7, 3)], 2 * 5 * 7 * 3),
    (lambda x, y: jnp.einsum('bij,bjk->bik', x, y), [(2, 5, 7), (2, 7, 3)], 2 * 2 * 5 * 7 * 3),
    # Called twice, written once.
    (
      lambda x, y: jax.jit(jnp.matmul)(jax.jit(jnp.matmul)(x, y), y),
      [(7, 7), (7, 7)],
      2 * 2 * 7**3,
    ),
    (_convolution(), [(2, 8, 8, 3), (3, 3, 3, 4)], 2 * 2 * 6 * 6 * 9 * 3 * 4),
    (_convolution(2), [(2, 9, 9, 3), (3, 3, 3, 4)], 2 * 2 * 4 * 4 * 9 * 3 * 4),
    # Of three taps, two at each end and three at the six places between.
    (_convolution(1, 'SAME'), [(2, 8, 8, 3), (3, 3, 3, 4)], 2 * 2 * (2 * 2 + 6 * 3) ** 2 * 3 * 4),
    (_convolution(groups=3), [(2, 8, 8, 3), (3, 3, 1, 6)], 2 * 2 * 6 * 6 * 9 * 6),
    # Zeros between the images' four pixels: each meets each of three taps.
    (_convolution(1, [(2, 2), (2, 2)], 2), [(1, 4, 4, 3), (3, 3, 3, 4)], 2 * (4 * 3) ** 2 * 3 * 4),
    (jnp.add, [(5, 7), (5, 7)], 0),
  ],
)
def test_products_and_convolutions(function, shapes, want):
  arguments = [jax.ShapeDtypeStruct(s, 'float32') for s in shapes]
  assert flops.count_call(jax.jit(function), *arguments) == want


def test_a_strided_convolution_and_its_gradients():
  # The same multiplications three times over, in other orders.
  def loss(x, w):
    return _convolution(2, 'SAME')(x, w).sum()

  arguments = [jax.ShapeDtypeStruct(s, 'float32') for s in ((2, 7, 7, 3), (3, 3, 3, 4))]
  once = 2 * 2 * (2 + 3 + 3 + 2) ** 2 * 3 * 4
  assert flops.count_call(_convolution(2, 'SAME'), *arguments) == once
  gradients = jax.value_and_grad(loss, (0, 1))
  assert flops.count_call(gradients, *arguments) == 3 * once


def test_gradients_by_groups_are_those_of_the_groups():
  """XLA takes the gradient of a kernel with batch groups for feature groups."""
  shapes = [(2, 8, 8, 6), (3, 3, 2, 9)]
  arguments = [jax.ShapeDtypeStruct(s, 'float32') for s in shapes]
  convolve = _convolution(groups=3)
  once = 2 * 2 * 6 * 6 * 9 * 2 * 9
  loss = jax.grad(lambda x, w: convolve(x, w).sum(), (0, 1))
  jaxpr = jax.make_jaxpr(loss)(*arguments)
  assert 'batch_group_count=3' in str(jaxpr)
  # The forward convolution's result is not used: nor is it counted.
  assert flops.count(jaxpr) == 2 * once


@jax.custom_vjp
def _matmul(x):
  return x @ x


_matmul.defvjp(lambda x: (x @ x, x), lambda x, dy: (2 * (dy @ x),))


@pytest.mark.parametrize(
  'function, products',
  [
    (lambda x: lax.scan(lambda c, _: (c @ x, c @ c), x, None, length=5), 10),
    (lambda x: lax.fori_loop(0, 5, lambda _, c: c @ x, x), 5),
    # How often it runs is not known.
    (lambda x: lax.while_loop(lambda c: c[0, 0] < 1, lambda c: c @ x, x), 1),
    (lambda x: lax.cond(x[0, 0] > 0, lambda: x @ x @ x, lambda: x @ x), 2),
    (jax.checkpoint(lambda x: jnp.sin(x @ x)), 1),
    # The product is there again for its sine's gradient.
    (jax.grad(jax.checkpoint(lambda x: jnp.sin(x @ x).sum())), 3),
    (_matmul, 1),
    (jax.grad(lambda x: jnp.sin(_matmul(x)).sum()), 2),
    (lambda x: jax.jit(lambda y: (y @ y, y + y))(x)[1], 0),
    (jax.vmap(lambda x: x @ x, in_axes=(None,), axis_size=3, out_axes=0), 1),
  ],
)
def test_programs_within_a_program(function, products):
  assert flops.count_call(function, _SQUARE) == products * _PRODUCT


def test_branches_that_devices_take_apart_are_added():
  def function(i, x):
    return lax.switch(i, [lambda: x, lambda: x @ x, lambda: x @ x @ x])

  count = functools.partial(flops.count_call, function, np.int32(0), _SQUARE)
  assert count() == 2 * _PRODUCT
  assert count(branches=sum) == 3 * _PRODUCT


def test_within_shard_map_a_device_counts():
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ('data',))
  mapped = jax.shard_map(
    lambda x, y: x @ y, mesh=mesh, in_specs=(P('data'), P()), out_specs=P('data')
  )
  batch = jax.ShapeDtypeStruct((28, 7), 'float32')
  assert flops.count_call(jax.jit(mapped), batch, _SQUARE) == _PRODUCT


def test_an_unused_sum_over_devices_needs_no_product():
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ('data',))
  mapped = jax.shard_map(
    lambda x: (lax.psum(x @ x, 'data'), x), mesh=mesh, in_specs=P(), out_specs=P()
  )
  assert flops.count_call(lambda x: mapped(x)[0], _SQUARE) == _PRODUCT
  assert flops.count_call(lambda x: mapped(x)[1], _SQUARE) == 0


@pytest.mark.parametrize(
  'name, side, products',
  [
    # Caffe's LeNet: 5x5 of 20 and of 50 without padding, 500 and 10.
    ('lenet', 28, 24**2 * 25 * 20 * 3 + 8**2 * 25 * 20 * 50 + 16 * 50 * 500 + 5000),
    # Torchvision tells 4.09e9, with a thousand classes and the padding.
    ('resnet50', 224, None),
  ],
)
def test_published_networks(config, name, side, products):
  config.model.name, config.model.width = name, 64
  config.data.image_size = config.data.resize = side
  model = models.create(config, 10, 'cpu')
  images = jax.ShapeDtypeStruct((1, side, side, 3), 'float32')
  variables = jax.eval_shape(lambda x: model.init(jax.random.key(0), x, False), images)
  count = flops.count_call(lambda v, x: model.apply(v, x, False), variables, images)
  if products:
    assert count == 2 * products
  else:
    assert 3.9e9 < count / 2 < 4.09e9
