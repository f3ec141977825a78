"""The helpers of a run: found at its start, let go at its end."""

import contextlib
import secrets
import time

import jax

from anp_jax import cluster
from anp_jax import config as config_lib
from anp_jax.runtimes.offload import device as helper_lib

# In config.strategy.helpers, all devices of the other processes.
PROCESSES = 'processes'
_POLL = 0.05  # seconds


class Crew:
  """One process trains, on one device; its helpers, and what it waits for.

  Attributes:
    processes: as the training process is to see them: it is alone.
    devices: of the mesh.
    helpers: in the order of config.strategy.helpers and of the processes.
  """

  def __init__(self, config, processes: cluster.Processes):
    """Meets the helpers; the other processes call `serve`.

    Args:
      config: the run's config.
      processes: of the run, of which this is process 0.

    Raises:
      ConfigError: if a helper that the config names is not there.
    """
    self.devices = jax.local_devices()[:1]
    self.helpers, self._clients, self._votes = [], [], None
    for name in config.strategy.helpers:
      if name == PROCESSES:
        self.helpers += self._meet(config, processes)
      else:
        device = _local(name)
        if device in self.devices:
          raise config_lib.ConfigError(
            f'config.strategy.helpers: {name!r} is the device that trains'
          )
        label = f'{helper_lib.kind(device)} ({name})'
        self.helpers.append(helper_lib.Helper(device, label))
    shares = config.strategy.shares
    if shares and len(shares) != 1 + len(self.helpers):
      raise config_lib.ConfigError(
        f'config.strategy.shares={tuple(shares)}: expected '
        f'{1 + len(self.helpers)}, of the device that trains and of each helper'
      )
    self.processes = _Alone(processes, self.vote)

  def __enter__(self):
    return self

  def __exit__(self, kind, error, trace):
    if self._votes:
      self._votes.close()
    for helper in self.helpers:
      helper.close()
    for helper in self.helpers:
      if error is not None and helper.error is not None:
        # XLA says no more than that a callback failed.
        kind = cluster.Lost if helper.is_lost else cluster.Failed
        text = str(helper.error).splitlines()[0]
        raise kind(f'helper {helper.name}: {text}') from helper.error
    for client in self._clients:
      if error is None:
        self._let_go(client)
      client.close()

  def vote(self) -> int:
    """The largest that a helper's process was heard to ask for."""
    return self._votes.vote if self._votes else 0

  def _meet(self, config, processes):
    if processes.count == 1:
      raise config_lib.ConfigError(
        f'config.strategy.helpers: {PROCESSES!r}, but there is no process '
        'beside this one'
      )
    from anp_jax.runtimes import transport  # Flight is imported
    from anp_jax.runtimes.offload import remote

    self._let_go = remote.let_go
    token = processes.gather(secrets.token_hex(32))[0]
    found = []
    for rank, card in enumerate(processes.gather(None)):
      if card is None:
        continue
      client = transport.connect(config, card['address'], token, remote.TIMEOUT)
      self._clients.append(client)
      for number, device in enumerate(card['devices']):
        label = f'{device["kind"]} (rank {rank} on {processes.hosts[rank]})'
        found.append(remote.Far(client, number, label, device))
    self._votes = remote.Votes(self._clients)
    return found


def serve(config, processes: cluster.Processes) -> None:
  """Helps process 0 until it wants nothing more.

  Raises:
    ConfigError: if the config has no helpers in other processes.
  """
  if PROCESSES not in config.strategy.helpers:
    raise config_lib.ConfigError(
      f'config.strategy.helpers={tuple(config.strategy.helpers)}: there are '
      f'{processes.count} processes; expected {PROCESSES!r} among them'
    )
  from anp_jax.runtimes.offload import remote  # Flight is imported

  token = processes.gather(None)[0]
  desk = remote.Desk(config, processes.place, token, jax.local_devices())
  processes.gather(
    {
      'address': desk.address,
      'devices': [remote.shown(d) for d in jax.local_devices()],
    }
  )
  with contextlib.closing(desk), processes.listening():
    while not desk.is_over:
      # It lives also while nobody asks, as in a long evaluation.
      processes.beat('helping', desk.asked)
      desk.vote = max(desk.vote, processes.vote())
      time.sleep(_POLL)


class _Alone:
  """The process that trains, as if there were no other: these only help it."""

  index, count, hosts = 0, 1, ('',)

  def __init__(self, processes, vote):
    self._processes = processes
    self._vote = vote
    self.place = processes.place
    self.beat, self.each = processes.beat, processes.each
    self.listening = processes.listening

  def gather(self, value) -> list:
    """Its own value."""
    return [value]

  def check_shared(self, workdir: str) -> None:
    """The others never look at the workdir."""

  def vote(self) -> int:
    """What it asks, or a helper's process."""
    return max(self._processes.vote(), self._vote())


def _local(name):
  """The device of this process that a name such as 'cpu:1' means."""
  platform, _, number = name.partition(':')
  try:
    devices = jax.local_devices(backend=platform)
  except RuntimeError:
    devices = []
  if int(number) >= len(devices):
    there = [f'{d.platform}:{i}' for i, d in enumerate(devices)]
    raise config_lib.ConfigError(
      f'config.strategy.helpers: there is no {name!r} here; expected '
      f'{", ".join(there) or "another platform than " + platform}'
    )
  return devices[int(number)]
