"""The cheapest machines that end a run within some hours."""

from collections.abc import Mapping, Sequence

from anp_jax.tools.plan import points as points_lib


def ranked(plans: Mapping[str, Sequence[points_lib.Point]], hours: float) -> list[points_lib.Point]:
  """Returns the points that end the run in time, by device-hours, then by time.

  Args:
    plans: points by device and strategy.
    hours: hours that the run may take.
  """
  running = [p for points in plans.values() for p in points if p.runs]
  reaching = [p for p in running if p.run_seconds <= 3600 * hours]
  return sorted(reaching, key=lambda p: (p.device_hours, p.run_seconds))


def quickest(plans: Mapping[str, Sequence[points_lib.Point]]) -> points_lib.Point:
  """Returns the point that ends the run first."""
  running = [p for points in plans.values() for p in points if p.runs]
  return min(running, key=lambda p: p.run_seconds)


def node_counts(budget: int, per_node: int) -> list[int]:
  """Returns powers of two of nodes within a budget of devices, and the most nodes in it."""
  most = budget // per_node
  counts = [2**i for i in range(most.bit_length())]
  return [n for n in counts if n < most] + [most]
