"""The strategy `channel_split`: on a mesh, or with devices outside it."""

import dataclasses
import re

from anp_jax import config as config_lib
from anp_jax.config import keys, rules, strategy as strategy_lib
from anp_jax.costs import mesh_shape
from anp_jax.parallel.sync import sync_strategy as sync
from anp_jax.runtimes import transport_keys
from anp_jax.system import xla_flags

_TRAINING = ('train', *strategy_lib.TRIALS)  # modes
# Devices outside the mesh, of this process or all of the other processes.
_DEVICE = re.compile(r'(cpu|gpu|cuda|rocm|tpu):[0-9]{1,4}|processes')


def _are_devices(names):
  good = all(isinstance(n, str) and _DEVICE.fullmatch(n) for n in names)
  return good and len(set(names)) == len(names)


def _is_pattern(pattern):
  try:
    re.compile(pattern)
  except re.error:
    return False
  return True


class ChannelSplit(sync.Sync):
  """Convolutions split by channels over unequal devices.

  The devices are those of the mesh's axis 'model', or, with
  config.strategy.offload_to, one device trains and others, which may be of
  other platforms and processes, compute channels for it.
  """

  name = 'channel_split'
  planned_mesh = {'mesh.data': '1', 'mesh.model': '-1'}

  def default_config(self):
    """Which convolutions are split, how, and over which devices."""
    return {
      'shares': keys.Key(
        (),
        'of the channels, for each device, in proportion; (): measured',
        check=rules.check_shares,
        resumable=True,
      ),
      'split_layers': keys.value(
        '.*',
        'regular expression: convolutions that may be split',
        _is_pattern,
        'a regular expression',
        resumable=True,
      ),
      'batch_layers': keys.flag(
        True,
        'whether a measured plan may divide the batch, in the first layers or in all',
        resumable=True,
      ),
      'plan': keys.text(
        '', "split plan by hand, as 'conv1=batch; conv2=900,600', nothing or apart", resumable=True
      ),
      'offload_to': keys.value(
        (),
        "devices that compute channels for one that trains: 'cpu:0' of "
        "this process; 'processes': all others'. (): the mesh's devices train",
        _are_devices,
        "each once, of this process as in ('cpu:0', 'gpu:1'), or 'processes'",
        resumable=True,
      ),
      'check_plan': keys.number(
        60.0,
        'seconds between two looks whether the devices of a measured '
        'plan are as fast as they were, in proportion; 0: never',
        at_least=0,
        resumable=True,
      ),
      **transport_keys.KEYS,
    }

  def check(self, config):
    """Refuses both shares and a plan, and parameters that are divided."""
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

  def joins_jax(self, config, mode):
    """Whether the devices are of one mesh: only process 0 trains otherwise."""
    return not (config.strategy.offload_to and mode in _TRAINING)

  def mixes_platforms(self, config, mode):
    """A device that only computes channels may be of any platform."""
    return bool(config.strategy.offload_to) and mode in _TRAINING

  def is_essential(self, config, mode, index):
    """A process whose devices only compute channels may be lost, and come.

    Not while times are taken: they would be of what computes in its place.
    """
    return not (index and config.strategy.offload_to and mode == 'train')

  def xla_settings(self, config):
    """Spare threads: a program waits for what the same CPU pool computes.

    So it may once another process is lost, too.
    """
    names = config.strategy.offload_to
    waits = any(n.startswith('cpu:') or n == 'processes' for n in names)
    return {'spare': xla_flags.SPARE_THREADS * waits}

  def check_mesh(self, config, mesh):
    """Refuses a plan that is none, and shares of other devices."""
    from anp_jax.parallel.channel_split import channel_split_step

    channel_split_step.check(config, mesh)

  def planned_parts(self, config, cluster):
    """Divides the batch over the mesh's axis 'data' only."""
    return mesh_shape.shape(config, cluster.size)[0], config.accumulate

  def predicted_step(self, setting, images):
    """Predicts a step whose convolutions are divided where that is faster."""
    from anp_jax.parallel.channel_split import channel_split_cost

    return channel_split_cost.predicted_step(setting, images)

  def build(self, config, specs, forward_order=(), offload_devices=()):
    """Splits over the mesh, or offloads."""
    if offload_devices:
      from anp_jax.runtimes.offload import offload_step

      return offload_step.OffloadStep(config, specs, forward_order, offload_devices)
    from anp_jax.parallel.channel_split import channel_split_step

    return channel_split_step.ChannelSplitStep(config, specs, forward_order)

  def calibrate(self, spec, job, training):
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
      changes = {'strategy.plan': split.NOTHING, 'strategy.shares': ()}
      return config_lib.replaced(spec.config, changes), []
    chosen, messages = calibrate.choose_plan(spec, job.workdir, job.processes)
    return config_lib.replaced(spec.config, {'strategy.plan': chosen}), messages

  def replanner(self, spec, job):
    """Plans again where devices change, unless there is one device alone."""
    from anp_jax.parallel import mesh as mesh_lib
    from anp_jax.runtimes.calibration import replanner

    if job.pool is None and spec.mesh.shape[mesh_lib.MODEL] == 1:
      return None
    by_hand = job.config.strategy.plan or job.config.strategy.shares
    return replanner.Replanner(spec, job, is_measured=not by_hand)

  def run(self, job, loop):
    """Trains on one device, with others to offload to, where they are named."""
    if not job.config.strategy.offload_to or job.mode not in _TRAINING:
      return loop(job)
    from anp_jax.runtimes.offload import pool as pool_lib

    if job.processes.index:
      pool_lib.serve(job.config, job.processes)
      return {}
    with pool_lib.DevicePool(job.config, job.processes) as pool:
      return loop(
        dataclasses.replace(job, processes=pool.processes, devices=pool.mesh_devices, pool=pool)
      )
