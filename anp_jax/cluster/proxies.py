"""Keeps the connections of a run's processes away from an HTTP proxy."""

from collections.abc import MutableMapping
import os
import socket

from anp_jax.cluster import cluster_env

_LOCAL = 'localhost', '127.0.0.1', '::1'


def bypass(env: cluster_env.ClusterEnv, environment: MutableMapping[str, str] = os.environ) -> None:
  """Exempts the hosts of a run from the proxies that a site configures.

  gRPC, over which JAX's processes meet, asks the proxy of `http_proxy` even for
  this host. It reads these variables when it connects, so this comes before
  `jax.distributed`. Other hosts than rank 0's are reached by Flight alone,
  whose clients use no proxy; see `runtimes.transport`.

  Args:
    env: place of this process; nothing changes where it is alone.
    environment: variables; what they exempt already stays exempt.
  """
  if env.count == 1:
    return
  hosts = [*_LOCAL, socket.gethostname()]
  if env.coordinator_address:
    hosts.append(cluster_env.split_address(env.coordinator_address)[0])
  general = environment.get('no_proxy') or environment.get('NO_PROXY', '')
  # gRPC reads `no_proxy` only where its own variable is not set.
  for name in ('no_grpc_proxy', 'no_proxy', 'NO_PROXY'):
    listed = (environment.get(name) or general).split(',')
    names = dict.fromkeys(n.strip() for n in (*listed, *hosts))
    environment[name] = ','.join(n for n in names if n)
