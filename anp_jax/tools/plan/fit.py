"""Efficiencies of devices, from published rates.

What a data sheet leaves open are four numbers: the share of the peak that
convolutions reach (one for each kind of device), the share of the memory's
bandwidth, the seconds of a kernel, and the share of the links' bandwidth. They
are the same for all systems, up to three factors of each system: of its
computing, its fixed cost and its links. All are fitted at once, as the maximum
a posteriori of a hierarchical model: errors of the logarithm of a step's
seconds are normal, and so are all logarithms of the numbers around the priors
below. A system without rows then has the factors 1: it is predicted from its
data sheet and the other systems. One or two rows move its factors as far as
they can tell.
"""

from collections.abc import Callable, Sequence
import dataclasses
import math

import numpy as np
from scipy import optimize

from anp_jax.costs import device_step, hardware, work
from anp_jax.tools.plan import published_rates

KINDS = ('tensor', 'vector', 'tpu', 'cpu')
# Logarithms of the common numbers: what one would guess, and how surely.
_COMMON = (
  *((f'product {kind}', 0.5, 0.5) for kind in KINDS),
  ('memory', 1.0, 0.25),
  ('memory tpu', 1.0, 0.25),  # over the others
  ('kernel', 10e-6, 0.6),  # of a device of _YEAR
  ('kernel trend', 1.0, 0.2),  # factor a year
  ('wire', 0.7, 0.3),
)
_YEAR = 2018
# Standard deviations of the logarithms of a system's own factors.
_OWN = (('compute', 0.15), ('fixed', 0.7), ('wire', 0.7))
_NOISE = 0.02  # of a published rate
_STEP = 1e-4


@dataclasses.dataclass(frozen=True)
class Fit:
  """Common numbers and the factors of each system.

  Attributes:
    common: common numbers by name, see _COMMON.
    factors: (compute, fixed, wire) of each system.
  """

  common: dict[str, float]
  factors: dict[str, tuple[float, float, float]]

  def efficiency(
    self, device: hardware.Device, dtype: str, *systems: str
  ) -> device_step.Efficiency:
    """Returns what a device reaches.

    Args:
      device: device of the tables.
      dtype: dtype of the computation.
      *systems: systems whose factors count, as their geometric mean; none: what follows from
        data sheets alone.
    """
    kind = device.effective_kind(dtype)
    factors = [self.factors[s] for s in systems if s in self.factors]
    logs = np.log(factors or [(1.0, 1.0, 1.0)]).mean(0)
    compute, fixed, wire = map(float, np.exp(logs))
    trend = self.common['kernel trend'] ** (device.year - _YEAR)
    memory = self.common['memory']
    if kind == 'tpu':
      memory *= self.common['memory tpu']
    return device_step.Efficiency(
      product=self.common[f'product {kind}'] / compute,
      memory=memory / compute,
      kernel_seconds=self.common['kernel'] * fixed * trend,
      wire=self.common['wire'] * wire,
      overlap=0.0 if kind == 'cpu' else device_step.Efficiency.overlap,
    )


@dataclasses.dataclass(frozen=True)
class Case:
  """A published row, and what its step costs.

  Attributes:
    row: published row.
    workload: workload of the network in the row's dtype.
    buckets: buckets of gradients, from `device_step.buckets`.
  """

  row: published_rates.Row
  workload: work.Workload
  buckets: tuple[tuple[float, float], ...]


def cases(
  rows: Sequence[published_rates.Row], workloads: Callable[[str], work.Workload]
) -> list[Case]:
  """Returns rows with their workloads.

  Args:
    rows: published rows.
    workloads: function from a dtype to the workload of the network that all rows trained.
  """
  result = []
  for row in rows:
    workload = workloads(row.dtype)
    result.append(Case(row, workload, published_rates.gradient_buckets(row, workload)))
  return result


def predict(fit: Fit, case: Case) -> float:
  """Returns the seconds of a step of a published row, whose rate is not read."""
  row = case.row
  efficiency = fit.efficiency(row.device, row.dtype, row.system)
  alone = device_step.compute(case.workload, row.device, row.images, efficiency)
  return alone.total + device_step.waiting(
    alone,
    case.buckets,
    device_step.scaled(row.cluster, efficiency),
    efficiency.overlap,
    collective=row.collective,
  )


def fit_cases(fitted: Sequence[Case]) -> Fit:
  """Fits all numbers to rows, by Levenberg-Marquardt.

  Args:
    fitted: published rows; an empty sequence gives the priors.
  """
  rows = [case.row for case in fitted]
  systems = list(dict.fromkeys(row.system for row in rows))
  names = [name for name, *_ in _COMMON]
  size = len(_COMMON) + len(_OWN) * len(systems)
  spread = np.array([s for *_, s in _COMMON] + [s for _, s in _OWN] * len(systems))
  observed = np.log([row.seconds for row in rows])

  def unpack(x):
    common = {name: mean * math.exp(v) for (name, mean, _), v in zip(_COMMON, x)}
    factors = np.exp(x[len(_COMMON) :]).reshape(-1, len(_OWN))
    return Fit(common, {s: tuple(f) for s, f in zip(systems, factors)})

  def columns(row):
    kind = row.device.effective_kind(row.dtype)
    common = [names.index(f'product {kind}'), *range(len(KINDS), len(names))]
    first = len(names) + len(_OWN) * systems.index(row.system)
    return [*common, *range(first, first + len(_OWN))]

  def log_seconds(x, case):
    return math.log(predict(unpack(x), case))

  def residuals(x):
    errors = np.array([log_seconds(x, c) for c in fitted]) - observed
    return np.concatenate([errors / _NOISE, x / spread])

  def jacobian(x):
    result = np.zeros((len(rows) + size, size))
    result[len(rows) :] = np.diag(1 / spread)
    for i, case in enumerate(fitted):
      base = log_seconds(x, case)
      for j in columns(case.row):
        moved = x.copy()
        moved[j] += _STEP
        result[i, j] = (log_seconds(moved, case) - base) / _STEP / _NOISE
    return result

  start = np.zeros(size)
  if not rows:
    return unpack(start)
  # The last digits of a fit change no prediction.
  return unpack(optimize.least_squares(residuals, start, jacobian, method='lm', ftol=1e-6).x)
