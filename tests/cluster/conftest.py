"""What the tests of a run's processes share."""

import contextlib
import socket

import pytest

from anp_jax.cluster import client, coordinator


@pytest.fixture
def short_waits(monkeypatch):
  """All waits of coordinators and clients are short, and clients end."""
  for module, name, seconds in (
    (coordinator, 'HEARTBEAT_PERIOD', 0.05),
    (coordinator, 'LOG_PERIOD', 0.1),
    (coordinator, '_REPORTS_WITHIN', 0.1),
    (coordinator, '_LOSS_SEEN_WITHIN', 0.3),
    (client, '_RETRY', 0.02),
  ):
    monkeypatch.setattr(module, name, seconds)
  clients, listen = [], client.CoordinatorClient._listen

  def noted(self):
    clients.append(self)
    listen(self)

  monkeypatch.setattr(client.CoordinatorClient, '_listen', noted)
  yield
  for connected in clients:  # their threads end
    connected._end = (0, '')
    with contextlib.suppress(OSError):
      connected._socket.shutdown(socket.SHUT_RDWR)
