"""Addresses of ports: which one a host gives, and which one is accepted."""

import fcntl
import re
import socket
import struct

from anp_jax import config as config_lib
from anp_jax.cluster import cluster_env

_SIOCGIFADDR = 0x8915  # Linux's question for an interface's IPv4 address
_FORM = re.compile(r'(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})')


def check(address: object) -> None:
  """Refuses what is no HOST:PORT, of an address that another process has told.

  It holds no scheme: whether a port is called with TLS must not be up to it.

  Raises:
    ConfigError: naming the address.
  """
  match = _FORM.fullmatch(address) if isinstance(address, str) else None
  if not match or not 0 < int(match[2]) < 65536:
    raise config_lib.ConfigError(
      f'another process has told the address {str(address)[:100]!r}; expected '
      "HOST:PORT without a scheme, as this process's own config.strategy.tls_key "
      'decides whether it uses TLS'
    )


def own_address(bind: str, env: cluster_env.ClusterEnv) -> str:
  """Returns the address where other processes of a run find this host.

  Args:
    bind: config.strategy.bind.
    env: environment of this process.

  Raises:
    ConfigError: if only this host would find that address.
  """
  if bind in [name for _, name in socket.if_nameindex()]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
      request = struct.pack('256s', bind.encode())
      try:
        answer = fcntl.ioctl(s.fileno(), _SIOCGIFADDR, request)
      except OSError as e:
        raise config_lib.ConfigError(
          f'config.strategy.bind={bind!r}: this interface has no IPv4 address'
        ) from e
    return socket.inet_ntoa(answer[20:24])
  if bind:
    return bind
  host = ''
  if env.coordinator_address:
    host, _ = cluster_env.split_address(env.coordinator_address)
  if env.count == 1 or env.num_hosts == 1 or cluster_env.is_loopback_name(host):
    return '127.0.0.1'
  name = socket.gethostname()
  # Debian's own /etc/hosts has 127.0.1.1 for it.
  address = _resolved(name) or _route(env.coordinator_address)
  if not address:
    raise config_lib.ConfigError(
      f"config.strategy.bind='': {name}, the name of this host, and its way to "
      f'the coordinator {env.coordinator_address} have no address where '
      "other hosts find it; expected an interface, such as 'eth0', or "
      '--coordinator=127.0.0.1:PORT where all processes are on one host'
    )
  return address


def _resolved(name):
  """A host's IPv4 address; '' where it is a loopback address, or none."""
  try:
    address = socket.gethostbyname(name)
  except OSError:
    return ''
  return '' if cluster_env.is_loopback_name(address) else address


def _route(coordinator):
  """This host's address on the way to the coordinator; '' as `_resolved`."""
  host, port = cluster_env.split_address(coordinator)
  try:
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    # Nothing is sent: the system only looks for the way.
    with socket.socket(family, socket.SOCK_DGRAM) as s:
      s.connect(address)
      local = s.getsockname()[0]
  except OSError:
    return ''
  return '' if cluster_env.is_loopback_name(local) else local
