"""Fixtures that the tests of several tools share."""

import pytest

from anp_jax.tools.plan import fit


@pytest.fixture
def priors_only(monkeypatch):
  """Efficiencies without published rates: the fits take seconds, and have tests of their own."""
  priors = fit.fit_rows([])
  monkeypatch.setattr(fit, 'fit_rows', lambda rows: priors)
