"""The offload devices of a run: met at its start, released at its end."""

import contextlib
import secrets
import time

import jax

from anp_jax import cluster
from anp_jax import config as config_lib
from anp_jax.runtimes.offload import device as device_lib
from anp_jax.system import errors

# In config.strategy.offload_to, all devices of the other processes.
PROCESSES = 'processes'
_POLL = 0.05  # seconds


class DevicePool:
  """The offload devices of the process that trains, on one device.

  Attributes:
    processes: `cluster.Processes` in which this process is alone.
    mesh_devices: of the run's mesh: the training device.
    offload_devices: in the order of config.strategy.offload_to and of the
      processes.
  """

  def __init__(self, config, processes: cluster.Processes):
    """Meets the offload devices; the other processes call `serve`.

    Args:
      config: the run's config.
      processes: of the run; this one is process 0.

    Raises:
      ConfigError: if a device that the config names does not exist.
    """
    self.mesh_devices = jax.local_devices()[:1]
    self.offload_devices, self._clients, self._poller = [], [], None
    for name in config.strategy.offload_to:
      if name == PROCESSES:
        self.offload_devices += self._connect(config, processes)
      else:
        self.offload_devices.append(self._open(name))
    shares, count = config.strategy.shares, 1 + len(self.offload_devices)
    if shares and len(shares) != count:
      raise config_lib.ConfigError(
        f'config.strategy.shares={tuple(shares)}: expected {count}, of the '
        'device that trains and of each offload device'
      )
    self.processes = _SingleProcess(processes, self.vote)

  def __enter__(self):
    return self

  def __exit__(self, kind, error, trace):
    if self._poller:
      self._poller.close()
    for device in self.offload_devices:
      device.close()
    for device in self.offload_devices:
      if error is not None and device.error is not None:
        # XLA says no more than that a callback failed.
        kind = cluster.Lost if device.is_lost else cluster.Failed
        text = errors.first_line(device.error)
        raise kind(f'offload device {device.name}: {text}') from device.error
    if self._clients:
      from anp_jax.runtimes.offload import remote  # imports Flight

      for client in self._clients:
        if error is None:
          remote.end(client)
        client.close()

  def vote(self) -> int:
    """The largest vote that an offload process has sent."""
    return self._poller.vote if self._poller else 0

  def _open(self, name):
    """The offload device of this process that a name such as 'cpu:1' means."""
    device = _local_device(name)
    if device in self.mesh_devices:
      raise config_lib.ConfigError(
        f'config.strategy.offload_to: {name!r} is the device that trains'
      )
    label = f'{device_lib.kind(device)} ({name})'
    return device_lib.LocalDevice(device, label)

  def _connect(self, config, processes):
    """The devices of all other processes."""
    if processes.count == 1:
      raise config_lib.ConfigError(
        f'config.strategy.offload_to: {PROCESSES!r}, but there is no other '
        'process'
      )
    from anp_jax.runtimes import transport  # imports Flight
    from anp_jax.runtimes.offload import remote

    token = processes.gather(secrets.token_hex(32))[0]
    devices = []
    for rank, server in enumerate(processes.gather(None)):
      if server is None:
        continue
      client = transport.connect(
        config, server['address'], token, remote.TIMEOUT
      )
      self._clients.append(client)
      for index, description in enumerate(server['devices']):
        host = processes.hosts[rank]
        label = f'{description["kind"]} (rank {rank} on {host})'
        devices.append(remote.RemoteDevice(client, index, label, description))
    self._poller = remote.VotePoller(self._clients)
    return devices


def serve(config, processes: cluster.Processes) -> None:
  """Serves this process's devices to process 0 until that ends it.

  Raises:
    ConfigError: if the config has no offload devices in other processes.
  """
  if PROCESSES not in config.strategy.offload_to:
    raise config_lib.ConfigError(
      f'config.strategy.offload_to={tuple(config.strategy.offload_to)}: there '
      f'are {processes.count} processes; expected {PROCESSES!r} among them'
    )
  from anp_jax.runtimes.offload import remote  # imports Flight

  devices = jax.local_devices()
  token = processes.gather(None)[0]
  server = remote.OffloadServer(config, processes.env, token, devices)
  processes.gather(
    {
      'address': server.address,
      'devices': [remote.describe(device) for device in devices],
    }
  )
  with contextlib.closing(server), processes.handling_signals():
    while not server.has_ended:
      # A heartbeat also without requests, as in a long evaluation.
      processes.heartbeat('serving', server.requests)
      server.vote = max(server.vote, processes.vote())
      time.sleep(_POLL)


class _SingleProcess:
  """The process that trains, as if the offload processes did not exist."""

  index, count, hosts = 0, 1, ('',)

  def __init__(self, processes, vote):
    self._processes = processes
    self._vote = vote
    self.env = processes.env
    self.heartbeat, self.heartbeat_each = (
      processes.heartbeat,
      processes.heartbeat_each,
    )
    self.handling_signals = processes.handling_signals

  def gather(self, value) -> list:
    """The value of this process alone."""
    return [value]

  def check_shared(self, workdir: str) -> None:
    """Accepts any workdir: the offload processes never read it."""

  def vote(self) -> int:
    """The larger vote of this process and the offload processes."""
    return max(self._processes.vote(), self._vote())


def _local_device(name):
  """The device of this process that a name such as 'cpu:1' means."""
  platform, _, number = name.partition(':')
  try:
    devices = jax.local_devices(backend=platform)
  except RuntimeError:
    devices = []
  if int(number) >= len(devices):
    names = [f'{d.platform}:{i}' for i, d in enumerate(devices)]
    raise config_lib.ConfigError(
      f'config.strategy.offload_to: there is no {name!r} here; expected '
      f'{", ".join(names) or "another platform than " + platform}'
    )
  return devices[int(number)]
