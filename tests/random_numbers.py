"""Whether numbers are as random as they are said to be."""

import numpy as np
from scipy import stats


def assert_uniform(columns) -> None:
  """Asserts that columns (n,) are uniform in [0, 1], and that none tells another."""
  for i, column in enumerate(columns):
    # Kolmogorov and Smirnov: chance is below it once in 10,000 seeds.
    assert stats.kstest(column, 'uniform').pvalue > 1e-4, i
  correlations = np.corrcoef(columns) - np.eye(len(columns))
  # Five standard deviations.
  assert np.abs(correlations).max() < 5 / np.sqrt(len(columns[0]))
