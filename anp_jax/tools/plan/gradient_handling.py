"""The work of a CPU's cores to handle a gradient, apart from its pass.

A worker pulls weights, joins the gradient and pushes it; a server sends, receives
and updates. Where these cores also compute, none of this work is hidden.
"""

from collections.abc import Callable
import contextlib
import secrets
import statistics
import time

import jax
import ml_collections
import numpy as np
import optax

from anp_jax import config as config_lib
from anp_jax.cluster import cluster_env
from anp_jax.runtimes import transport
from anp_jax.runtimes.parameter_server import look_ahead, setup as setup_lib
from anp_jax.training import optimizer as optimizer_lib

_TURNS = 5
_SECRET = secrets.token_hex(32)  # this process calls itself


class _Port(transport.Port):
  """Sends weights, and receives gradients that nobody uses."""

  def __init__(self, config, weights):
    super().__init__(config, cluster_env.ALONE._replace(secret=_SECRET), 'a server')
    self._weights = weights

  def answer(self, name: str) -> tuple[dict, list[np.ndarray]]:
    """Returns the weights."""
    del name
    return {}, self._weights

  def receive(self, request: dict, data: np.ndarray) -> None:
    """Receives a gradient."""


def seconds(config: ml_collections.ConfigDict) -> tuple[float, float]:
  """Times the handling of a gradient over loopback, with zeros.

  Args:
    config: resolved config of the strategy `parameter_server` with one server.

  Returns:
    Seconds that the cores work, without waiting: those of a worker, less the update of the
    weights that a step of `sync` includes, and those of all servers together. Sending counts
    at both ends.
  """
  setup = setup_lib.create(config, look_ahead.settings(config, 1))
  optimizer = setup.optimizers[0]
  initial, _ = setup.new_state()
  state = optimizer.start(jax.device_get(initial))
  weights = optimizer.weights(state)
  gradients = jax.tree.map(np.zeros_like, jax.device_get(initial.params))
  gradient = setup.layout.params.flatten(gradients, np)
  delta = np.zeros(optimizer.stats_size, setup.layout.stats.dtype)
  contribution = {'weight': 1, 'reads': [0], 'worker': '', 'ticket': (0, 0)}

  def serve():
    optimizer.apply(state, [gradient], [delta], [contribution])

  with contextlib.ExitStack() as stack:
    port = _Port(config, weights)
    stack.callback(port.shutdown)
    client = transport.Client(config, port.endpoint, _SECRET)
    stack.callback(client.close)
    sent = _work(lambda: client.get('weights'))
    sent += _work(lambda: client.put({}, [gradient]))
  joined = _work(lambda: setup.layout.params.flatten(gradients, np))
  updated = _work(_update(config, setup, initial))
  at_worker = sent / 2 + joined - updated
  return max(0.0, at_worker), sent / 2 + _work(serve)


def _update(config, setup, state) -> Callable:
  """The update of the weights within a step of `sync`."""
  size, examples = config.batch_size, len(setup.source)
  chain = optimizer_lib.create(
    config, size, examples, config_lib.steps(config.duration, size, examples)
  )

  @jax.jit
  def update(gradients, opt_state, params):
    updates, opt_state = chain.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  def run():
    # A gradient is as large as the weights, whatever its numbers.
    jax.block_until_ready(update(state.params, state.opt_state, state.params))

  return run


def _work(function: Callable) -> float:
  """Seconds that all threads of this process work, after a first time."""
  function()
  turns = []
  for _ in range(_TURNS):
    start = time.process_time()
    function()
    turns.append(time.process_time() - start)
  return statistics.median(turns)
