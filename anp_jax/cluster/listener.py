"""The port at which process 0 waits for the others."""

from collections.abc import Mapping, Sequence
import errno
import ipaddress
import socket

from anp_jax import config as config_lib
from anp_jax.cluster import cluster_env, generation, termination

# Connections that wait to be accepted.
_BACKLOG = 1024
_NAME = 'listener '  # of an inherited file
_kept: list[socket.socket] = []
_reserved: list[socket.socket] = []
_TO_ITSELF = {'0.0.0.0': '127.0.0.1', '::': '::1'}


def listen(env: cluster_env.ClusterEnv) -> list[socket.socket]:
  """Opens the first port of process 0 that is not taken.

  Returns:
    A socket for each of `bind_addresses`, all with the same port.

  Raises:
    ConfigError: if a port cannot be opened at all.
    PeerLostError: if all ports are taken.
  """
  host, first_port = cluster_env.split_address(env.coordinator_address)
  addresses = bind_addresses(host)
  ports = [first_port, *env.other_ports]
  for port in ports:
    listeners = []
    try:
      for address in addresses:
        listeners.append(_open(address, port))
      return listeners
    except OSError as e:
      for listening in listeners:
        listening.close()
      if e.errno != errno.EADDRINUSE:
        raise config_lib.ConfigError(
          f'coordinator {env.coordinator_address!r}: rank 0 cannot open port {port} ({e.strerror})'
        ) from e
  raise termination.PeerLostError(
    f'coordinator {env.coordinator_address!r}: rank 0 cannot open port '
    f'{", ".join(map(str, ports))} (taken; another run may hold it): wait, or '
    'choose a port with --coordinator=HOST:PORT or JAX_COORDINATOR_PORT'
  )


def bind_addresses(host: str) -> list[str]:
  """The addresses of this host at which process 0 waits.

  Args:
    host: name by which the other processes find it.

  Returns:
    The addresses of that name that are this host's, and loopback only if the
    name says so. [''], all that this host has, if there are none: other hosts
    then know it by another address, as behind NAT.
  """
  host = _TO_ITSELF.get(host, host)
  try:
    answers = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
  except OSError:  # a name may appear late
    return ['']
  may_be_loopback = cluster_env.is_loopback_name(host)
  addresses = dict.fromkeys(str(answer[4][0]) for answer in answers)
  return [a for a in addresses if _is_here(a) and (may_be_loopback or not _is_loopback(a))] or ['']


def listen_at(host: str) -> socket.socket:
  """Opens some port of an address of this host."""
  return _open(host, 0)


def keep(listeners: Sequence[socket.socket]) -> None:
  """Keeps ports open, in the next generations of this process, too."""
  for i, listening in enumerate(listeners):
    generation.keep(f'{_NAME}{i}', listening.fileno())
    _kept.append(listening)


def inherited(descriptors: Mapping[str, int]) -> list[socket.socket]:
  """Returns the open ports among inherited files, by name."""
  names = sorted(name for name in descriptors if name.startswith(_NAME))
  return [socket.socket(fileno=descriptors[name]) for name in names]


def reserve_port() -> int:
  """A port that nobody but JAX can open until `release_ports`: gRPC shares it."""
  dual = socket.has_dualstack_ipv6()
  reserved = socket.socket(socket.AF_INET6 if dual else socket.AF_INET)
  reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
  if dual:
    reserved.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
  reserved.bind(('', 0))
  _reserved.append(reserved)
  return reserved.getsockname()[1]


def release_ports() -> None:
  """Leaves the reserved ports to JAX, which has opened them."""
  while _reserved:
    _reserved.pop().close()


def _open(address, port):
  if address:
    six = ':' in address
    family = socket.AF_INET6 if six else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=_BACKLOG)
  # Both families where the system allows it.
  dual = socket.has_dualstack_ipv6()
  return socket.create_server(
    ('', port),
    family=socket.AF_INET6 if dual else socket.AF_INET,
    dualstack_ipv6=dual,
    backlog=_BACKLOG,
  )


def _is_loopback(address):
  return ipaddress.ip_address(address.split('%')[0]).is_loopback


def _is_here(address):
  """Whether an address is one of this host's."""
  try:
    _open(address, 0).close()
  except OSError:
    return False
  return True
