"""Equal times for devices that are about equally fast."""

import dataclasses

import numpy as np

from anp_jax.runtimes.calibration import costs as costs_lib

_SIMILAR = 1.1  # largest ratio of their times


def average(costs: costs_lib.Costs) -> costs_lib.Costs:
  """Gives devices that are about equally fast the mean of their times.

  Their times differ by chance, and shares would follow the difference.
  """
  unsplit = costs.unsplit
  groups: dict[int, list[int]] = {}  # fastest device to those about as fast
  for d in sorted(range(len(unsplit)), key=lambda d: unsplit[d]):
    fastest = next((f for f in groups if unsplit[d] <= _SIMILAR * unsplit[f]), d)
    groups.setdefault(fastest, []).append(d)
  group_of = {d: group for group in groups.values() for d in group}

  def mean(values):
    return [np.mean([values[i] for i in group_of[d]], 0).tolist() for d in range(len(values))]

  layers = {
    path: dataclasses.replace(layer, alone=mean(layer.alone), seconds=mean(layer.seconds))
    for path, layer in costs.layers.items()
  }
  fixed = mean(costs.fixed) if costs.fixed else ()
  return dataclasses.replace(costs, unsplit=mean(unsplit), fixed=fixed, layers=layers)
