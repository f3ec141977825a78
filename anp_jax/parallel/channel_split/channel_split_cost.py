"""Seconds of a step of `channel_split`."""

import dataclasses

from anp_jax.costs import collectives, device_step, mesh_shape, steps


def predicted_step(setting: steps.Setting, images: int) -> steps.Step:
  """A step whose convolutions are divided by channels where that is faster."""
  config, cluster = setting.config, setting.cluster
  data, count = mesh_shape.shape(config, cluster.size)
  if count == 1:  # only the batch is divided
    return steps.synchronous(setting, images)
  split = _part(setting.effective, count)
  alone = setting.alone(images)
  flops = sum(x.flops for x in setting.workload.layers) or 1.0
  number = device_step.width(setting.workload.dtype)
  compute = communication = 0.0
  # Bytes summed over 'data': a device's part of split kernels.
  summed = 4.0 * setting.workload.statistics
  wire = device_step.width(config.strategy.reduce_dtype)
  is_split: dict[str, bool] = {}
  for i, layer in enumerate(setting.workload.layers):
    unsplit = alone.images * layer.flops / flops
    # The map is gathered, and the gradient of the operand summed: for all channels,
    # or only the device's. The images need no gradient.
    sent = collectives.gather(split, layer.gathered * images * number)
    if i:
      collective = collectives.gather if is_split.get(layer.reads) else collectives.all_reduce
      sent += collective(split, layer.inputs * images * number)
    is_split[layer.path] = layer.is_convolution and unsplit / count + sent < unsplit
    if is_split[layer.path]:
      compute += unsplit / count
      communication += sent
      summed += layer.parameters * wire / count
    else:
      compute += unsplit
      summed += layer.parameters * wire
  total = compute + alone.fixed
  communication += setting.straggler_delay(total, cluster.size)
  communication += collectives.all_reduce(_peers(setting.effective, data, count), summed)
  return steps.Step(images * data, compute, alone.fixed, communication)


def _part(cluster: collectives.Cluster, count: int) -> collectives.Cluster:
  """The first `count` devices of a cluster: a part of a node, or whole nodes."""
  devices = min(count, cluster.devices)
  return dataclasses.replace(cluster, nodes=max(1, count // devices), devices=devices)


def _peers(cluster: collectives.Cluster, data: int, count: int) -> collectives.Cluster:
  """The `data` devices that hold the same part of the split kernels.

  The parts of a node's devices are sent at the same time and share its ports.
  """
  devices = min(data, max(1, cluster.devices // count))
  together = min(count, cluster.devices)
  link = dataclasses.replace(cluster.link, bandwidth=cluster.link.bandwidth / together)
  return dataclasses.replace(cluster, nodes=max(1, data // devices), devices=devices, link=link)
