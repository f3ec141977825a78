"""Random numbers that belong to an example, wherever it is computed.

A training step hands a network the rows of its examples in the global batch,
in the collection EXAMPLE, and a key of (seed, step) by the same name. Numbers
folded from both do not depend on how many devices there are, nor on how a
batch is cut. The functions are called by a network's outermost module, which
alone sees that collection.
"""

from collections.abc import Sequence

from flax import linen as nn
import jax
import jax.numpy as jnp

EXAMPLE = 'example'  # the collection {'row': (batch,) int32}, and the key


def uniform(module: nn.Module, count: int) -> jax.Array:
  """Random numbers for each example, which differ from call to call.

  Args:
    module: network, applied with EXAMPLE.
    count: numbers per example.

  Returns:
    (batch, count) float32 in [0, 1).
  """
  key, rows = module.make_rng(EXAMPLE), module.get_variable(EXAMPLE, 'row')
  keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(rows)
  return jax.vmap(lambda key: jax.random.uniform(key, (count,)))(keys)


def branch_factors(module: nn.Module, rates: Sequence[float], train: bool) -> Sequence:
  """Factors of residual branches under stochastic depth.

  Huang et al. 2016 (arXiv 1603.09382): a branch is left out of an example by
  its rate, and else divided by 1 - rate, so that its mean stays.

  Args:
    module: network, applied with EXAMPLE; the result has its dtype.
    rates: probability for each branch, below 1.
    train: whether branches are left out.

  Returns:
    (branches, batch, 1, 1, 1), 0 or 1 / (1 - rate); where no branch is left out,
    a None per branch.
  """
  if not train or not any(rates):
    return [None] * len(rates)
  shares = 1 - jnp.array(rates)
  factors = jnp.where(uniform(module, len(rates)) < shares, 1 / shares, 0)
  return factors.astype(module.dtype).T[..., None, None, None]


def dropout(module: nn.Module, x: jax.Array, rate: float) -> jax.Array:
  """Sets random numbers to zero, and divides the others by 1 - rate.

  Srivastava et al. 2014 (JMLR 15).

  Args:
    module: network, applied with EXAMPLE.
    x: (batch, features).
    rate: probability with which a number is left out, below 1.

  Returns:
    Like x.
  """
  is_kept = uniform(module, x.shape[-1]) >= rate
  return jnp.where(is_kept, x / (1 - rate), 0)
