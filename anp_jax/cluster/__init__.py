"""The processes of a run: start together, agree, watch, stop together.

with cluster.start(config, env, command) as processes:
  train.run(config, workdir, processes=processes)
"""

import contextlib
import os
import socket
import sys
import time
import traceback

from anp_jax import config as config_lib
from anp_jax.cluster import client as link_lib
from anp_jax.cluster import cluster_env
from anp_jax.cluster import coordinator as hub_lib
from anp_jax.cluster import log_prefix
from anp_jax.cluster import preemption
from anp_jax.cluster import process_info
from anp_jax.cluster import watchdog as watch_lib
from anp_jax.system import interrupts
from anp_jax.system import xla_flags

Lost = link_lib.Lost
detect = cluster_env.detect
# JAX's own watch over its processes is the last resort: it ends them without
# saying who was lost. Seconds at least, and times as long as ours.
_JAX_TIMEOUT, _LATER = 600, 2
_SEEN_WITHIN = 15.0  # seconds: NFS clients remember for a while what was there


class Failed(RuntimeError):
  """A run that cannot go on; the message alone says what to do."""


class Processes:
  """The processes of a run, seen from this one.

  Attributes:
    index: of this process.
    count: of processes.
    hosts: the host of each process, by index.
    env: of this process.
  """

  def __init__(
    self, config, env: cluster_env.ClusterEnv = cluster_env.ALONE, link=None
  ):
    """Makes the face; `start` connects.

    Args:
      config: the run's config.
      env: of this process.
      link: to the others; None: there are none.
    """
    self.index, self.count, self.env = env.index, env.count, env
    self.hosts = link.hosts if link else ('',)
    self._link = link
    self._stack = contextlib.ExitStack()
    self._watch = watch_lib.Watchdog(
      config.cluster.stall_timeout,
      self._stalled,
      link.heartbeat if link else lambda state: None,
      hub_lib.PULSE,
      joining_timeout=config.cluster.rendezvous_timeout,
    )
    self._expected_save_seconds = float
    self._stop = preemption.StopHandler(
      config,
      lambda: (
        self._watch.expected_stop_seconds() + self._expected_save_seconds()
      ),
    )

  def __enter__(self):
    self.watch()
    return self

  def __exit__(self, kind, error, trace):
    """On an error, all processes end, those that had none too."""
    if self._link is None:
      self._stack.close()
      return
    if error is None:
      self.heartbeat('leaving', self._watch.state()['step'])
      self._link.close()
      self._stack.close()
      _shut_down_jax()
      return
    self.end(error)

  def watch(self) -> None:
    """Sees from now on that this process gets on; see `watchdog.Watchdog`."""
    self._watch.start()
    self._stack.callback(self._watch.stop)

  def end(self, error: BaseException) -> None:
    """Ends this process and all others with what an error asks for."""
    self._stack.close()
    code, text = exit_status(error)
    if code == hub_lib.FAILED and not isinstance(error, EXPECTED):
      traceback.print_exception(error)
    self._link.fail(code, text)
    link_lib.end_process(code, text)

  def heartbeat(self, phase: str, step: int = 0) -> None:
    """Says that this process begins something; see `watchdog.Watchdog`."""
    self._watch.heartbeat(phase, step)

  def heartbeat_each(self, batches, phase: str, step: int):
    """The batches, each of them a beat: their number has no bound."""
    for batch in batches:
      self._watch.heartbeat(phase, step)
      yield batch

  def gather(self, value) -> list:
    """Every process's JSON value, by index; all must call it alike.

    Not for the loop: a step's own sums carry what is decided there.
    """
    return self._link.gather(value) if self._link else [value]

  @property
  def interrupted(self) -> bool:
    """Whether Ctrl-C stopped the run, which has saved."""
    return self._stop.interrupted

  def vote(self) -> int:
    """What this process asks of all; see `preemption`."""
    return self._stop.vote()

  @contextlib.contextmanager
  def handling_signals(self, expected_save_seconds=float):
    """Within it, a signal is a vote; outside it ends the process.

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
    """Refuses a workdir that not every process sees.

    Raises:
      ConfigError: naming the rank and host that does not see it.
    """
    if self._link is None:
      return
    name = None
    if not self.index:
      os.makedirs(workdir, exist_ok=True)
      name = f'.seen-by-all-{time.time_ns()}'
      with open(os.path.join(workdir, name), 'w') as f:
        f.write(name)
    name = self.gather(name)[0]
    path = os.path.join(workdir, name)
    seen = self.gather(_appears(path))
    if not self.index:
      os.remove(path)
    if not all(seen):
      blind = seen.index(False)
      raise config_lib.ConfigError(
        f'--workdir={workdir}: rank {blind} on {self.hosts[blind]} does not '
        f'see what rank 0 on {self.hosts[0]} wrote there; it must be a folder '
        'that all hosts share'
      )

  def _stalled(self, state):
    text = (
      f'{state["phase"]} {state["step"] or ""}'.strip()
      + f' has lasted {state["seconds"]:.0f} s'
    )
    if self._link is None:
      link_lib.end_process(
        hub_lib.TRY_AGAIN,
        f'{text}, longer than config.cluster.stall_timeout allows: ending',
        stacks=True,
      )
    # All print their stacks when they are told to end, this one too.
    self._link.stalled()
    print(f'{text}: asking where the others are', file=sys.stderr, flush=True)

  def _cannot_stop(self, text):
    state = self._watch.state()
    text = f'{text}, {state["phase"]} {state["step"] or ""}'.strip()
    text += ': leaving without a save; the last checkpoint stands'
    if self._link is not None:
      self._link.fail(hub_lib.TRY_AGAIN, text)
    link_lib.end_process(hub_lib.TRY_AGAIN, text)


# Errors that end a process with one line.
EXPECTED = (config_lib.ConfigError, link_lib.Lost, Failed)


def start(
  config, env: cluster_env.ClusterEnv, command: dict | None = None
) -> Processes:
  """Brings all processes of a run together, and JAX up in each.

  Args:
    config: the run's config.
    env: of this process, from `detect`.
    command: what else all must have been told alike, by name.

  Returns:
    The processes, to be used in a `with` block.

  Raises:
    ConfigError: if the processes do not go together, naming rank and host.
    Lost: if one of them did not come in time.
  """
  # Asynchronous ones meet at their servers, and outlive each other.
  trains = (command or {}).get('--mode') == 'train'
  apart = config.strategy.name == 'server' and trains
  if env.count == 1 or apart:
    if env.count > 1:
      log_prefix.install(f'[{env.index} {socket.gethostname()}] ')
    problem = process_info.startup_problem()
    if problem:
      raise config_lib.ConfigError(problem)
    s = config.strategy
    # One that only serves may do so on the CPU.
    if not (apart and s.dedicated and env.index < s.servers):
      _check_platform()
    return Processes(config, env)
  settings = config.cluster
  card = process_info.collect(env, config, command or {})
  log_prefix.install(f'[{env.index} {card["host"]}] ')
  # One process a host says it.
  if card['platform'] == 'gpu' and not card['gpus'] and env.local_index <= 0:
    print('nvidia-smi lists no GPU here: none can be told to be shared')
  if not env.index:
    _open_hub(env, settings)
  link = link_lib.CoordinatorClient(env, card, settings)
  processes = Processes(config, env, link)
  # The others hear of it at once, and need not miss this one first.
  interrupts.before_leaving(lambda: processes.end(KeyboardInterrupt()))
  try:
    processes.watch()
    # No program spans the processes of a ring, nor those that help another.
    helps = config.strategy.helpers and trains
    if config.strategy.name == 'relay' or helps:
      _keep_own_gpus(link.devices, processes.heartbeat)
    else:
      _start_jax(env, link, settings, processes.heartbeat)
    processes.heartbeat('starting')
  except BaseException as e:  # noqa: BLE001 - the others would wait for it
    processes.end(e)
  return processes


def exit_status(error: BaseException) -> tuple[int, str]:
  """What a process ends with, and the line that says why.

  Returns:
    0 (well), 1 (failed), 2 (bad input), 75 (start it again), 130 (Ctrl-C).
  """
  lines = str(error).strip().splitlines() or ['']
  if isinstance(error, config_lib.ConfigError):
    return hub_lib.BAD_INPUT, lines[0]
  if isinstance(error, link_lib.Lost):
    return hub_lib.TRY_AGAIN, lines[0]
  if isinstance(error, KeyboardInterrupt):
    return 130, 'interrupted'
  if isinstance(error, Failed):
    return 1, lines[0]
  return 1, f'{type(error).__name__}: {lines[0]}'


def _open_hub(env, settings):
  _, port = cluster_env.split_address(env.coordinator_address)
  try:
    hub_lib.Coordinator(
      port,
      env.count,
      env.token,
      rendezvous_timeout=settings.rendezvous_timeout,
      heartbeat_timeout=settings.heartbeat_timeout,
      leave_timeout=max(settings.stall_timeout, settings.stop_timeout)
      or settings.rendezvous_timeout,
    )
  except OSError as e:
    raise config_lib.ConfigError(
      f'coordinator {env.coordinator_address!r}: rank 0 cannot open port '
      f'{port} ({e.strerror}); another run may hold it'
    ) from e


def _start_jax(env, link, settings, beat):
  beat('loading')
  import jax  # noqa: PLC0415 - heavy: only once all processes are there

  beat('joining')
  # It would take SIGTERM for itself.
  jax.config.update('jax_enable_preemption_service', False)
  host, _ = cluster_env.split_address(env.coordinator_address)
  host = f'[{host}]' if ':' in host else host
  ours = max(settings.rendezvous_timeout, settings.heartbeat_timeout)
  timeout = int(max(_JAX_TIMEOUT, _LATER * ours))
  jax.distributed.initialize(
    f'{host}:{link.port}',
    env.count,
    env.index,
    local_device_ids=link.devices,
    initialization_timeout=timeout,
    heartbeat_timeout_seconds=timeout,
    shutdown_timeout_seconds=60,
  )
  beat('opening')
  _check_platform()
  seen = len(jax.local_devices())
  beat('comparing')
  counts = link.gather(seen)
  for index, count in enumerate(counts):
    if count != counts[0]:  # Orbax's and JAX's own barriers need them alike
      raise config_lib.ConfigError(
        f'rank {index} on {link.hosts[index]} has {count} devices, rank 0 on '
        f'{link.hosts[0]} has {counts[0]}: every process needs equally many'
      )


def _keep_own_gpus(devices, beat):
  """What jax.distributed does, for a process that goes without it."""
  beat('loading')
  import jax  # noqa: PLC0415

  if devices is not None:
    own = ','.join(str(d) for d in devices)
    jax.config.update('jax_cuda_visible_devices', own)
  beat('opening')
  _check_platform()


def _check_platform():
  """JAX only warns of a plug-in that fails, and computes on the CPU."""
  here = xla_flags.platform()
  if here not in ('gpu', 'tpu'):  # what else JAX_PLATFORMS names, it insists on
    return
  import jax  # noqa: PLC0415

  found = jax.default_backend()
  if found != here:
    raise config_lib.ConfigError(
      f'this host has a {here}, but JAX computes on {found}: its warning says '
      'why, a driver too old or a missing library, say; '
      f'JAX_PLATFORMS={found} if that is meant'
    )


def _shut_down_jax():
  import jax  # noqa: PLC0415

  jax.distributed.shutdown()


def _appears(path):
  deadline = time.monotonic() + _SEEN_WITHIN
  while time.monotonic() < deadline:
    with contextlib.suppress(OSError):
      # A listing makes an NFS client look again.
      os.listdir(os.path.dirname(path))
    if os.path.exists(path):
      return True
    time.sleep(0.2)
  return False
