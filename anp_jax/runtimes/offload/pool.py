"""The offload devices of a run, which are those that are there at its start."""

import socket
import threading
import time

import jax
import ml_collections

from anp_jax import cluster, config as config_lib
from anp_jax.runtimes import single_process
from anp_jax.runtimes.offload import device as device_lib
from anp_jax.system import error_lines

# In config.strategy.offload_to, all devices of the other processes.
PROCESSES = 'processes'
_POLL = 0.05  # seconds
# Seconds that a process goes on computing after it was told to stop: most often
# all are, and process 0 ends it once it has saved.
_GRACE = 10.0
# Messages of process 0: it cannot reach the process; it has ended; it began without it.
_DROPPED, _ENDED, _LATE = 'dropped', 'ended', 'late'


class DevicePool:
  """The offload devices of the process that trains, on one device.

  Devices of other processes may be lost while the run goes on. A process that
  comes later, or again, is left to the next run.

  Attributes:
    processes: this process alone, in place of all processes of the run.
    mesh_devices: devices of the run's mesh: the training device.
    devices: offload devices, also those that are lost, in the order of
      config.strategy.offload_to and of the processes.
  """

  def __init__(self, config: ml_collections.ConfigDict, processes: cluster.Processes):
    """Connects to the offload devices; the other processes call `serve`.

    Args:
      config: the run's config.
      processes: processes of the run; this one is process 0.

    Raises:
      ConfigError: if a device that the config names does not exist.
    """
    self.mesh_devices = jax.local_devices()[:1]
    self.processes = single_process.SingleProcess(processes)
    self._config, self._all = config, processes
    self._mail: dict[int, dict | None] = {}  # by rank; None: it is lost already
    self._peers: dict[int, tuple] = {}  # (client, devices) by rank
    self._news: list[str] = []  # lines about changes
    self._has_met = False
    self._changed = threading.Condition()  # guards the fields above
    names = config.strategy.offload_to
    local = {name: [self._open(name)] for name in names if name != PROCESSES}
    remote = {PROCESSES: self._meet()} if PROCESSES in names else {}
    self.devices = tuple(device for name in names for device in (local | remote)[name])
    shares, count = config.strategy.shares, 1 + len(self.devices)
    if shares and len(shares) != count:
      raise config_lib.ConfigError(
        f'config.strategy.shares={tuple(shares)}: expected {count}, of the '
        'device that trains and of each offload device'
      )

  def __enter__(self):
    return self

  def __exit__(self, kind, error, trace):
    with self._changed:
      peers = dict(self._peers)
    for device in self.devices:
      device.close()
    for device in self.devices:
      if error is not None and device.error is not None:
        # XLA says no more than that a callback failed.
        text = error_lines.first_line(device.error)
        raise cluster.RunFailedError(f'offload device {device.name}: {text}') from device.error
    for rank, (client, _) in peers.items():
      if error is None:
        self._all.send(rank, _ENDED)
      client.close()

  def news(self) -> list[str]:
    """Returns a line for each change of the devices since the last call."""
    with self._changed:
      for rank, (_, devices) in list(self._peers.items()):
        # Its process may not know: a call has failed, but no heartbeat.
        if any(device.is_lost for device in devices):
          self._all.send(rank, _DROPPED)
          self._forget(rank, 'does not answer')
      lines, self._news = self._news, []
      return lines

  def _meet(self):
    """Returns the devices of the present processes, once all have sent their addresses."""
    processes = self._all
    if processes.count == 1:
      raise config_lib.ConfigError(
        f'config.strategy.offload_to: {PROCESSES!r}, but there is no other process'
      )
    expected = {i for i, host in enumerate(processes.hosts) if i and host}
    processes.receive_mail(self._receive)
    with self._changed:
      while not expected <= self._mail.keys():
        processes.heartbeat('starting')
        self._changed.wait(_POLL)
      self._has_met = True
      present = [(rank, value) for rank, value in sorted(self._mail.items()) if value is not None]
      return [device for peer in present for device in self._connect(*peer)]

  def _receive(self, rank, value, why_lost):
    """Handles a process that has come, or is lost; called by another thread."""
    with self._changed:
      if not self._has_met:
        self._mail[rank] = value
        self._changed.notify_all()
      elif value is None:
        self._forget(rank, why_lost)
      else:
        self._all.send(rank, _LATE)

  def _forget(self, rank, why):
    """Does without a process from now on, if it was there."""
    if rank not in self._peers:
      return
    client, devices = self._peers.pop(rank)
    for device in devices:
      device.lose()
    client.close()
    self._news.append(f'rank {rank}: {why}')

  def _connect(self, rank, value):
    """Returns the devices of a process, from what `serve` has sent."""
    from anp_jax.runtimes import transport  # imports Flight
    from anp_jax.runtimes.offload import remote_device, replaceable

    secret = self._all.env.secret
    client = transport.Client(self._config, value['endpoint'], secret)
    substitute = device_lib.LocalDevice(jax.local_devices(backend='cpu')[0], 'this process')
    devices = []
    for index, description in enumerate(value['devices']):
      label = f'{description["kind"]} (rank {rank} on {value["host"]})'
      device = remote_device.RemoteDevice(client, index, label, description)
      devices.append(replaceable.ReplaceableDevice(device, substitute))
    self._peers[rank] = client, devices
    return devices

  def _open(self, name):
    """Returns the offload device of this process with a name such as 'cpu:1'."""
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
    device = devices[int(number)]
    if device in self.mesh_devices:
      raise config_lib.ConfigError(
        f'config.strategy.offload_to: {name!r} is the device that trains'
      )
    label = f'{device_lib.kind(device)} ({name})'
    return device_lib.LocalDevice(device, label)


def serve(config: ml_collections.ConfigDict, processes: cluster.Processes) -> None:
  """Serves this process's devices to process 0 until that ends it.

  Raises:
    ConfigError: if the config has no offload devices in other processes.
  """
  if PROCESSES not in config.strategy.offload_to:
    raise config_lib.ConfigError(
      f'config.strategy.offload_to={tuple(config.strategy.offload_to)}: there '
      f'are {processes.count} processes; expected {PROCESSES!r} among them'
    )
  from anp_jax.runtimes.offload import remote_device  # imports Flight

  devices = jax.local_devices()
  server = remote_device.OffloadServer(config, processes.env, devices)
  orders: list[str] = []  # messages of process 0
  processes.receive_mail(lambda _, order, __: orders.append(order))
  processes.send(
    0,
    {
      'endpoint': server.endpoint,
      'host': socket.gethostname(),
      'devices': [remote_device.describe(device) for device in devices],
    },
  )
  stops_at = None
  with server, processes.handling_signals():
    while not orders:
      # A heartbeat also without requests, as in a long evaluation.
      processes.heartbeat('serving', server.requests)
      if stops_at is None and processes.vote():
        stops_at = time.monotonic() + _GRACE
      if stops_at is not None and time.monotonic() > stops_at:
        processes.leave_early()
        return
      time.sleep(_POLL)
  if orders[0] == _DROPPED:
    raise cluster.PeerLostError('process 0 has had no answer from this process')
  if orders[0] == _LATE:
    print('the run goes on without this process, which the next run may have')
    processes.leave_early()
