"""The likelihood of the published rates under other deviations of the planner's fit.

  python -m scripts.bench.once.plan_deviations

Logarithms over that of the deviations in use, each changed alone, by Laplace's
approximation: the numbers and factors that `anp_jax.tools.plan.fit` finds are integrated out.
"""

import argparse
import math
from unittest import mock

import numpy as np
from scipy import optimize

from anp_jax.tools.plan import fit, published_rates
from scripts.bench import _common

_NAMES = {
  '_DEVICE': ('computing of a device', 'fixed cost of a device'),
  '_SYSTEM': ('computing of a system', 'links of a system'),
  '_NOISE': ('a rate',),
}
_FACTORS = (0.33, 0.5, 0.67, 1.5, 2, 3)


def _likelihood(rows, constant, value):
  """Logarithm of the marginal likelihood, but for a constant."""
  results, solve = [], optimize.least_squares

  def solved(*arguments, **keywords):
    results.append(solve(*arguments, **keywords))
    return results[-1]

  changed = mock.patch.object(fit, constant, value)
  with changed, mock.patch.object(optimize, 'least_squares', solved):
    fit.fit_rows(rows)
    noise = fit._NOISE
  (result,) = results
  priors = np.diag(result.jac[len(rows) :])  # one over the deviation of each number
  curvature = np.linalg.slogdet(result.jac.T @ result.jac)[1]
  return np.log(priors).sum() - len(rows) * math.log(noise) - result.cost - curvature / 2


def main():
  """Prints a row for each deviation."""
  argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
  rows = published_rates.read()
  base = _likelihood(rows, '_NOISE', fit._NOISE)
  table, ratios = [('deviation', 'now', *(f'x {factor}' for factor in _FACTORS))], {}
  for constant, names in _NAMES.items():
    now = getattr(fit, constant)
    for i, name in enumerate(names):
      cells = []
      for factor in _FACTORS:
        values = [value * factor if i == j else value for j, value in enumerate(np.atleast_1d(now))]
        changed = tuple(values) if len(names) > 1 else values[0]
        cells.append(_likelihood(rows, constant, changed) - base)
        ratios[f'{name}, x {factor}'] = cells[-1]
      table.append((name, np.atleast_1d(now)[i], *(f'{cell:+.1f}' for cell in cells)))
  _common.show(f'logarithm of the likelihood of {len(rows)} rates', table, ratios)


if __name__ == '__main__':
  main()
