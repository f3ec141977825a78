"""JAX in each process of a run: its devices, joined or on their own."""

from collections.abc import Callable

import ml_collections

from anp_jax import config as config_lib
from anp_jax.cluster import client as client_lib, cluster_env, listener, relay
from anp_jax.system import cores, xla_flags

# JAX's own watch over its processes is the last resort: it ends them without
# naming the one that was lost. Seconds at least, and a multiple of ours.
_MIN_TIMEOUT, _TIMES_OURS = 600, 2
# It counts time in which a process was suspended, as Slurm may do for hours,
# and ours does not. A process that is lost is noticed by ours.
_HEARTBEAT = 7 * 24 * 3600  # seconds


def join(
  env: cluster_env.ClusterEnv,
  client: client_lib.CoordinatorClient,
  settings: ml_collections.ConfigDict,
  heartbeat: Callable[[str], None],
) -> None:
  """Starts JAX with the devices of all processes.

  Args:
    env: place of this process.
    client: connection to process 0.
    settings: config.cluster.
    heartbeat: called with the phase that begins.

  Raises:
    ConfigError: if JAX does not use this host's accelerator, or the processes
      have different numbers of devices.
  """
  heartbeat('loading')
  import jax  # noqa: PLC0415 - heavy: only once all processes are there

  heartbeat('joining')
  if xla_flags.platform() == 'cpu':
    cores.wait_for_turn()  # the threads of XLA and Gloo do so then
  # It would take SIGTERM for itself.
  jax.config.update('jax_enable_preemption_service', False)
  host, _ = cluster_env.split_address(env.coordinator_address)
  bind = listener.bind_addresses(host)[0]  # JAX takes one
  ours = max(settings.rendezvous_timeout, settings.heartbeat_timeout)
  timeout = int(max(_MIN_TIMEOUT, _TIMES_OURS * ours))
  address = host, client.start.port
  if env.index and client.is_elastic:
    address = '127.0.0.1', relay.start(address)
  jax.distributed.initialize(
    cluster_env.joined(*address),
    env.count,
    env.index,
    local_device_ids=client.start.devices,
    coordinator_bind_address=cluster_env.joined(bind, client.start.port) if bind else None,
    initialization_timeout=timeout,
    heartbeat_timeout_seconds=_HEARTBEAT,
    shutdown_timeout_seconds=60,
  )
  listener.release_ports()
  heartbeat('opening')
  check_platform()
  local_count = len(jax.local_devices())
  heartbeat('comparing')
  counts = client.gather(local_count)
  for index, count in enumerate(counts):
    # A run that goes on does so without the one that is unlike the others.
    if count != counts[0] and (not client.generation.number or index == env.index):
      raise config_lib.ConfigError(  # Orbax's and JAX's own barriers need them alike
        f'{client.start.name(index)} has {count} devices, {client.start.name(0)} has '
        f'{counts[0]}: every process needs equally many'
      )


def start_alone(devices: list[int] | None, heartbeat: Callable[[str], None]) -> None:
  """Starts JAX with the GPUs of this process only, as it does when joined.

  Args:
    devices: ordinals of this process's GPUs; None: all local devices.
    heartbeat: called with the phase that begins.

  Raises:
    ConfigError: if JAX does not use this host's accelerator, or others use all GPUs.
  """
  if devices == []:
    raise config_lib.ConfigError('other processes of this host use all GPUs that this one sees')
  heartbeat('loading')
  import jax  # noqa: PLC0415

  if devices is not None:
    jax.config.update('jax_cuda_visible_devices', ','.join(map(str, devices)))
  heartbeat('opening')
  check_platform()


def check_platform() -> None:
  """Refuses an accelerator that JAX dropped.

  JAX only warns of a plug-in that fails, and computes on the CPU.

  Raises:
    ConfigError: if it does.
  """
  expected = xla_flags.platform()
  # What else JAX_PLATFORMS names, it insists on.
  if expected not in ('gpu', 'tpu'):
    return
  import jax  # noqa: PLC0415

  actual = jax.default_backend()
  if actual != expected:
    raise config_lib.ConfigError(
      f'this host has a {expected}, but JAX computes on {actual}: its warning '
      'says why, a driver too old or a missing library, say; '
      f'JAX_PLATFORMS={actual} if that is meant'
    )


def leave() -> None:
  """Disconnects this process from JAX's coordinator."""
  import jax  # noqa: PLC0415

  relay.release()
  jax.distributed.shutdown()
