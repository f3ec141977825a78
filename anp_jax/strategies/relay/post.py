"""How models travel between processes, over Apache Arrow Flight."""

import json

import pyarrow as pa
from pyarrow import flight

from anp_jax import config as config_lib
from anp_jax.strategies.server import meeting
from anp_jax.strategies.server import wire


class Post(flight.FlightServerBase):
  """A process's letter box."""

  def __init__(self, config, place, token: str, took, told):
    """Opens the port.

    Args:
      config: the run's config.
      place: of this process.
      token: of the run: a call without it is refused.
      took: called (request, bytes) for what has come, from any thread.
      told: called (name, request) for a message, likewise.

    Raises:
      ConfigError: if the port cannot be opened.
    """
    host = meeting.own_address(config.strategy.bind, place)
    tls = meeting.tls(config)
    scheme = 'grpc+tls' if tls else 'grpc'
    shown = f'[{host}]' if ':' in host else host
    self._took, self._told = took, told
    more = {'tls_certificates': [tls]} if tls else {}
    try:
      super().__init__(
        f'{scheme}://{shown}:0', middleware={'gate': wire.Gate(token)}, **more
      )
    except (OSError, pa.ArrowException) as e:
      raise config_lib.ConfigError(
        f'config.strategy.bind={config.strategy.bind!r}: a station cannot '
        f'listen on {host} ({str(e).splitlines()[0]})'
      ) from e
    self.address = f'{scheme}://{shown}:{self.port}'

  def do_put(self, context, descriptor, reader, writer):
    """A model, or what there is of it to score."""
    del context
    request = json.loads(descriptor.command)
    self._took(request, wire.taken(reader, request.pop('bytes')))
    writer.write(b'taken')

  def do_action(self, context, action):
    """A message."""
    del context
    self._told(action.type, json.loads(action.body.to_pybytes()))
    return [b'{}']


def client(config, address: str, token: str) -> wire.Client:
  """A client of another process's `Post`."""
  pair = meeting.tls(config)
  # Of a host that has gone, the processes' own watch tells sooner.
  return wire.Client(address, token, pair and pair[0], timeout=600.0)
