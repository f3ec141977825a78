"""The strategy `channel_split`: on a mesh, or with devices outside it."""

from collections.abc import Callable, Sequence
import dataclasses
import re
from typing import TYPE_CHECKING, Any

import ml_collections

from anp_jax import config as config_lib
from anp_jax.config import keys, rules, strategy as strategy_lib
from anp_jax.costs import collectives, mesh_shape, steps
from anp_jax.parallel.sync import sync_strategy as sync
from anp_jax.runtimes import transport_keys
from anp_jax.system import xla_flags

if TYPE_CHECKING:
  import jax

  from anp_jax.runtimes.calibration import replanner
  from anp_jax.training import run_spec

_TRAINING = ('train', *strategy_lib.TRIALS)  # modes
# Devices outside the mesh, of this process or all of the other processes.
_DEVICE = re.compile(r'(cpu|gpu|cuda|rocm|tpu):[0-9]{1,4}|processes')


def _are_devices(names):
  good = all(isinstance(n, str) and _DEVICE.fullmatch(n) for n in names)
  return good and len(set(names)) == len(names)


class ChannelSplit(sync.Sync):
  """Convolutions split by channels over unequal devices.

  The devices are those of the mesh's axis 'model'. With
  config.strategy.offload_to, one device trains and others, which may be of
  other platforms and processes, compute channels for it.
  """

  is_elastic = False
  planned_mesh = {'mesh.data': '1', 'mesh.model': '-1'}

  def default_config(self) -> dict[str, keys.Key]:
    """Returns the keys of the split plan and of the offload devices."""
    return {
      'shares': keys.Key(
        (),
        'proportional share of the channels of each device; (): measured',
        check=rules.check_shares,
        resumable=True,
      ),
      'split_layers': keys.value(
        '.*',
        'regular expression of the convolutions that may be split',
        rules.is_pattern,
        'a regular expression',
        resumable=True,
      ),
      'plan': keys.text(
        '', "plan by hand, such as 'conv1=250,250; conv2=900,600', or nothing", resumable=True
      ),
      'offload_to': keys.value(
        (),
        "devices that compute channels for one that trains: 'cpu:0' of this process, or "
        "'processes': those of all others; (): the mesh's devices train",
        _are_devices,
        "each once, of this process as in ('cpu:0', 'gpu:1'), or 'processes'",
        resumable=True,
      ),
      **transport_keys.KEYS,
    }

  def check(self, config: dict[str, Any]) -> None:
    """Refuses shares with a plan, and parameters that are divided."""
    rules.check_tls(config)
    rules.check(
      not (config['strategy.plan'] and config['strategy.shares']),
      'strategy.shares',
      config['strategy.shares'],
      '() where strategy.plan is given',
    )
    rules.check_replicated(config, 'strategy.name is channel_split')
    rules.check(
      not (config['emulate.enabled'] and config['emulate.sleep']),
      'emulate.enabled',
      True,
      'False for strategy channel_split, which splits '
      'the very convolutions that a sleep would replace',
    )

  def joins_jax(self, config: ml_collections.ConfigDict, mode: str) -> bool:
    """Returns whether the devices are of one mesh: only process 0 trains otherwise."""
    return not (config.strategy.offload_to and mode in _TRAINING)

  def mixes_platforms(self, config: ml_collections.ConfigDict, mode: str) -> bool:
    """Returns True with offload devices, which may be of any platform."""
    return bool(config.strategy.offload_to) and mode in _TRAINING

  def run_ends_if_lost(self, config: ml_collections.ConfigDict, mode: str, index: int) -> bool:
    """Returns False for an offload process, which may be lost.

    In a trial the run ends, or its substitute would be timed.
    """
    return not (index and config.strategy.offload_to and mode == 'train')

  def xla_settings(self, config: ml_collections.ConfigDict) -> dict[str, Any]:
    """Returns spare threads where a program may wait for work of the same CPU pool.

    It also does once another process is lost.
    """
    names = config.strategy.offload_to
    waits = any(n.startswith('cpu:') or n == 'processes' for n in names)
    return {'spare': xla_flags.SPARE_THREADS * waits}

  def check_mesh(self, config: ml_collections.ConfigDict, mesh: 'jax.sharding.Mesh') -> None:
    """Refuses a malformed plan, and shares of another number of devices."""
    from anp_jax.parallel.channel_split import channel_split_step

    channel_split_step.check(config, mesh)

  def planned_parts(
    self, config: ml_collections.ConfigDict, cluster: collectives.Cluster
  ) -> tuple[int, int]:
    """Divides the batch over the mesh's axis 'data' only."""
    return mesh_shape.shape(config, cluster.size)[0], config.accumulate

  def predicted_step(self, setting: steps.Setting, images: int) -> steps.Step:
    """Predicts a step whose convolutions are divided where that is faster."""
    from anp_jax.parallel.channel_split import channel_split_cost

    return channel_split_cost.predicted_step(setting, images)

  def build(
    self,
    config: ml_collections.ConfigDict,
    specs: Any,
    forward_order: Sequence[str] = (),
    offload_devices: Sequence[Any] = (),
  ) -> Any:
    """Returns the step that splits over the mesh, or offloads."""
    if offload_devices:
      from anp_jax.runtimes.offload import offload_step

      return offload_step.OffloadStep(config, specs, forward_order, offload_devices)
    from anp_jax.parallel.channel_split import channel_split_step

    return channel_split_step.ChannelSplitStep(config, specs, forward_order)

  def calibrate(
    self, spec: 'run_spec.RunSpec', invocation: strategy_lib.Invocation, training: bool
  ) -> tuple[ml_collections.ConfigDict, list[str]]:
    """Times devices and links, where the config has neither plan nor shares."""
    from anp_jax.parallel import mesh as mesh_lib

    s = spec.config.strategy
    is_split = s.offload_to or spec.mesh.shape[mesh_lib.MODEL] > 1
    has_plan = s.plan or s.shares
    if not is_split or (has_plan and (training or not s.offload_to)):
      return spec.config, []
    from anp_jax.parallel.channel_split import split
    from anp_jax.runtimes.calibration import calibrate

    if not training:  # without a gradient, each device may score by itself
      changes: dict[str, object] = {'strategy.plan': split.NOTHING, 'strategy.shares': ()}
      return config_lib.replaced(spec.config, changes), []
    chosen, messages = calibrate.choose_plan(spec, invocation.workdir, invocation.processes)
    return config_lib.replaced(spec.config, {'strategy.plan': chosen}), messages

  def replanner(
    self, spec: 'run_spec.RunSpec', invocation: strategy_lib.Invocation
  ) -> 'replanner.Replanner | None':
    """Returns what changes the plan as offload devices are lost; None without them."""
    from anp_jax.runtimes.calibration import replanner

    return replanner.Replanner(spec, invocation) if invocation.pool is not None else None

  def run(
    self, invocation: strategy_lib.Invocation, loop: Callable[[strategy_lib.Invocation], dict]
  ) -> dict:
    """Trains on one device, with others to offload to, where they are named."""
    if not invocation.config.strategy.offload_to or invocation.mode not in _TRAINING:
      return loop(invocation)
    from anp_jax.runtimes.offload import pool as pool_lib

    if invocation.processes.index:
      pool_lib.serve(invocation.config, invocation.processes)
      return {}
    with pool_lib.DevicePool(invocation.config, invocation.processes) as pool:
      return loop(
        dataclasses.replace(
          invocation, processes=pool.processes, devices=pool.mesh_devices, pool=pool
        )
      )
