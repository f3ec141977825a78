"""Arrays and requests between processes, by Apache Arrow Flight.

Vectors are sent as streams of record batches of one column of bytes, a few
megabytes each; small requests as JSON. Every call carries the session's token,
which both ends derive from the run's secret.
"""

import collections
from collections.abc import Callable, Iterator, Sequence
import contextlib
import ctypes
import functools
import hmac
import json
import pathlib
import secrets
from typing import Any
import weakref

import jax
import ml_collections
import numpy as np
import pyarrow as pa
from pyarrow import flight

from anp_jax import config as config_lib
from anp_jax.cluster import cluster_env, secret as secret_lib
from anp_jax.runtimes import addresses
from anp_jax.system import emulation, error_lines, memory as memory_lib

# Bytes of a record batch: each has its cost; above 10 MB nothing overlaps.
BATCH = 4 * 2**20
_SPARE = 4  # buffers of one size that wait to be used again
_HEADER = 'authorization'
_SCHEMA = pa.schema([('bytes', pa.uint8())])
# Addresses of this process: what it sends to itself passes no link.
_own_addresses: set[str] = set()
# What a call raises when its server is gone, or the run is over.
CONNECTION_ERRORS = (flight.FlightError, OSError, EOFError)


def session_token(secret: str, session: str) -> str:
  """Returns what calls of a session must show; nobody sends it otherwise.

  Args:
    secret: the run's secret, from `cluster.secret`.
    session: random name of a port, new for each start of a server, which anybody may
      know. A token that reached a wrong process is of no use in the next one.

  Raises:
    ValueError: for no secret.
  """
  if not secret:
    raise ValueError('processes without a secret cannot trust each other')
  return secret_lib.prove(secret_lib.derive(secret, 'flight'), session)


class Gate(flight.ServerMiddlewareFactory):
  """Refuses, before anything is read, a call without the token."""

  def __init__(self, token: str):
    self._expected = f'Bearer {token}'

  def start_call(self, info: flight.CallInfo, headers: dict[str, list[str]]) -> None:
    """Refuses a call or lets it pass; header names are in lower case."""
    del info
    for value in headers.get(_HEADER, ()):
      if hmac.compare_digest(value.encode(), self._expected.encode()):
        return
    raise flight.FlightUnauthenticatedError('wrong token: not of this run')


class Port(flight.FlightServerBase):
  """A process's open port, which answers by `act`, `answer` and `receive`.

  Attributes:
    endpoint: 'host:port' for other processes, and the port's session, both for their
      `Client`; whether it is called with TLS is in the config of whoever connects.
  """

  act: Callable[[str, dict], dict]
  answer: Callable[..., tuple[dict, Sequence[np.ndarray]]]
  receive: Callable[[dict, np.ndarray], None]

  def __init__(self, config: ml_collections.ConfigDict, env: cluster_env.ClusterEnv, owner: str):
    """Opens a free port; a call without the token of its session is refused.

    Args:
      config: the run's config.
      env: environment of this process, with the run's secret.
      owner: owner of the port, for people, such as 'a server'.

    Raises:
      ConfigError: if it cannot be opened.
    """
    session = secrets.token_hex(8)
    gate = Gate(session_token(env.secret, session))
    host = addresses.own_address(config.strategy.bind, env)
    pair = tls(config)
    bracketed = f'[{host}]' if ':' in host else host
    options = {'tls_certificates': [pair]} if pair else {}
    try:
      super().__init__(f'{_scheme(pair)}://{bracketed}:0', middleware={'gate': gate}, **options)
    except (OSError, pa.ArrowException) as e:
      raise config_lib.ConfigError(
        f'config.strategy.bind={config.strategy.bind!r}: {owner} cannot listen '
        f'on {host} ({error_lines.first_line(e)})'
      ) from e
    self.endpoint = [f'{bracketed}:{self.port}', session]
    _own_addresses.add(self.endpoint[0])

  def do_action(self, context: Any, action: flight.Action) -> list[bytes]:
    """Answers a small request by `act` (name, request), which returns JSON values."""
    del context
    with _answering():
      return [json.dumps(self.act(action.type, json.loads(action.body.to_pybytes()))).encode()]

  def do_get(self, context: Any, ticket: flight.Ticket) -> flight.FlightDataStream:
    """Sends JSON values and arrays, which `answer` (name, **request) returns."""
    del context
    with _answering():
      request = json.loads(ticket.ticket)
      local = request.pop('local', False)
      return _stream(*self.answer(**request), local)

  def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
    """Hands what arrives to `receive` (request, (n,) uint8)."""
    del context
    with _answering():
      request = json.loads(descriptor.command)
      data = read_bytes(reader, request.pop('bytes'), request.pop('local', False))
      self.receive(request, data)
    writer.write(b'taken')


