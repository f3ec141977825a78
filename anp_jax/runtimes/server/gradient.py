"""A worker's program: weights and a batch to the gradient that it pushes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from anp_jax.parallel import mesh as mesh_lib
from anp_jax.runtimes.server import shard as shard_lib
from anp_jax.training import build


class Program:
  """The gradient, compiled; a replay compiles the same one.

  Attributes:
    dtype: of parameters and statistics.
    wire: dtype of weights and gradients on their way.
  """

  def __init__(self, config, parts, flats, mesh, size: int):
    """Compiles it.

    Args:
      config: the run's config.
      parts: `assembly.Assembly` over the worker's own devices.
      flats: (params, stats) as `layout.Flat`.
      mesh: of the worker's own devices.
      size: images of a batch.
    """
    self.dtype = flats[0].dtype
    self.wire = shard_lib.wire_dtype(config)
    self._same = mesh_lib.replicated(mesh)
    program = jax.jit(_make(config, parts, flats), out_shardings=self._same)
    self._program = program.lower(
      self._abstract(flats[0].size, self.wire),
      self._abstract(flats[1].size, self.dtype),
      self._abstract(None, np.int32),
      build.abstract_batch(config, mesh, size),
    ).compile()

  def __call__(self, weights, stats, step: int, batch):
    """Computes one gradient, and waits for it.

    Args:
      weights: (n,) in the wire's dtype.
      stats: (m,) running statistics.
      step: of the ticket: what is random is folded from it.
      batch: on the mesh's devices.

    Returns:
      gradient (n,) in the wire's dtype, a mean over the batch's examples and
      clipped by its norm; term (m,) of the statistics: with norm momentum k and
      nothing applied in between, they become k stats + term, which is the
      network's own update; values: name to float: sums over the examples,
      'weight' of them, 'damaged', 'grad_norm', 'finite', 'vote'.
    """
    given = jax.device_put((weights, stats, np.int32(step)), self._same)
    vector, term, values = jax.device_get(self._program(*given, batch))
    return vector, term, {name: float(v) for name, v in values.items()}

  def _abstract(self, size, dtype):
    shape = () if size is None else (size,)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=self._same)


def _make(config, parts, flats):
  """The function that `Program` compiles."""
  params_flat, stats_flat = flats
  dtype = params_flat.dtype
  wire = shard_lib.wire_dtype(config)
  clip = _clipping(config.optimizer)

  def gradient(weights, stats, step, batch):
    params = params_flat.tree(weights.astype(dtype))
    grads, new_stats, weight, sums, damaged, vote = parts.gradient(
      params, stats_flat.tree(stats), step, batch
    )
    one = jnp.maximum(weight, 1)
    grads = jax.tree.map(lambda g: g / one.astype(g.dtype), grads)
    norm = optax.tree.norm(grads)
    grads, _ = clip.update(grads, clip.init(params))
    vector = params_flat.vector(grads).astype(wire)
    kept = jnp.asarray(config.model.norm_momentum, dtype)
    term = stats_flat.vector(new_stats) - kept * stats
    sizes = jnp.stack([sums['loss'], norm, jnp.abs(term).sum()])
    finite = jnp.isfinite(sizes).all()
    values = sums | {
      'weight': weight, 'damaged': damaged, 'grad_norm': norm,
      'finite': finite, 'vote': vote,
    }  # fmt: skip
    return vector, term, values

  return gradient


def _clipping(o) -> optax.GradientTransformation:
  """What the servers leave to the workers: a norm needs the whole gradient."""
  if not o.clip_norm:
    return optax.identity()
  effects = [optax.clip_by_global_norm(o.clip_norm)]
  if o.clip_value:  # first, as `optimizer` has it
    effects.insert(0, optax.clip(o.clip_value))
  return optax.chain(*effects)
