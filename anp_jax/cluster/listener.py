"""The port at which process 0 waits for the others."""

import socket

from anp_jax import config as config_lib
from anp_jax.cluster import cluster_env

# Connections that wait to be accepted.
_BACKLOG = 1024


def listen(env: cluster_env.ClusterEnv) -> list[socket.socket]:
  """Opens the port of process 0.

  Raises:
    ConfigError: if the port is taken.
  """
  _, port = cluster_env.split_address(env.coordinator_address)
  # Both families where the system allows it.
  dual = socket.has_dualstack_ipv6()
  try:
    return [
      socket.create_server(
        ('', port),
        family=socket.AF_INET6 if dual else socket.AF_INET,
        dualstack_ipv6=dual,
        backlog=_BACKLOG,
      )
    ]
  except OSError as e:
    raise config_lib.ConfigError(
      f'coordinator {env.coordinator_address!r}: rank 0 cannot open port '
      f'{port} ({e.strerror}); another run may hold it'
    ) from e


def free_port() -> int:
  """A port that nobody listens at now."""
  with socket.socket() as s:
    s.bind(('', 0))
    return s.getsockname()[1]
