"""Efficiencies of devices, from published rates.

What data sheets leave open are a few common numbers: the share of the peak that
products reach (one for each kind of unit and dtype), the share of the memory's
bandwidth, and what is left of it with software that is not tuned for the
benchmark, the seconds of a kernel, and the share of the links' bandwidth. Each
device has two factors of its own, of its computing and its fixed cost, and each
system has two, of its computing and its links.

All are fitted at once, as the maximum a posteriori of a hierarchical model:
errors of the logarithm of a step's seconds are normal, and so are all logarithms
of the numbers around the priors below. The scatter of a rate is that with the
largest marginal likelihood; the links' deviations, which that leaves open, are
small, so that an outlier moves no other plan (docs/planner.md). A device
without rows has the factors 1: it is predicted from its data sheet and the other
devices. A plan for a device uses the device's factors and no system's, so that a
rate that one system's links explain moves no plan for another.
"""

from collections.abc import Sequence
import dataclasses
import math

import numpy as np
from scipy import optimize

from anp_jax.costs import device_step, hardware
from anp_jax.tools.plan import published_rates

UNITS = ('tensor', 'tensor float32', 'vector', 'tpu', 'cpu')
# Logarithms of the common numbers: what one would guess, and how surely.
_COMMON = (
  *((f'product {units}', 0.5, 0.5) for units in UNITS),
  ('memory', 1.0, 0.25),
  ('memory tpu', 1.0, 0.25),  # over the others
  ('memory anp_jax', 0.85, 0.15),  # over software that was tuned for a benchmark
  ('memory framework', 0.65, 0.15),
  ('kernel', 10e-6, 0.6),  # of a device of _YEAR
  ('kernel trend', 1.0, 0.2),  # factor a year
  ('kernel tpu', 1e-6, 1.0),  # a TPU's host starts one program a step
  ('wire', 0.7, 0.15),
)
_YEAR = 2018
# Standard deviations of the logarithms of factors: compute and fixed of a device,
# compute and wire of a system; and of a published rate.
_DEVICE, _SYSTEM, _NOISE = (0.1, 0.5), (0.06, 0.15), 0.04
_STEP = 1e-4


def units(device: hardware.Device, dtype: str) -> str:
  """Returns which of UNITS of a device compute in a dtype; bfloat16 stands for float16."""
  kind = device.effective_kind(dtype)
  return 'tensor float32' if (kind, dtype) == ('tensor', 'float32') else kind


@dataclasses.dataclass(frozen=True)
class Fit:
  """Common numbers and the factors of devices and systems.

  Attributes:
    common: common numbers by name, see _COMMON.
    devices: (compute, fixed) of each device.
    systems: (compute, wire) of each system.
  """

  common: dict[str, float]
  devices: dict[str, tuple[float, float]]
  systems: dict[str, tuple[float, float]]

  def efficiency(
    self, device: hardware.Device, dtype: str, software: str = 'anp_jax', system: str = ''
  ) -> device_step.Efficiency:
    """Returns what a device reaches.

    Args:
      device: device of the tables; one without rows has what follows from data sheets alone.
      dtype: dtype of the computation.
      software: one of `published_rates.SOFTWARE`.
      system: system whose factors count too; '': none.
    """
    common, kind = self.common, units(device, dtype)
    compute, fixed = self.devices.get(device.name, (1.0, 1.0))
    system_compute, wire = self.systems.get(system, (1.0, 1.0))
    compute *= system_compute
    memory, kernel = common['memory'], common['kernel']
    kernel *= common['kernel trend'] ** (device.year - _YEAR)
    if kind == 'tpu':
      memory, kernel = memory * common['memory tpu'], common['kernel tpu']
    # Products take most of a vector unit's time, whatever the software does.
    if kind != 'vector':
      memory *= common.get(f'memory {software}', 1.0)
    return device_step.Efficiency(
      product=common[f'product {kind}'] / compute,
      memory=memory / compute,
      kernel_seconds=kernel * fixed,
      wire=common['wire'] * wire,
      overlap=0.0 if kind == 'cpu' else device_step.Efficiency.overlap,
    )


def predict(fit: Fit, row: published_rates.Row, system: str = '') -> float:
  """Returns the seconds of a step of a published row, whose rate is not read.

  Args:
    fit: numbers and factors.
    row: published row.
    system: system whose factors count; '': the device's alone.
  """
  efficiency = fit.efficiency(row.device, row.dtype, row.software, system)
  workload = published_rates.resnet50(row.dtype)
  alone = device_step.compute(workload, row.device, row.images, efficiency)
  return alone.total + device_step.waiting(
    alone,
    published_rates.buckets(row.dtype),
    device_step.scaled(row.cluster, efficiency),
    efficiency.overlap,
    collective=row.collective,
  )


def fit_rows(rows: Sequence[published_rates.Row]) -> Fit:
  """Fits all numbers to rows, by Levenberg-Marquardt.

  Args:
    rows: published rows; an empty sequence gives the priors.
  """
  devices = list(dict.fromkeys(row.device.name for row in rows))
  systems = list(dict.fromkeys(row.system for row in rows))
  first, second = len(_COMMON), len(_COMMON) + 2 * len(devices)  # of the factors
  size = second + 2 * len(systems)
  deviations = [s for *_, s in _COMMON] + [*_DEVICE] * len(devices) + [*_SYSTEM] * len(systems)
  spread = np.array(deviations)
  observed = np.log([row.seconds for row in rows])

  def unpack(x):
    common = {name: mean * math.exp(v) for (name, mean, _), v in zip(_COMMON, x)}
    pairs = [tuple(pair) for pair in np.exp(x[first:]).reshape(-1, 2).tolist()]
    return Fit(common, dict(zip(devices, pairs)), dict(zip(systems, pairs[len(devices) :])))

  def log_seconds(x, row):
    return math.log(predict(unpack(x), row, row.system))

  def residuals(x):
    errors = np.array([log_seconds(x, row) for row in rows]) - observed
    return np.concatenate([errors / _NOISE, x / spread])

  def jacobian(x):
    result = np.zeros((len(rows) + size, size))
    result[len(rows) :] = np.diag(1 / spread)
    for i, row in enumerate(rows):
      base = log_seconds(x, row)
      device = first + 2 * devices.index(row.device.name)
      system = second + 2 * systems.index(row.system)
      for j in (*range(first), device, device + 1, system, system + 1):
        moved = x.copy()
        moved[j] += _STEP
        result[i, j] = (log_seconds(moved, row) - base) / _STEP / _NOISE
    return result

  start = np.zeros(size)
  if not rows:
    return unpack(start)
  # The last digits of a fit change no prediction.
  return unpack(optimize.least_squares(residuals, start, jacobian, method='lm', ftol=1e-6).x)
