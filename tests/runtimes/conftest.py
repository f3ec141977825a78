"""What the tests of several runtimes share."""

import pytest

from anp_jax.runtimes.parameter_server import slice_optimizer


@pytest.fixture
def small_blocks(monkeypatch):
  """Networks of some hundred weights are not padded to a quarter million."""
  for kind in ('_MATRICES', '_VECTORS'):
    monkeypatch.setattr(slice_optimizer, kind, 2**10)
