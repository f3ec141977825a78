"""A relay passes everything on, but not the end of the service."""

import socket

import pytest

from anp_jax.cluster import relay


def test_the_end_of_the_service_is_heard_once_the_run_is_over(monkeypatch):
  monkeypatch.setattr(relay, '_is_over', relay.threading.Event())
  with socket.create_server(('127.0.0.1', 0)) as service:
    port = relay.start(service.getsockname())
    with socket.create_connection(('127.0.0.1', port), 10) as client:
      inner, _ = service.accept()
      client.sendall(b'question')
      assert inner.recv(100) == b'question'
      inner.sendall(b'answer')
      assert client.recv(100) == b'answer'
      inner.close()
      client.settimeout(0.2)
      with pytest.raises(TimeoutError):
        client.recv(100)
      relay.release()
      client.settimeout(10)
      assert client.recv(100) == b''
