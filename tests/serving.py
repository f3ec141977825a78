"""Asynchronous runs in one process, a thread for each process of the run."""

import json
import queue
import threading
import time

import jax
import numpy as np

from anp_jax import cluster, config as config_lib
from anp_jax.cluster import cluster_env
from anp_jax.parallel import mesh as mesh_lib
from anp_jax.reporting import telemetry
from anp_jax.runtimes.parameter_server import (
  log as log_lib,
  look_ahead,
  parameter_server_run as server_run,
  participant as participant_lib,
  setup as setup_lib,
  slice_optimizer,
)
from anp_jax.tools.trials import replay
from tests import builders

TINY = {
  'strategy.name': 'parameter_server',
  'strategy.in_flight': 2,
  'log.every': '1 steps',
  'log.tensorboard': False,
}

# Tiny, with all that a state can hold: momentum, statistics, averages.
FULL = {
  'data.image_size': 8,
  'model.name': 'tests.user_network:SmallNet',
  'model.norm_group': 4,
  'ema': 0.9,
  'optimizer.clip_norm': 1.0,
  'data.mixup': 0.2,
}


def small_setup(config, ahead=None, servers=1, **keys):
  """Returns the setup of a tiny network with batch norm."""
  small = {
    'strategy.servers': servers,
    'model.name': 'tests.user_network:SmallNet',
    'model.norm_momentum': 0.5,
    'data.image_size': 8,
  }
  return setup_lib.create(config_of(config, **{**small, **keys}), ahead or look_ahead.Settings())


def random_state(setup):
  """Returns a state as after some steps: each weight and momentum is another."""
  rng = np.random.default_rng(1)

  def leaf(shape):
    if not shape.ndim:
      return np.zeros((), shape.dtype)
    return np.abs(rng.normal(size=shape.shape)).astype(shape.dtype)

  return jax.tree.map(leaf, setup.program.abstract_state)


def flat(setup, params):
  """Returns a tree like the parameters as one vector, float64."""
  return setup.layout.params.flatten(params, np).astype(float)


class Servers:
  """The slices of all servers, driven by hand."""

  def __init__(self, setup, state=None):
    """Starts from a state, by default a random one."""
    state = state or random_state(setup)
    self._setup = setup
    self._slices = [optimizer.start(state) for optimizer in setup.optimizers]

  def apply(self, gradients, deltas=None, worker='a', weights=(1.0,)):
    """Makes one update of data shards: gradients, and changes of the statistics."""
    if deltas is None:
      deltas = np.zeros((len(gradients), self._setup.layout.stats.size), np.float32)
    contributions = [{'weight': weight, 'worker': str(worker)} for weight in weights]
    results = [
      optimizer.apply(
        state,
        [g[optimizer.slice] for g in gradients],
        [d[: optimizer.stats_size] for d in deltas],
        contributions,
      )
      for optimizer, state in zip(self._setup.optimizers, self._slices, strict=True)
    ]
    assert all(finite for _, finite in results)
    self._slices = [state for state, _ in results]

  def read(self):
    """Returns the weights that workers read."""
    pairs = zip(self._setup.optimizers, self._slices, strict=True)
    return np.concatenate([block for o, s in pairs for block in o.weights(s)])

  def state(self):
    """Returns the whole TrainState."""
    return slice_optimizer.join(self._setup.layout, self._setup.optimizers, self._slices)


def submit(store, order, worker='a'):
  """Submits an update of a worker's gradient, of the weights of now."""
  part = {'ticket': (order, 0), 'worker': worker, 'reads': [order], 'weight': 1.0}
  store.submit(order, [part])


def config_of(config, **keys):
  """Returns a copy of a config with these keys."""
  changes = {**TINY, **keys}
  if changes['strategy.name'] != 'parameter_server':
    del changes['strategy.in_flight']
  return builders.editable(config_lib.replaced(config, changes))


def on_devices(monkeypatch, count):
  """Lets each process of a run see this many devices."""
  devices = jax.devices()[:count]
  monkeypatch.setattr(jax, 'local_devices', lambda **_: devices)
  monkeypatch.setattr(jax, 'local_device_count', lambda: count)


class ThreadProcess(cluster.Processes):
  """A process of a run that is a thread, with the mail of all."""

  def __init__(self, config, env, boxes):
    super().__init__(config, env)
    self._boxes, self.hosts = boxes, ('host',) * env.count

  def send(self, index, value):
    self._boxes[index].put((self.index, json.loads(json.dumps(value)), ''))

  def receive_mail(self, on_mail):
    def deliver():
      while (mail := self._boxes[self.index].get()) is not None:
        on_mail(*mail)

    threading.Thread(target=deliver, daemon=True).start()

  def __exit__(self, *error):
    self._boxes[self.index].put(None)
    super().__exit__(*error)


def run(config, workdir, count=1):
  """Trains in `count` processes; returns the scores of process 0.

  Args:
    config: config of all processes.
    workdir: folder of the run.
    count: number of processes.

  Raises:
    Whatever a process raises.
  """
  errors, boxes = [], [queue.SimpleQueue() for _ in range(count)]

  def run_process(index):
    with ThreadProcess(config, place(index, count), boxes) as processes:
      return server_run.run(config, str(workdir), processes)

  def run_thread(index):
    try:
      run_process(index)
    except BaseException as e:  # noqa: BLE001 - raised below
      errors.append(e)

  threads = [threading.Thread(target=run_thread, args=(i,), daemon=True) for i in range(1, count)]
  for thread in threads:
    thread.start()
  scores = run_process(0)
  end = time.monotonic() + 20
  for thread in threads:
    thread.join(max(end - time.monotonic(), 0))
    assert not thread.is_alive(), 'a process did not come to its end'
  if errors:
    raise errors[0]
  return scores


def place(index, count):
  """Returns the environment of a process."""
  return cluster_env.ClusterEnv('test', index, count, num_hosts=1, secret='5a' * 32)


def participant(config, folder):
  """Returns the only process of a run."""
  return participant_lib.Participant(config, str(folder), place(0, 1))


def losses(workdir):
  """Returns {(kind, step): loss} of metrics.jsonl."""
  lines = telemetry.read(str(workdir))
  return {(r['kind'], r['step']): r['loss'] for r in lines}


def same_bits(a, b) -> None:
  """Asserts that leaves by name are equal, bit for bit."""
  assert a.keys() == b.keys()
  for name, leaf in a.items():
    assert np.shape(leaf) == np.shape(b[name]), name
    assert np.asarray(leaf).tobytes() == np.asarray(b[name]).tobytes(), name


def replayed(config, workdir, version):
  """Returns the leaves that the log alone gives, named as in a checkpoint."""
  state = replay.replay(config, log_lib.read(str(workdir)), version)
  return mesh_lib.leaves_by_name({str(version): jax.tree.map(np.asarray, state)})
