"""The processes of a run: they start, agree, are watched and stop together.

with cluster.start(config, env, command) as processes:
  train.run(config, workdir, processes=processes)
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
import contextlib
import functools
import io
import os
import sys
import traceback
from typing import Any, NoReturn

import ml_collections

from anp_jax import config as config_lib
from anp_jax.cluster import (
  activity,
  client as client_lib,
  cluster_env,
  connection,
  coordinator,
  generation as generation_lib,
  jax_processes,
  joining,
  listener,
  preemption,
  process_info,
  proxies,
  secret as secret_lib,
  shared_folder,
  termination,
  watchdog as watchdog_lib,
)
from anp_jax.config import errors, strategy as strategy_lib, urls
from anp_jax.system import descriptors, interrupts

PeerLostError = termination.PeerLostError
RunFailedError = termination.RunFailedError
EXPECTED = termination.EXPECTED
exit_status = termination.exit_status
detect = cluster_env.detect


class Processes:
  """The processes of a run, seen from this one.

  Attributes:
    index: position of this process among the processes that train.
    count: number of processes that train.
    hosts: host of each process, by index; '' where it has not come.
    generation: generation of the run.
    env: place of this process, with the run's secret.
  """

  def __init__(
    self,
    config: ml_collections.ConfigDict,
    env: cluster_env.ClusterEnv = cluster_env.ALONE,
    client: client_lib.CoordinatorClient | None = None,
  ):
    """Creates the processes without connecting them; `start` connects them.

    Args:
      config: the run's config.
      env: place of this process.
      client: connection to the coordinator; None: this process is alone.
    """
    self.index, self.count, self.env = env.index, env.count, env
    self.generation = client.generation if client else generation_lib.FIRST
    self.hosts = client.start.hosts if client else ('',)
    self._client = client
    self._leaves_early = False
    self._stack = contextlib.ExitStack()
    self._activity = activity.Activity()
    self._watchdog = watchdog_lib.Watchdog(
      config.cluster.stall_timeout,
      self._stalled,
      lambda state: client.heartbeat(state | self._activity.sample()) if client else None,
      coordinator.HEARTBEAT_PERIOD,
      joining_timeout=config.cluster.rendezvous_timeout,
    )
    self._expected_save_seconds: Callable[[], float] = float
    stop_seconds = functools.partial(self._expected_stop_seconds, config.data.prefetch)
    tell = client.tell if client and client.is_elastic else None
    self._stop = preemption.StopHandler(config, stop_seconds, tell)
    if client:
      client.attach(self.order)
    if self.generation.stops:
      self.order('stop')

  def __enter__(self):
    self.start_watchdog()
    return self

  def __exit__(self, kind, error, trace):
    """Leaves together with the others; an error of any process ends all."""
    if self._client is None:
      self._stack.close()
      return
    if error is not None:
      self.abort(error)
      return
    self.heartbeat('leaving', self._watchdog.state()['step'])
    if self._leaves_early:
      self._client.leave()
    else:
      self._client.close()
    self._stack.close()
    jax_processes.leave()

  def leave_early(self) -> None:
    """Makes this process, which the run can do without, leave without waiting."""
    self._leaves_early = True

  def is_ended_by(self, index: int) -> bool:
    """Returns whether this process ends if one does not fit: in a run that goes on, it alone."""
    return not self.generation.number or index == self.index

  def name(self, index: int) -> str:
    """Returns the name of a process for people: 'rank 1 on node2'."""
    return self._client.start.name(index) if self._client else 'this process'

  def start_watchdog(self) -> None:
    """Starts to watch whether this process stalls; see `watchdog`."""
    self._watchdog.start()
    self._stack.callback(self._watchdog.stop)

  def abort(self, error: BaseException) -> None:
    """Ends this process and all others with an error's exit status."""
    self._stack.close()
    code, text = exit_status(error)
    # It follows from a loss, and while it is printed, a restart may replace this program.
    is_loss = self.is_elastic and coordinator.BROKEN.search(text)
    if code == termination.FAILED and not isinstance(error, EXPECTED) and not is_loss:
      traceback.print_exception(error)
    if self._client is not None:
      self._client.fail(code, text)
    termination.end_process(code, text)

  def heartbeat(self, phase: str, step: int = 0) -> None:
    """Reports that this process begins a phase; see `watchdog.Watchdog`."""
    self._activity.begin(phase)
    self._watchdog.heartbeat(phase, step)

  def heartbeat_each(self, batches: Iterable, phase: str, step: int) -> Iterator:
    """Yields the batches with a heartbeat each, as there may be any number."""
    for batch in batches:
      self.heartbeat(phase, step)
      yield batch

  def gather(self, value: Any) -> list:
    """Returns every process's JSON value, by index; all must call it alike.

    The loop does not call it: a step's own sums carry what is decided there.
    """
    return self._client.gather(value) if self._client else [value]

  def send(self, index: int, value: Any) -> None:
    """Sends a JSON value to one process; see `receive_mail`."""
    if self._client:
      self._client.send(index, value)

  def receive_mail(self, on_mail: Callable[[int, Any, str], None]) -> None:
    """Calls `on_mail` with each value sent here, see `client.CoordinatorClient`."""
    if self._client:
      self._client.receive_mail(on_mail)

  @property
  def is_elastic(self) -> bool:
    """Whether the run goes on without a process that is lost."""
    return self._client is not None and self._client.is_elastic

  def order(self, order: str) -> None:
    """Makes this process vote as the coordinator orders; see `preemption.StopHandler`."""
    self._stop.order(order)

  def step(self) -> int:
    """Returns the step that this process computes."""
    return self._watchdog.state()['step']

  def set_sizes(self, sizes: Sequence[int]) -> None:
    """Sets the numbers of processes over which the batch of an elastic run divides."""
    if self._client:
      self._client.set_sizes(sizes)

  def follow(self, step: Callable[[], int]) -> None:
    """Sets what returns the last step whose numbers were read, once one has been computed."""
    assert self._client is not None
    self._client.attach(self.order, step)

  def restart(self) -> NoReturn:
    """Restarts in place with all others, who call it after the same step."""
    assert self._client is not None
    self._client.wait_for_restart()

  @property
  def interrupted(self) -> bool:
    """Whether Ctrl-C stopped the run, which has saved."""
    return self._stop.interrupted

  def vote(self) -> int:
    """Returns the vote of this process; see `preemption`."""
    return self._stop.vote()

  @contextlib.contextmanager
  def handling_signals(self, expected_save_seconds: Callable[[], float] = float) -> Iterator[None]:
    """A context in which a signal is a vote; outside, it ends the process.

    Args:
      expected_save_seconds: returns the seconds that a save takes while the
        loop runs.
    """
    self._expected_save_seconds = expected_save_seconds
    self._stop.listen(self._cannot_stop)
    try:
      yield
    finally:
      self._stop.close()

  def check_shared(self, workdir: str) -> None:
    """Refuses a workdir that not every process sees and can write to.

    Raises:
      ConfigError: naming the rank and host that does not, or cannot.
    """
    if self._client is not None:
      shared_folder.check(workdir, self)

  def _expected_stop_seconds(self, ahead):
    return self._watchdog.expected_stop_seconds(ahead) + self._expected_save_seconds()

  def _stalled(self, state):
    text = f'{_phase(state)} has lasted {state["seconds"]:.0f} s'
    if self._client is None:
      termination.end_process(
        termination.TRY_AGAIN,
        f'{text}, longer than config.cluster.stall_timeout allows: ending',
        stacks=True,
      )
    # All print their stacks when process 0 ends them, this one too.
    self._client.stalled()
    print(f'{text}: asking where the others are', file=sys.stderr, flush=True)

  def _cannot_stop(self, text):
    text = (
      f'{text}, {_phase(self._watchdog.state())}: leaving without a save; the '
      'last checkpoint stands'
    )
    if self._client is not None:
      self._client.fail(termination.TRY_AGAIN, text)
    termination.end_process(termination.TRY_AGAIN, text)


