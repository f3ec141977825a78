"""Seconds of a step of `invariant`."""

import dataclasses

from anp_jax.costs import collectives, device_step, steps


def predicted_step(setting: steps.Setting, images: int) -> steps.Step:
  """A step of logical shards one after another; sums follow the backward pass."""
  shards, size = setting.config.strategy.logical_shards, setting.cluster.size
  result = steps.synchronous(setting, images, overlap=0.0)
  per_device = max(1, shards // size)
  starts = setting.workload.kernels * setting.efficiency.kernel_seconds
  # A device sends so many partial sums; the first is in `result`.
  partial = per_device // (per_device & -per_device) if size > 1 else 1
  effective = device_step.scaled(setting.cluster, setting.efficiency)
  sent = setting.workload.param_bytes + 4 * setting.workload.statistics
  scattered = collectives.gather(effective, sent)
  return dataclasses.replace(
    result,
    fixed=result.fixed + (per_device - 1) * starts,
    communication=result.communication + (partial - 1) * scattered,
  )
