"""How the processes of a run find server 0: by a file in the workdir."""

import fcntl
import json
import os
import secrets
import socket
import struct

import pyarrow as pa

from anp_jax import config as config_lib
from anp_jax.cluster import places
from anp_jax.strategies.server import service as service_lib
from anp_jax.strategies.server import wire

NAME = 'server0.json'
_SIOCGIFADDR = 0x8915  # Linux's question for an interface's IPv4 address


class Over(OSError):
  """The run that was last in this workdir has ended; says why it failed."""


def open_service(config, place: places.Place, workdir: str):
  """Opens this server's port; server 0 writes down where it is.

  The file holds the run's token too, and only its owner may read it.

  Args:
    config: the run's config.
    place: of this process.
    workdir: that all processes see.

  Returns:
    `service.Service`, and its address for others.

  Raises:
    ConfigError: if the port cannot be opened.
  """
  host = own_address(config.strategy.bind, place)
  scheme = 'grpc+tls' if config.strategy.tls_key else 'grpc'
  shown = f'[{host}]' if ':' in host else host
  if place.index:
    token = read(workdir)[1]
  else:
    token = secrets.token_hex(32)
  try:
    service = service_lib.Service(f'{scheme}://{shown}:0', token, tls(config))
  except (OSError, pa.ArrowException) as e:
    raise config_lib.ConfigError(
      f'config.strategy.bind={config.strategy.bind!r}: a server cannot listen '
      f'on {host} ({str(e).splitlines()[0]})'
    ) from e
  address = f'{scheme}://{shown}:{service.port}'
  if not place.index:
    _write(workdir, {'address': address, 'token': token})
  return service, address


def close(workdir: str, failed: str) -> None:
  """Leaves word for those who come back late that the run has ended.

  Args:
    workdir: of the run.
    failed: why it could not go on; '' if it ended well.
  """
  _write(workdir, {'over': failed})


def read(workdir: str) -> tuple[str, str]:
  """(address, token) of server 0.

  Raises:
    OSError: where it has not come yet; Over, which is one, where it has left.
  """
  with open(os.path.join(workdir, NAME)) as f:
    found = json.load(f)
  if 'over' in found:
    raise Over(found['over'])
  return found['address'], found['token']


def connect(config, workdir: str, address: str | None = None) -> wire.Client:
  """A client of a server, by default of server 0.

  Raises:
    OSError: where server 0 has not come yet.
  """
  first, token = read(workdir)
  pair = tls(config)
  return wire.Client(address or first, token, pair and pair[0])


def own_address(bind: str, place: places.Place) -> str:
  """Where the other processes of a run find this host.

  Args:
    bind: config.strategy.bind.
    place: of this process.
  """
  if bind in [name for _, name in socket.if_nameindex()]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
      asked = struct.pack('256s', bind.encode())
      try:
        answer = fcntl.ioctl(s.fileno(), _SIOCGIFADDR, asked)
      except OSError as e:
        raise config_lib.ConfigError(
          f'config.strategy.bind={bind!r}: this interface has no IPv4 address'
        ) from e
    return socket.inet_ntoa(answer[20:24])
  if bind:
    return bind
  host = ''
  if place.coordinator:
    host, _ = places.split_address(place.coordinator)
  if place.count == 1 or place.hosts == 1 or places.is_loopback_name(host):
    return '127.0.0.1'
  return socket.gethostbyname(socket.gethostname())


def _write(workdir, content):
  path = os.path.join(workdir, NAME)
  new = f'{path}.{os.getpid()}'
  with open(os.open(new, os.O_WRONLY | os.O_CREAT, 0o600), 'w') as f:
    json.dump(content, f)
  os.replace(new, path)


def tls(config) -> tuple[bytes, bytes] | None:
  """(certificate, key) as PEM, or None where nothing is encrypted."""
  if not config.strategy.tls_key:
    return None
  texts = []
  for path in (config.strategy.tls_certificate, config.strategy.tls_key):
    with open(path, 'rb') as f:
      texts.append(f.read())
  return tuple(texts)