class Client:
  """Another process's `Port`."""

  def __init__(
    self,
    config: ml_collections.ConfigDict,
    endpoint: Sequence[str],
    secret: str,
    timeout: float = 600.0,
  ):
    """Prepares the connections, which the first call opens.

    Args:
      config: the run's config.
      endpoint: endpoint of the port, as another process has told it.
      secret: the run's secret.
      timeout: seconds that each call may take, all of a transfer included; the coordinator
        reports a lost process sooner.

    Raises:
      ConfigError: if the address is not 'host:port'.
    """
    address, session = endpoint
    addresses.check(address)
    token, pair = session_token(secret, session), tls(config)
    certificate = pair and pair[0]
    self._local = address in _own_addresses
    options = {'tls_root_certs': certificate} if certificate else {}
    # A connection each way: one would push and pull in turns.
    self._down, self._up = (
      flight.FlightClient(
        f'{_scheme(certificate)}://{address}',
        generic_options=[
          ('grpc.max_receive_message_length', -1),
          # A server that was restarted is reached again soon.
          ('grpc.max_reconnect_backoff_ms', 1000),
          ('grpc.use_local_subchannel_pool', 1),  # a connection each
          ('grpc.enable_http_proxy', 0),  # gradients stay within the run
        ],
        **options,
      )
      for _ in range(2)
    )
    self._options = flight.FlightCallOptions(
      timeout=timeout, headers=[(_HEADER.encode(), f'Bearer {token}'.encode())]
    )

  def ask(self, name: str, **request: Any) -> dict:
    """Sends a request and returns its answer, both JSON."""
    action = flight.Action(name, json.dumps(request).encode())
    (result,) = self._down.do_action(action, self._options)
    return json.loads(result.body.to_pybytes())

  def get(self, name: str, **request: Any) -> tuple[dict, np.ndarray]:
    """Requests bytes.

    Returns:
      the answer's JSON, and (n,) uint8.
    """
    request = {'name': name, **request, 'local': self._local}
    ticket = flight.Ticket(json.dumps(request).encode())
    reader = self._down.do_get(ticket, self._options)
    answer = json.loads(reader.schema.metadata[b'said'])
    return answer, read_bytes(reader, answer['bytes'], self._local)

  def put(self, request: dict, arrays: Sequence[np.ndarray]) -> None:
    """Sends arrays; returns once the server has received them.

    Args:
      request: JSON values.
      arrays: arrays that are sent one after another.
    """
    size = sum(a.nbytes for a in arrays)
    request = {**request, 'bytes': size, 'local': self._local}
    descriptor = flight.FlightDescriptor.for_command(json.dumps(request))
    writer, reader = self._up.do_put(descriptor, _SCHEMA, self._options)
    with writer:
      for batch in _paced(emulation.link(self._local), arrays):
        writer.write_batch(batch)
      writer.done_writing()
      reader.read()  # an answer, or the server's error

  def close(self) -> None:
    """Closes both connections."""
    self._down.close()
    self._up.close()


def tls(config: ml_collections.ConfigDict) -> tuple[bytes, bytes] | None:
  """Returns (certificate, key) as PEM, or None where nothing is encrypted."""
  if not config.strategy.tls_key:
    return None
  paths = (config.strategy.tls_certificate, config.strategy.tls_key)
  certificate, key = (pathlib.Path(path).read_bytes() for path in paths)
  return certificate, key


def _scheme(certificate):
  return 'grpc+tls' if certificate else 'grpc'


