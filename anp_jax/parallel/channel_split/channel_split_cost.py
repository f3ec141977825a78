"""Seconds of a step of `channel_split`."""

import dataclasses

from anp_jax.costs import collectives, device_step, mesh_shape, steps


def predicted_step(setting: steps.Setting, images: int) -> steps.Step:
  """Convolutions divided by channels, each where that is faster."""
  config, cluster = setting.config, setting.cluster
  data, count = mesh_shape.shape(config, cluster.size)
  if count == 1:  # the batch is divided, and nothing else
    return steps.synchronous(setting, images)
  split = _part(setting.reached, count)
  alone = setting.alone(images)
  flops = sum(x.flops for x in setting.workload.layers) or 1.0
  number = device_step.width(setting.workload.dtype)
  compute = communication = 0.0
  # Over 'data': of split kernels, a device's own part.
  summed = 4.0 * setting.workload.statistics
  wire = device_step.width(config.strategy.reduce_dtype)
  is_split = {}
  for i, layer in enumerate(setting.workload.layers):
    unsplit = alone.images * layer.flops / flops
    # The map is gathered, and the gradient of the operand summed: a device gets
    # all of it, or its own channels. The images need no gradient.
    sent = collectives.gather(split, layer.gathered * images * number)
    if i:
      total = collectives.gather if is_split.get(layer.reads) else collectives.all_reduce
      sent += total(split, layer.inputs * images * number)
    is_split[layer.path] = layer.is_convolution and unsplit / count + sent < unsplit
    if is_split[layer.path]:
      compute += unsplit / count
      communication += sent
      summed += layer.parameters * wire / count
    else:
      compute += unsplit
      summed += layer.parameters * wire
  total = compute + alone.fixed
  communication += setting.lateness(total, cluster.size)
  communication += collectives.all_reduce(_peers(setting.reached, data, count), summed)
  return steps.Step(images * data, compute, alone.fixed, communication)


def _part(cluster, count) -> collectives.Cluster:
  """The first `count` devices of a cluster, whole nodes if there are more."""
  devices = min(count, cluster.devices)
  return dataclasses.replace(cluster, nodes=max(1, count // devices), devices=devices)


def _peers(cluster, data, count) -> collectives.Cluster:
  """The devices that hold one part of `count`, one in each group of them.

  The parts of a node's devices travel at the same time and share its ports.
  """
  devices = min(data, max(1, cluster.devices // count))
  together = min(count, cluster.devices)
  link = dataclasses.replace(cluster.link, bandwidth=cluster.link.bandwidth / together)
  return dataclasses.replace(cluster, nodes=max(1, data // devices), devices=devices, link=link)
