"""The program of a worker: weights and a batch in, a gradient out."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax

from anp_jax.parallel import mesh as mesh_lib
from anp_jax.runtimes.parameter_server import layout as layout_lib
from anp_jax.training import build


class GradientProgram:
  """The gradient, compiled; a replay compiles the same program.

  Attributes:
    layout: layout of the weights.
  """

  def __init__(
    self,
    config: ml_collections.ConfigDict,
    program: build.ModelAndSteps,
    layout: layout_lib.Layout,
    mesh: jax.sharding.Mesh,
    size: int,
  ):
    """Compiles the gradient.

    Args:
      config: the run's config.
      program: steps over the worker's own devices.
      layout: layout of the weights.
      mesh: mesh of the worker's own devices.
      size: images of a batch.
    """
    self.layout = layout
    self._replicated = mesh_lib.replicated(mesh)
    function = jax.jit(_make(config, program, layout), out_shardings=self._replicated)
    self._program = function.lower(
      self._abstract((layout.params.size,), layout.params.dtype),
      self._abstract((layout.stats.size,), layout.stats.dtype),
      self._abstract((), np.int32),
      build.abstract_batch(config, mesh, size),
    ).compile()

  def __call__(
    self, weights: np.ndarray, stats: np.ndarray, step: int, batch: dict
  ) -> tuple[np.ndarray, np.ndarray, dict[str, float]]:
    """Computes one gradient, and waits for it.

    Args:
      weights: (n,).
      stats: (m,) running statistics.
      step: step of the ticket; random numbers are folded from it.
      batch: arrays on the mesh's devices.

    Returns:
      gradient (n,), a mean over the batch's examples and clipped by its norm;
      stats_delta (m,): with norm momentum k and no update in between, statistics
      become k stats + stats_delta, which is the network's own update; values: name
      to float: sums over the examples, their 'weight', 'damaged', 'grad_norm',
      'finite', 'vote'.
    """
    gradients, stats_delta, values = jax.device_get(
      self._program(weights, stats, np.int32(step), batch)
    )
    gradient = self.layout.params.flatten(gradients, np)
    return gradient, stats_delta, {name: float(v) for name, v in values.items()}

  def _abstract(self, shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=self._replicated)


def failure(step: int, values: dict) -> str:
  """Returns why a gradient may not be applied; '' if it is finite.

  Args:
    step: step of its ticket.
    values: numbers from `GradientProgram`.
  """
  if values['finite']:
    return ''
  loss = values['loss'] / max(values['weight'], 1)
  return (
    f'the gradient of step {step} is not finite: loss {loss}, gradient norm '
    f'{values["grad_norm"]}; nothing of it was applied'
  )


def measured(values: dict, waited: float, arrays: Iterable[np.ndarray]) -> dict:
  """Returns what a contribution says of its gradient.

  Args:
    values: numbers from `GradientProgram`.
    waited: seconds that its batch was waited for.
    arrays: arrays that were sent for it.
  """
  reported = {k: v for k, v in values.items() if k not in ('vote', 'finite', 'weight')}
  size = sum(a.nbytes for a in arrays)
  return {'weight': values['weight'], 'values': {**reported, 'waited': waited, 'bytes': size}}


def _make(config, program, layout):
  """The function that `GradientProgram` compiles."""
  dtype = layout.params.dtype
  clip = _clipping(config.optimizer)

  def gradient(weights, stats, step, batch):
    params = layout.params.unflatten(weights)
    reduced = program.training.gradient()(params, layout.stats.unflatten(stats), step, batch)
    divisor = jnp.maximum(reduced.weight, 1)
    grads = jax.tree.map(lambda g: g / divisor.astype(g.dtype), reduced.gradients)
    norm = optax.tree.norm(grads)
    grads, _ = clip.update(grads, clip.init(params))
    # The host joins the gradients: with one long vector among its results, the
    # program often took four times as long on two cores (LeNet, measured).
    # A network without batch norm has neither the key nor statistics.
    momentum = jnp.asarray(config.model.get('norm_momentum', 0.0), dtype)
    stats_delta = layout.stats.flatten(reduced.stats) - momentum * stats
    sizes = jnp.stack([reduced.sums['loss'], norm, jnp.abs(stats_delta).sum()])
    finite = jnp.isfinite(sizes).all()
    values = reduced.sums | {
      'weight': reduced.weight,
      'damaged': reduced.damaged,
      'grad_norm': norm,
      'finite': finite,
      'vote': reduced.vote,
    }
    return grads, stats_delta, values

  return gradient


def _clipping(o) -> optax.GradientTransformation:
  """The effects that need the whole gradient, and so are the workers'."""
  if not o.clip_norm:
    return optax.identity()
  first = [optax.clip(o.clip_value)] if o.clip_value else []  # as in `optimizer`
  return optax.chain(*first, optax.clip_by_global_norm(o.clip_norm))
