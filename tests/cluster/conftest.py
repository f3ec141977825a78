"""What the tests of a run's processes share."""

import pytest

from anp_jax.cluster import connection, coordinator


@pytest.fixture
def short_waits(monkeypatch):
  """All waits of coordinators and clients are short, and connections end."""
  for module, name, seconds in (
    (coordinator, 'HEARTBEAT_PERIOD', 0.05),
    (coordinator, 'LOG_PERIOD', 0.1),
    (coordinator, '_REPORTS_WITHIN', 0.1),
    (coordinator, '_LOSS_SEEN_WITHIN', 0.3),
    (connection, '_RETRY', 0.02),
  ):
    monkeypatch.setattr(module, name, seconds)
  connections, messages = [], connection.Connection.messages

  def noted(self):
    connections.append(self)
    return messages(self)

  monkeypatch.setattr(connection.Connection, 'messages', noted)
  yield
  for opened in connections:  # their threads end
    opened.close()
