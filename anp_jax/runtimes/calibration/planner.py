"""Finds the plan that makes the predicted step fastest."""

import bisect
from collections.abc import Sequence

import numpy as np

from anp_jax.parallel import apportionment
from anp_jax.runtimes.calibration import costs as costs_lib

_WIDTHS = 16  # of a layer's largest part, that are tried


def best_plan(costs: costs_lib.Costs) -> dict[str, tuple[int, ...]]:
  """Features of each device for each layer that is best split; {} if none is.

  Layers are planned one after another, in the order in which they are called,
  since a layer's operand travels less if the layer that made it is split: each
  is not split, or divided over the fastest one, two, ... devices such that they
  take equally long; or nearly so, since the largest part takes longest to send.
  Then each is planned again by the predicted step, since a layer may be worth
  splitting for what it saves the next one.
  """
  plan = {}
  if len(costs.names) == 1:
    return plan
  for path, layer in costs.layers.items():
    best = _best_division(costs, path, plan)
    # If it is not split, its gradient is summed with the others.
    gradient = layer.kernel * costs.link.total[1]
    unsplit = costs.layer_seconds(path, None, plan) + gradient
    if costs.layer_seconds(path, best, plan) < unsplit:
      plan[path] = best
  for path in costs.layers:
    rest = {p: counts for p, counts in plan.items() if p != path}
    if rest:
      split = rest | {path: _best_division(costs, path, rest)}
      plan = min((plan, split, rest), key=costs.step_seconds)
  plan = {path: plan[path] for path in costs.layers if path in plan}
  return plan if costs.step_seconds(plan) < costs.step_seconds({}) else {}


def balanced_counts(
  costs: costs_lib.Costs,
  path: str,
  devices: Sequence[int],
  most: float = np.inf,
) -> tuple[int, ...]:
  """Features of each device with which some devices take equally long.

  Args:
    costs: measured.
    path: of the layer.
    devices: among which it is divided; the others get 0.
    most: features that one device may have, if the others can have the rest.
  """
  layer = costs.layers[path]
  unit = costs.multiple
  if layer.features < unit * len(devices):
    unit = 1
  counts = np.arange(0, layer.features + 1, unit)
  counts = counts[counts <= max(most, -(-layer.features // len(devices)))]
  times = [layer.seconds_for(d, counts) for d in devices]
  limits = np.unique(np.concatenate(times))
  units = layer.features // unit
  enough = bisect.bisect_left(
    limits, True,
    key=lambda limit: sum(_units_within(t, limit) for t in times) >= units,
  )  # fmt: skip
  limit = limits[min(enough, len(limits) - 1)]
  shares = [0] * len(costs.names)
  for device, t in zip(devices, times, strict=True):
    shares[device] = _units_within(t, limit)
  return apportionment.apportion(layer.features, shares, unit)


def messages(costs: costs_lib.Costs, plan: costs_lib.Plan) -> list[str]:
  """Describes a plan and its predicted step time, a line each."""
  names = '; '.join(f'{i}: {name}' for i, name in enumerate(costs.names))
  lines = [f'devices  {names}, {costs.devices_are}']
  width = max(map(len, costs.layers), default=0)
  for path, layer in costs.layers.items():
    counts = plan.get(path)
    if counts is None:
      division = f'computed by {costs.computes_unsplit}'
    elif sorted(counts)[-2:][0] == 0:
      division = f'computed by device {int(np.argmax(counts))}'
    else:
      division = ' + '.join(map(str, counts))
    if plan:
      division += f', {_text(costs.layer_seconds(path, counts, plan))}'
    lines.append(
      f'plan     {path.ljust(width)}  {layer.features} features, '
      f'{_text(layer.alone[costs.baseline])} alone; {division}'
    )
  step, baseline = costs.step_seconds(plan), costs.baseline
  ratio = costs.alone / step
  nothing = '' if plan else 'nothing is split; '
  lines.append(
    f'plan     {nothing}predicted step time {_text(step)}, on device '
    f'{baseline} alone {_text(costs.alone)}: {ratio:.2f} times as fast'
  )
  if ratio < 0.95:
    lines.append(f'plan     {costs.names[baseline]} alone would be faster')
  return lines


def _best_division(costs, path, plan):
  return min(
    _divisions(costs, path), key=lambda n: costs.layer_seconds(path, n, plan)
  )


def _divisions(costs, path):
  """Features of each device, in all ways that are tried."""
  layer = costs.layers[path]
  order = np.argsort(layer.alone, kind='stable')
  for k in range(1, len(order) + 1):
    fastest = order[:k]
    # Equal parts need not be of whole multiples.
    shares = [int(d in fastest) for d in range(len(order))]
    yield apportionment.apportion(layer.features, shares)
    for most in _widths(layer.features, k):
      yield balanced_counts(costs, path, fastest, most)


def _widths(features, devices):
  """Sizes of the largest part, from equal parts to all features."""
  equal = -(-features // devices)
  return np.unique(np.linspace(equal, features, _WIDTHS).round())


def _units_within(times, limit):
  """The most units that take at most the limit."""
  return int(np.searchsorted(times, limit, side='right')) - 1


def _text(seconds):
  return f'{seconds:.3g} s' if seconds >= 1 else f'{1e3 * seconds:.3g} ms'