def _stream(answer, arrays, local):
  """The answer to a `get`: JSON, and arrays one after another."""
  answer = {**answer, 'bytes': sum(a.nbytes for a in arrays)}
  schema = _SCHEMA.with_metadata({'said': json.dumps(answer)})
  link = emulation.link(local)
  if link.bytes_per_second:  # each batch waits for its turn
    return flight.GeneratorStream(schema, _paced(link, arrays, schema))
  batches = list(_batches(arrays, schema))
  # Arrow's own reader: Python is not asked for each batch.
  reader = pa.RecordBatchReader.from_batches(schema, batches)
  return flight.RecordBatchStream(reader)


def read_bytes(
  reader: flight.MetadataRecordBatchReader, size: int, local: bool = False
) -> np.ndarray:
  """Receives what a `put` or the answer to a `get` sends.

  Args:
    reader: Flight's reader of record batches.
    size: bytes that were announced.
    local: whether it comes from this process.

  Returns:
    (size,) uint8.

  Raises:
    ValueError: for any other size, or no bytes.
  """
  data, start, since = _buffers.take(size), 0, None
  link = emulation.link(local)
  for chunk in reader:
    since = since or link.now()
    column = chunk.data.column(0)
    if column.type != pa.uint8() or column.null_count:
      raise ValueError(f'a column of {column.type}, expected bytes')
    if start + len(column) > size:
      raise ValueError(f'more than the {size} bytes announced')
    data[start : start + len(column)] = column.to_numpy()
    start += len(column)
    link.carry(emulation.DOWN, len(column), since)
  if start != size:
    raise ValueError(f'{start} bytes received, expected {size}')
  return data


def split(data: np.ndarray, shapes: Any) -> Any:
  """Returns views of bytes as the arrays that were sent.

  Args:
    data: (n,) uint8.
    shapes: pytree of the arrays' shapes and dtypes.

  Raises:
    ValueError: if they have another size.
  """
  leaves, structure = jax.tree.flatten(shapes)
  sizes = [memory_lib.of_array(leaf) for leaf in leaves]
  if data.nbytes != sum(sizes):
    raise ValueError(f'{data.nbytes} bytes, expected {sum(sizes)}')
  parts = np.split(data, np.cumsum(sizes)[:-1])
  return structure.unflatten(p.view(s.dtype).reshape(s.shape) for p, s in zip(parts, leaves))


@contextlib.contextmanager
def _answering() -> Iterator[None]:
  """Turns an error of a call into an answer to its caller."""
  try:
    yield
  except (AttributeError, KeyError, TypeError, ValueError) as e:
    raise flight.FlightServerError(f'refused: {e}') from None
  except TimeoutError as e:
    raise flight.FlightTimedOutError(str(e)) from None


class _Buffers:
  """Memory of received bytes, used again once no array of it is left.

  The kernel has to zero every page of fresh memory, which took as long as the
  copy into it.
  """

  def __init__(self):
    # By size. A deque's own methods need no lock, which could be held where
    # the collector calls `_give_back`.
    self._free: collections.defaultdict[int, collections.deque] = collections.defaultdict(
      functools.partial(collections.deque, maxlen=_SPARE)
    )

  def take(self, size: int) -> np.ndarray:
    """Returns (size,) uint8 of any content."""
    try:
      memory = self._free[size].pop()
    except IndexError:
      memory = np.empty(size, np.uint8)
    # Arrays made of an array hold on to what that was made of: not to the array
    # itself, but to one that is not NumPy's.
    lease = (ctypes.c_uint8 * size).from_buffer(memory)
    weakref.finalize(lease, self._free[size].append, memory).atexit = False
    return np.frombuffer(memoryview(lease), np.uint8)


_buffers = _Buffers()


def _paced(link, arrays, schema=_SCHEMA):
  """Batches, each once the link is free for it."""
  return link.upload(_batches(arrays, schema, link.batch_bytes(BATCH)))


def _batches(arrays, schema=_SCHEMA, size=BATCH):
  for array in arrays:
    # Views: nothing is copied before the socket.
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    column = pa.Array.from_buffers(pa.uint8(), data.size, [None, pa.py_buffer(data)])
    for start in range(0, data.size, size):
      yield pa.RecordBatch.from_arrays([column.slice(start, size)], schema=schema)
