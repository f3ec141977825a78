"""The benchmark's networks of Flax's layers: they compute what ours compute."""

import dataclasses

from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from anp_jax import models
from scripts.bench import _cases, _flax_networks


def _shapes(net, images):
  """Shapes of the parameters, by path, in the order in which the network makes them."""
  shapes = {}

  def init(images):
    params = net.init(jax.random.key(0), images, False)['params']
    shapes.update({k: x.shape for k, x in traverse_util.flatten_dict(dict(params)).items()})

  jax.eval_shape(init, images)
  return shapes


@pytest.mark.slow
@pytest.mark.parametrize('name', ['efficientnet_b0_64', 'convnext_tiny_64'])
def test_they_compute_what_ours_compute(name):
  case = dataclasses.replace(_cases.CASES[name], batch=8, classes=10)
  images = np.random.default_rng(0).standard_normal((8, 64, 64, 3), np.float32)
  ours = models.create(_cases.config(case), case.classes, 'cpu')
  nets = ours, _flax_networks.network(case)
  shapes = [_shapes(net, images) for net in nets]
  rng = np.random.default_rng(1)
  # Near 1 in vectors, so that no branch is lost; a kernel keeps the size of what it takes.
  values = [
    rng.standard_normal(s, np.float32) / np.sqrt(np.prod(s[:-1]))
    if len(s) > 1
    else rng.uniform(0.5, 1.5, s).astype(np.float32)
    for s in shapes[0].values()
  ]
  logits = []
  for net, paths in zip(nets, shapes, strict=True):
    pairs = zip(paths.items(), values, strict=True)
    params = traverse_util.unflatten_dict({path: v.reshape(s) for (path, s), v in pairs})
    variables = jax.eval_shape(lambda x, net=net: net.init(jax.random.key(0), x, False), images)
    stats = jax.tree.map(
      lambda s: jnp.ones(s.shape), {k: v for k, v in variables.items() if k != 'params'}
    )
    apply = jax.jit(lambda v, x, net=net: net.apply(v, x, True, mutable=['batch_stats'])[0])
    logits.append(apply({'params': params, **stats}, images))
  assert np.std(logits[0]) > 0.1
  np.testing.assert_allclose(*logits, rtol=1e-3, atol=1e-3)
