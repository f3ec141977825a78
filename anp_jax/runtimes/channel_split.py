"""The strategy `kernel_split`: on a mesh, or with devices outside it."""

import dataclasses
import re

from anp_jax.config import rules
from anp_jax.parallel.sync import strategy as sync

# Devices outside the mesh, of this process or all of the other processes.
_DEVICE = re.compile(r'(cpu|gpu|cuda|rocm|tpu):[0-9]{1,4}|processes')


class ChannelSplit(sync.Sync):
  """Convolutions split by channels over unequal devices.

  The devices are those of the mesh's axis 'model', or, with
  config.strategy.helpers, one device trains and others, which may be of other
  platforms and processes, compute channels for it.
  """

  name = 'kernel_split'
  resumable = ('shares', 'split_layers', 'plan', 'helpers')

  def check(self, config):
    """Refuses devices, shares and patterns that mean nothing."""
    devices = config['strategy.helpers']
    good = all(isinstance(d, str) and _DEVICE.fullmatch(d) for d in devices)
    rules.check(
      good and len(set(devices)) == len(devices), 'strategy.helpers', devices,
      "each once, of this process as in ('cpu:0', 'gpu:1'), or 'processes'",
    )  # fmt: skip
    pattern = config['strategy.split_layers']
    try:
      re.compile(pattern)
    except re.error:
      rules.check(False, 'strategy.split_layers', pattern,
                  'a regular expression')  # fmt: skip
    rules.check_shares(config)
    rules.check(
      not (config['strategy.plan'] and config['strategy.shares']),
      'strategy.shares', config['strategy.shares'],
      '() where strategy.plan is given',
    )  # fmt: skip
    rules.check_replicated(config, 'strategy.name is kernel_split')

  def joins_jax(self, config, mode):
    """Whether the devices are of one mesh: only process 0 trains otherwise."""
    return not (config.strategy.helpers and mode == 'train')

  def mixes_platforms(self, config, mode):
    """A device that only computes channels may be of any platform."""
    return bool(config.strategy.helpers) and mode == 'train'

  def xla_settings(self, config):
    """Spare threads: a program waits for what the same CPU pool computes."""
    waits = any(d.startswith('cpu:') for d in config.strategy.helpers)
    return {'waiting': waits}

  def check_mesh(self, config, mesh):
    """Refuses a plan that is none, and shares of other devices."""
    from anp_jax.parallel.channel_split import step

    step.check(config, mesh)

  def build(self, config, specs, order=(), offload_devices=()):
    """Splits over the mesh, or offloads."""
    if offload_devices:
      from anp_jax.runtimes.offload import step as offload_step

      return offload_step.OffloadStep(config, specs, order, offload_devices)
    from anp_jax.parallel.channel_split import step

    return step.ChannelSplitStep(config, specs, order)

  def calibrate(self, spec, job, training):
    """Times devices and links, where the config has neither plan nor shares."""
    from anp_jax.parallel import mesh as mesh_lib

    s = spec.config.strategy
    is_split = s.helpers or spec.mesh.shape[mesh_lib.MODEL] > 1
    has_plan = s.plan or s.shares
    if not is_split or (has_plan and (training or not s.helpers)):
      return spec.config, []
    from anp_jax.parallel.channel_split import plan
    from anp_jax.runtimes.calibration import calibrate

    config = spec.config.copy_and_resolve_references()
    if not training:  # without a gradient, each device may score by itself
      config.strategy.plan, config.strategy.shares = plan.NOTHING, ()
      return config, []
    config.strategy.plan, messages = calibrate.choose_plan(
      spec, job.workdir, job.processes
    )
    return config, messages

  def run(self, job, loop):
    """Trains on one device, with others to offload to, where they are named."""
    if not job.config.strategy.helpers or job.mode != 'train':
      return loop(job)
    from anp_jax.runtimes.offload import pool as pool_lib

    if job.processes.index:
      pool_lib.serve(job.config, job.processes)
      return {}
    with pool_lib.DevicePool(job.config, job.processes) as pool:
      return loop(
        dataclasses.replace(
          job,
          processes=pool.processes,
          devices=pool.mesh_devices,
          offload_devices=tuple(pool.offload_devices),
        )
      )