def start(
  config: ml_collections.ConfigDict,
  env: cluster_env.ClusterEnv,
  command: dict | None = None,
  workdir: str = '',
) -> Processes:
  """Brings all processes of a run together, and JAX up in each.

  Args:
    config: the run's config.
    env: place of this process, from `detect`.
    command: flags that must be the same in all processes, by name.
    workdir: folder that all processes share, which holds their secret; '':
      only a variable does, see `secret.for_run`.

  Returns:
    The processes, to be used in a `with` block.

  Raises:
    ConfigError: if the processes do not go together, naming rank and host, or
      have no secret.
    PeerLostError: if one of them did not come in time.
  """
  proxies.bypass(env)
  descriptors.raise_limit()
  strategy = strategy_lib.find(config)
  mode = (command or {}).get('--mode', '')
  if env.count == 1:
    problem = process_info.startup_problem()
    if problem:
      raise config_lib.ConfigError(problem)
    jax_processes.check_platform()
    return Processes(config, env)
  env = env._replace(secret=secret_lib.for_run(urls.remote_url(workdir)))
  if not strategy.needs_platform(config, mode, env.index):
    os.environ['JAX_PLATFORMS'] = 'cpu'
  info = process_info.collect(env, config, command or {})
  joins_jax = strategy.joins_jax(config, mode)
  joins = env.launcher == cluster_env.JOIN and not env.coordinator_address
  if joins and joins_jax and not info['elastic']:
    raise config_lib.ConfigError(
      f'--join: a run with config.strategy.name={config.strategy.name} and '
      f'config.cluster.elastic={config.cluster.elastic} does not go on without a process'
    )
  least, words = config.cluster.min_processes, f'at most the number of processes, {env.count}'
  is_met = joins or not info['elastic'] or least <= env.count
  errors.check(is_met, 'cluster.min_processes', least, words)
  generation = generation_lib.current()
  if isinstance(sys.stdout, io.TextIOWrapper):
    sys.stdout.reconfigure(line_buffering=True)
  # One process a host says it.
  if info['platform'] == 'gpu' and not info['gpus'] and env.local_index <= 0:
    print('nvidia-smi lists no GPU here: shared ones cannot be detected')
  client, env = _meet(env, info, config.cluster, generation, workdir)
  proxies.bypass(env)
  processes = Processes(config, env, client)
  # The others hear of it at once, and need not miss this one first.
  interrupts.before_leaving(lambda: processes.abort(KeyboardInterrupt()))
  try:
    processes.start_watchdog()
    if joins_jax:
      jax_processes.join(env, client, config.cluster, processes.heartbeat)
    else:
      jax_processes.start_alone(client.start.devices, processes.heartbeat)
    processes.heartbeat('starting')
  except BaseException as e:  # noqa: BLE001 - the others would wait for it
    processes.abort(e)
  return processes


