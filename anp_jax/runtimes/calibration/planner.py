"""The plan with the fastest predicted step."""

import bisect
from collections.abc import Sequence

import numpy as np

from anp_jax.parallel import apportionment
from anp_jax.runtimes.calibration import costs as costs_lib

_WIDTHS = 16  # sizes of a layer's largest part that are tried


def best_plan(costs: costs_lib.Costs) -> dict[str, tuple[int, ...]]:
  """Returns features of each device for each layer that is best split.

  Layers are planned one after another, in the order in which they are called: each is
  not split, or divided over the fastest one, two, ... devices such that they are ready
  at the same time, which a device reaches later that has more of the layers before to
  compute; or nearly so, since the largest part takes longest to send. Then each is
  planned again by the predicted step, since a layer may be worth splitting for what
  it saves the next one. {} if nothing is faster than the whole network on each
  device.
  """
  if len(costs.names) == 1:
    return {}
  return min(({}, _split(costs)), key=costs.step_seconds)


def balanced_counts(
  costs: costs_lib.Costs, path: str, devices: Sequence[int], most: float, behind: Sequence[float]
) -> tuple[int, ...]:
  """Returns the features with which some devices are ready together.

  Args:
    costs: measured costs.
    path: path of the layer.
    devices: devices that divide it; the others get 0.
    most: features that one device may have, if the others can have the rest.
    behind: seconds that each device computes before.
  """
  layer = costs.layers[path]
  unit = costs.multiple
  if layer.features < unit * len(devices):
    unit = 1
  counts = np.arange(0, layer.features + 1, unit)
  counts = counts[counts <= max(most, -(-layer.features // len(devices)))]
  times = [behind[d] + layer.seconds_for(d, counts) for d in devices]
  limits = np.unique(np.concatenate(times))
  units = layer.features // unit
  enough = bisect.bisect_left(
    limits, True, key=lambda limit: sum(_units_within(t, limit) for t in times) >= units
  )
  limit = limits[min(enough, len(limits) - 1)]
  shares = [0] * len(costs.names)
  for device, t in zip(devices, times, strict=True):
    shares[device] = _units_within(t, limit)
  return apportionment.apportion(layer.features, shares, unit)


def messages(costs: costs_lib.Costs, plan: costs_lib.Split) -> list[str]:
  """Returns lines that describe a plan and its predicted step time."""
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


def _split(costs):
  """Returns a plan that splits layers wherever that is faster."""
  plan = {}
  for path, layer in costs.layers.items():
    behind = costs.behind(plan, path)
    best = min(
      _best_divisions(costs, path, plan), key=lambda n: costs.layer_seconds(path, n, plan, behind)
    )
    # If it is not split, its gradient is summed with the others.
    gradient = layer.kernel * costs.link.total[1]
    unsplit = costs.layer_seconds(path, None, plan, behind) + gradient
    if costs.layer_seconds(path, best, plan, behind) < unsplit:
      plan[path] = best
  for path in costs.layers:
    rest = {p: counts for p, counts in plan.items() if p != path}
    if rest:
      plans = [rest | {path: n} for n in _best_divisions(costs, path, rest)]
      plan = min((plan, rest, *plans), key=costs.step_seconds)
  return {path: plan[path] for path in costs.layers if path in plan}


def _best_divisions(costs, path, plan):
  """Returns features of each device, over the fastest one, two, ... devices."""
  layer, behind = costs.layers[path], costs.behind(plan, path)
  order = np.argsort(layer.alone, kind='stable')
  result = []
  for k in range(1, len(order) + 1):
    fastest = order[:k]
    # Equal parts need not be of whole multiples.
    shares = [int(d in fastest) for d in range(len(order))]
    divisions = [
      apportionment.apportion(layer.features, shares),
      *(balanced_counts(costs, path, fastest, most, behind) for most in _widths(layer.features, k)),
    ]
    result.append(min(divisions, key=lambda n: costs.layer_seconds(path, n, plan, behind)))
  return result


def _widths(features, devices):
  """Returns sizes of the largest part, from equal parts to all features."""
  equal = -(-features // devices)
  return np.unique(np.linspace(equal, features, _WIDTHS).round())


def _units_within(times, limit):
  """Returns the most units that take at most the limit, or 0."""
  return max(int(np.searchsorted(times, limit, side='right')) - 1, 0)


def _text(seconds):
  return f'{seconds:.3g} s' if seconds >= 1 else f'{1e3 * seconds:.3g} ms'
