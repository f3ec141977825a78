"""The sums that a step makes over devices."""

from typing import Any, NamedTuple

import jax


class Totals(NamedTuple):
  """Sums over a micro-batch, or over a device's part of the batch.

  Attributes:
    gradients: sums of gradients, like the parameters.
    stats: new statistics of the network, summed over micro-batches.
    sums: weighted sums of metrics by name, and 'weight' itself.
  """

  gradients: Any
  stats: Any
  sums: dict[str, jax.Array]


class Metrics(NamedTuple):
  """The numbers that are summed together with the gradients.

  Attributes:
    stats: floating statistics of the network.
    weight: sum of the examples' weights.
    sums: weighted sums of metrics by name.
    damaged: number of damaged rows.
    votes: number of times that each vote is cast.
  """

  stats: Any
  weight: jax.Array
  sums: dict[str, jax.Array]
  damaged: jax.Array
  votes: jax.Array


class Reduced(NamedTuple):
  """The sums over the whole batch that an update needs.

  Attributes:
    gradients: sums of gradients, like the parameters.
    stats: new statistics of the network.
    weight: sum of the examples' weights.
    sums: weighted sums of metrics by name.
    damaged: number of damaged rows.
    vote: largest vote of a process.
  """

  gradients: Any
  stats: Any
  weight: jax.Array
  sums: dict[str, jax.Array]
  damaged: jax.Array
  vote: jax.Array
