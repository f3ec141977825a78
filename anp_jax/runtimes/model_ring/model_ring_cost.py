"""Seconds of a step of `model_ring`."""

import dataclasses

from anp_jax.costs import collectives, steps


def predicted_step(setting: steps.Setting, images: int) -> steps.Step:
  """Predicts a step of all stations, each with its part of the data."""
  s, cluster = setting.config.strategy, setting.cluster
  per_device = s.station == 'device'
  stations = cluster.size if per_device else cluster.nodes
  models = len(s.models)
  active = min(models, stations)
  node = dataclasses.replace(cluster, nodes=1, devices=1 if per_device else cluster.devices)
  inner = steps.synchronous(setting, images, cluster=node)
  lap_steps = max(1.0, setting.workload.examples / stations / inner.images)
  effective = setting.effective
  link = effective.link if cluster.nodes > 1 else effective.node_link
  sent = 0.0
  if stations > 1:
    sent = collectives.send(link, setting.workload.state_bytes) / lap_steps
  late = setting.straggler_delay(inner.seconds, active)
  epochs = max(1, round(setting.workload.total_images / setting.workload.examples))
  return steps.Step(
    images=inner.images * active,
    compute=inner.compute,
    fixed=inner.fixed,
    communication=inner.communication + sent + late,
    run_factor=models * slots(models, stations, epochs) / (max(models, stations) * epochs),
  )


def slots(models: int, stations: int, laps: int) -> int:
  """Returns the slots of a ring without delays (Chen et al. 2015).

  At slot t station j trains model (t - j) mod max(models, stations), if there is one.
  """
  return max(models, stations) * laps + min(models, stations) - 1
