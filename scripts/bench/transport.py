"""What travels between a worker and a server: 100 MB there and 100 MB back.

  python scripts/bench/transport.py

A gradient is pushed while weights are pulled, by Arrow Flight as the strategy
`parameter_server` does it, and by two raw sockets, in turns, to another process of this
machine. Both ends take part in the two cores that such a machine may have.
"""

import argparse
import concurrent.futures
import json
import socket
import statistics
import subprocess
import sys
import time

import _common
import numpy as np
from pyarrow import flight

from anp_jax.runtimes import transport

_TOKEN = 'bench'
_CHUNK = 2**20  # bytes that a raw socket is given at a time


def main():
  """Prints the table."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--megabytes', type=int, default=100)
  parser.add_argument('--rounds', type=int, default=7)
  parser.add_argument('--serve', action='store_true', help=argparse.SUPPRESS)
  flags = parser.parse_args()
  size = flags.megabytes * 10**6
  if flags.serve:
    _serve(size)
    return
  child = subprocess.Popen(
    [sys.executable, __file__, '--serve', f'--megabytes={flags.megabytes}'],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  )
  try:
    ports = json.loads(child.stdout.readline())
    times = _rounds(ports, size, flags.rounds)
  finally:
    child.stdin.close()
    child.wait()
  rates = {name: [2 * size / 1e9 / s for s in seconds] for name, seconds in times.items()}
  middle = {name: _common.median(values) for name, values in rates.items()}
  share = statistics.median(f / r for f, r in zip(rates['flight'], rates['raw socket']))
  rows = [('', 'GB/s, median', 'least', 'most')]
  for name, values in rates.items():
    rows.append((name, f'{middle[name]:.2f}', f'{min(values):.2f}', f'{max(values):.2f}'))
  _common.show(
    f'{flags.megabytes} MB pushed and as much pulled, both together',
    rows,
    {
      'flight_gigabytes_per_second': middle['flight'],
      'socket_gigabytes_per_second': middle['raw socket'],
      'flight_over_socket': share,
    },
  )


def _rounds(ports, size, rounds):
  """Seconds of each round, by name; the first round warms up."""
  data = np.ones(size, np.uint8)
  client = transport.Client(f'127.0.0.1:{ports["flight"]}', _TOKEN)
  up, down = (socket.create_connection(('127.0.0.1', ports['raw'])) for _ in range(2))
  into = np.empty(size, np.uint8)

  def raw_push():
    _send(up, data)
    up.recv(1)  # all of it has come

  def raw_pull():
    down.sendall(b'x')
    _receive(down, into)

  kinds = {
    'raw socket': (raw_push, raw_pull),
    'flight': (lambda: client.put({}, [data]), lambda: client.get('weights')),
  }
  times = {name: [] for name in kinds}
  with concurrent.futures.ThreadPoolExecutor(2) as pool:
    for i in range(rounds + 1):
      for name, pair in kinds.items():
        start = time.perf_counter()
        for job in [pool.submit(job_function) for job_function in pair]:
          job.result()
        if i:
          times[name].append(time.perf_counter() - start)
  for connection in (up, down):
    connection.close()
  return times


class _Service(flight.FlightServerBase):
  """Takes and gives bytes as a server does, and does nothing with them."""

  def __init__(self, size):
    super().__init__('grpc://127.0.0.1:0', middleware={'gate': transport.Gate(_TOKEN)})
    self._data = np.ones(size, np.uint8)

  def do_get(self, context, ticket):
    return transport.stream({}, [self._data])

  def do_put(self, context, descriptor, reader, writer):
    transport.read_bytes(reader, json.loads(descriptor.command)['bytes'])
    writer.write(b'taken')


def _serve(size):
  service = _Service(size)
  listener = socket.create_server(('127.0.0.1', 0))
  ports = {'raw': listener.getsockname()[1], 'flight': service.port}
  print(json.dumps(ports), flush=True)
  up, down = (listener.accept()[0] for _ in range(2))
  into, data = np.empty(size, np.uint8), np.ones(size, np.uint8)

  def take():
    while _receive(up, into):
      up.sendall(b'x')

  def give():
    while down.recv(1):
      _send(down, data)

  with concurrent.futures.ThreadPoolExecutor(2) as pool:
    for job in [pool.submit(take), pool.submit(give)]:
      job.result()
  sys.stdin.read()
  service.shutdown()


def _send(connection, data):
  view = memoryview(data)
  for start in range(0, len(view), _CHUNK):
    connection.sendall(view[start : start + _CHUNK])


def _receive(connection, into):
  """Fills an array; False where the other end has gone."""
  view, at = memoryview(into), 0
  while at < len(view):
    count = connection.recv_into(view[at : at + _CHUNK])
    if not count:
      return False
    at += count
  return True


if __name__ == '__main__':
  main()
