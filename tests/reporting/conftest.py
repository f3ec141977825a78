"""What tests of reports share."""

import pytest

from anp_jax.reporting import run_page


@pytest.fixture
def no_figure(monkeypatch):
  """For tests without curves: drawing takes seconds."""
  monkeypatch.setattr(run_page.curves, 'plot', lambda *_: None)
