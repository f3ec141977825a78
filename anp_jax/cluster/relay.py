"""A local port that passes on to JAX's coordination service, and outlives it.

JAX's client ends its process as soon as the service is gone, which the lost process 0
may have held; the survivors of an elastic run need that moment. Behind a relay, the
client hears of it only once the run is over: its calls wait until the process restarts.
"""

import contextlib
import socket
import threading
import time

_MAX_BYTES = 2**16  # of one read
_is_over = threading.Event()
_RETRY = 0.05  # seconds between two attempts to reach the service, which may come later


def start(target: tuple[str, int]) -> int:
  """Returns the port on the loopback address that passes on to a host and port."""
  listener = socket.create_server(('127.0.0.1', 0))
  threading.Thread(target=_serve, args=(listener, target), name='relay', daemon=True).start()
  return listener.getsockname()[1]


def release() -> None:
  """Has the client hear of the end of the service from now on."""
  _is_over.set()


def _serve(listener, target):
  while True:
    client, _ = listener.accept()
    threading.Thread(target=_pass_on, args=(client, target), name='relay', daemon=True).start()


def _pass_on(client, target):
  while True:
    try:
      service = socket.create_connection(target)
      break
    except OSError:
      time.sleep(_RETRY)
  threading.Thread(target=_answer, args=(service, client), name='relay', daemon=True).start()
  _copy(client, service)
  _end(service)


def _answer(service, client):
  _copy(service, client)
  _is_over.wait()
  _end(client)


def _copy(source, sink):
  with contextlib.suppress(OSError):
    while data := source.recv(_MAX_BYTES):
      sink.sendall(data)


def _end(sink):
  with contextlib.suppress(OSError):
    sink.shutdown(socket.SHUT_WR)