def _meet(env, info, settings, generation, workdir):
  """Connects to the coordinator, which this process may have to be.

  Returns:
    The client, and the place of this process among those that train.
  """
  listeners, connected, coordinates = [], None, False
  if generation.number:
    env = env._replace(index=generation.rank)
    info |= {'index': env.index, 'address': generation.addresses[env.index]}
    connected = connection.find(generation, env.secret, settings.heartbeat_timeout)
    coordinates = connected is None
  elif env.launcher == cluster_env.JOIN and not env.coordinator_address:
    connected = joining.connect(
      workdir, env.secret, settings.rendezvous_timeout, settings.heartbeat_timeout
    )
  else:
    coordinates = not env.index
    if coordinates and workdir:
      joining.forget_end(workdir)
  if generation.number or connected:
    host, port = connected.getpeername()[:2] if connected else info['address']
    env = env._replace(coordinator_address=cluster_env.joined(host, port), other_ports=())
  if coordinates:
    listeners = coordinator.Coordinator(env, settings, generation).listeners
    host, _ = cluster_env.split_address(env.coordinator_address)
    address = cluster_env.joined(host, listeners[0].getsockname()[1])
    env = env._replace(coordinator_address=address, other_ports=())
  check = functools.partial(joining.read_addresses, workdir, env.coordinator_address)
  connected = connected or connection.connect(env, settings.rendezvous_timeout, check)
  if info['elastic']:
    host, _ = cluster_env.split_address(env.coordinator_address)
    if generation.number and not coordinates:
      listeners = listener.inherited(generation.descriptors)
    elif not coordinates:
      host = connected.getsockname()[0]
      listeners = [listener.listen_at(host)]
    info['address'] = info['address'] or (host, listeners[0].getsockname()[1])
    listener.keep(listeners)
  client = client_lib.CoordinatorClient(connected, info, settings, generation)
  start = client.start
  return client, env._replace(index=start.ranks.index(start.rank), count=len(start.ranks))


def _phase(state):
  """Phase and step for people: 'saving 8'."""
  return f'{state["phase"]} {state["step"] or ""}'.strip()
