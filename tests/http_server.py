"""A server of HTTP on a port of this machine."""

import contextlib
from http import server
import sys
import threading


class Server:
  """The server, on a port of its own while its context is open.

  Attributes:
    url: address of the server.
  """

  def __init__(self, handler: type['Handler']):
    """Takes a port.

    Args:
      handler: class that answers; its `store` becomes this server.
    """
    self._http = _Http(('127.0.0.1', 0), type('Handler', (handler,), {'store': self}))
    self.url = f'http://127.0.0.1:{self._http.server_port}'

  def __enter__(self):
    threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()
    return self

  def __exit__(self, *_):
    self._http.shutdown()
    self._http.server_close()


class Handler(server.BaseHTTPRequestHandler):
  """Answers one connection, and logs nothing."""

  store: Server

  def reply(self, status: int, headers: dict, body: bytes = b'') -> None:
    """Sends an answer, also to a client that has gone."""
    self.send_response(status)
    for name, value in headers.items():
      self.send_header(name, str(value))
    self.end_headers()
    with contextlib.suppress(OSError):
      if self.command != 'HEAD':
        self.wfile.write(body)
      self.wfile.flush()

  def log_message(self, *_):
    pass


class StoreHandler(Handler):
  """Answers clients of an object store, which keep their connections."""

  protocol_version = 'HTTP/1.1'
  disable_nagle_algorithm = True  # else each answer takes 40 ms
  wbufsize = -1


class _Http(server.ThreadingHTTPServer):
  """A server whose clients may go away."""

  daemon_threads = True

  def handle_error(self, request, client_address):
    if not isinstance(sys.exc_info()[1], ConnectionError):
      super().handle_error(request, client_address)
