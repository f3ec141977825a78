"""Hosts on this machine, each a network name space, on one bridge."""

import contextlib
import pathlib
import shutil
import subprocess

import pytest

PREFIX = 'anp-host'  # of the name of each, before its rank; for ANP_HOSTS of phased.py
_BRIDGE, _NETWORK = 'anp-bridge', '10.77.19'


@contextlib.contextmanager
def open_hosts(count):
  """Yields the first host's address; skips where there are no name spaces."""
  names = [f'{PREFIX}{rank}' for rank in range(count)]
  addresses = [f'{_NETWORK}.{10 + rank}' for rank in range(count)]
  lines = ['127.0.0.1 localhost', *map(' '.join, zip(addresses, names, strict=True))]
  with contextlib.ExitStack() as stack:
    try:
      _open_bridge(stack)
      for name, address in zip(names, addresses, strict=True):
        _open_host(stack, name, address, lines)
    except (OSError, subprocess.CalledProcessError) as e:
      pytest.skip(f'no network name spaces: {e}')
    yield addresses[0]


def call(command):
  """Runs the words of a command."""
  return subprocess.run(command.split(), check=True)


def cut(rank):
  """Takes a host from the network; nobody is told."""
  call(f'ip link set veth-{PREFIX}{rank} nomaster')


def heal(rank):
  """Brings a host back to the network."""
  call(f'ip link set veth-{PREFIX}{rank} master {_BRIDGE}')


def _open_bridge(stack):
  call(f'ip link add {_BRIDGE} type bridge')
  stack.callback(call, f'ip link del {_BRIDGE}')
  call(f'ip addr add {_NETWORK}.1/24 dev {_BRIDGE}')
  call(f'ip link set {_BRIDGE} up')


def _open_host(stack, name, address, lines):
  call(f'ip netns add {name}')
  stack.callback(call, f'ip netns del {name}')
  folder = pathlib.Path('/etc/netns', name)
  folder.mkdir(parents=True)
  stack.callback(shutil.rmtree, folder)
  (folder / 'hosts').write_text('\n'.join(lines) + '\n')
  call(f'ip link add veth-{name} type veth peer name eth0 netns {name}')
  call(f'ip link set veth-{name} master {_BRIDGE} up')
  call(f'ip -n {name} addr add {address}/24 dev eth0')
  for device in ('lo', 'eth0'):
    call(f'ip -n {name} link set {device} up')
