"""The speed that a planned run keeps when nodes fail, and how often it should copy its state."""

import argparse
from collections.abc import Sequence
import dataclasses
import functools

from anp_jax import config as config_lib
from anp_jax.checkpoint import host_mirror
from anp_jax.config import strategy as strategy_lib
from anp_jax.costs import goodput, hardware, steps
from anp_jax.tools.plan import points as points_lib

# Bytes per second at which a save holds the steps up: 205 MB in 90 to 95 ms, 307 MB in 128
# to 134 ms (docs/results.md).
_SAVE_RATE = 2.25e9


def added(
  points: Sequence[points_lib.Point],
  settings: Sequence[steps.Setting],
  request: points_lib.Request,
  flags: argparse.Namespace,
  host: hardware.Device,
) -> list[points_lib.Point]:
  """Returns the points, with a goodput where a size can run.

  Args:
    points: predictions of one strategy without failures.
    settings: config and cluster of each.
    request: what the hosts decode.
    flags: mtbf and repair in hours, restart_seconds and elastic_seconds.
    host: a core of the hosts, whose memory holds the mirrors.
  """
  return [
    dataclasses.replace(p, goodput=_goodput(p, s, request, flags, host)) if p.runs else p
    for p, s in zip(points, settings)
  ]


def _goodput(point, setting, request, flags, host) -> goodput.Goodput:
  config, nodes = setting.config, setting.cluster.nodes
  silence = config.cluster.heartbeat_timeout
  faults = goodput.Faults(
    mtbf=3600 * flags.mtbf,
    repair=3600 * flags.repair,
    requeue=silence + flags.restart_seconds,
    in_place=silence + flags.elastic_seconds,
    join=flags.elastic_seconds,
  )
  losses = faults.mtbf / nodes
  state, step = _host_bytes(point, setting), sum(point.seconds.values())
  every = config_lib.steps(config.checkpoint.every, point.batch, setting.workload.examples)
  save = _best(state / _SAVE_RATE, losses, step)
  saves = goodput.Copies(save.cost, min(every * step, point.run_seconds))
  result = goodput.Goodput(
    loss_period=losses,
    save_period=saves.period,
    save=save,
    requeued=goodput.requeued(faults, nodes, saves),
    requeued_daly=goodput.requeued(faults, nodes, save),
  )
  if not strategy_lib.find(config).is_elastic:
    return result
  # A core reads the state and writes it, and that of a neighbour whose loss would lose it.
  copied = (2 if setting.is_sharded else 1) * state
  mirror = _best(2 * copied / (1e9 * host.gigabytes_per_second), losses, step)
  period = config.cluster.mirror_every * step or max(step, mirror.cost / host_mirror.SHARE)
  mirrors = goodput.Copies(mirror.cost, period)
  used, speeds = _with_fewer_nodes(point, setting, request)
  in_place = functools.partial(goodput.elastic, faults, used, speeds)
  return dataclasses.replace(
    result,
    mirror=mirror,
    nodes_after_loss=used[-2],
    elastic=in_place(mirrors, saves, point.run_seconds),
    # In place, hardly a loss returns to a checkpoint: the config's are kept.
    elastic_daly=in_place(mirror, saves, point.run_seconds),
  )


def _best(cost, losses, step) -> goodput.Copies:
  """Copies of the best period, at least a step."""
  return goodput.Copies(cost, max(step, goodput.daly(cost, losses)))


def _host_bytes(point, setting) -> float:
  """Bytes of the different parts of the state that a node's devices hold."""
  nodes, devices = setting.cluster.nodes, setting.cluster.devices
  groups = strategy_lib.find(setting.config).groups(setting.config, setting.cluster.size)
  parts = devices if setting.is_sharded else max(1, min(devices, groups // nodes))
  return parts * point.memory.state


def _with_fewer_nodes(point, setting, request) -> tuple[list[int], list[float]]:
  """Nodes that compute, and their share of the speed, where 0, 1, ... nodes live.

  The batch stays, and must divide over the nodes that compute.
  """
  parts, _ = strategy_lib.find(setting.config).planned_parts(setting.config, setting.cluster)
  config = config_lib.replaced(setting.config, {'batch_size': parts * point.images})
  settings = [
    dataclasses.replace(
      setting, config=config, cluster=dataclasses.replace(setting.cluster, nodes=nodes)
    )
    for nodes in range(1, setting.cluster.nodes)
  ]
  request = dataclasses.replace(request, scaling='strong', per_device=0)
  used, speeds = [0], [0.0]
  for fewer in [*points_lib.plan(point.strategy, settings, request), point]:
    used.append(fewer.cluster.nodes if fewer.runs else used[-1])
    speeds.append(fewer.rate / point.rate if fewer.runs else speeds[-1])
  return used, speeds
