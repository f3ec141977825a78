"""Layers of a network that may divide the batch."""

from collections.abc import Collection, Sequence
import itertools

import jax
import jax.numpy as jnp

from anp_jax import config as config_lib
from anp_jax.models.layers import example_randomness
from anp_jax.parallel import mesh as mesh_lib
from anp_jax.parallel.channel_split import (
  channel_split_step as step_lib,
  convolutions,
  split as plan_lib,
  split_rows as rows_lib,
)
from anp_jax.training import build, run_spec


class Tracer:
  """Traces training passes of a network with its batch divided."""

  def __init__(
    self, spec: run_spec.RunSpec, network: build.ModelAndSteps, images: jax.ShapeDtypeStruct
  ):
    """Prepares the tracer.

    Args:
      spec: spec of the run.
      network: network with nothing split.
      images: (batch, height, width, 3), normalised images of a micro-batch.
    """
    self._spec, self._network, self._images = spec, network, images

  def find(self, calls: Sequence[convolutions.Call], layers: Collection[str]) -> tuple[str, ...]:
    """Returns the layers before which layers that are computed by batch may end.

    One map alone may lead on there, and nothing before it may need the whole
    batch.

    Args:
      calls: the network's convolutions.
      layers: paths of the convolutions that may be divided.

    Returns:
      Paths, in the order of the calls.
    """
    devices = self._spec.mesh.shape[mesh_lib.MODEL]
    if not rows_lib.divides(devices, self._images.shape[0]):
      return ()
    paths = list(dict.fromkeys(call.layer for call in calls))
    result = []
    by_batch: dict[str, str] = {}
    for path, following in itertools.pairwise(paths):
      if path not in layers:
        break
      by_batch[path] = plan_lib.BATCH
      if self._is_possible(by_batch):
        result.append(following)
    return tuple(result)

  def _is_possible(self, divisions):
    """Returns whether a training pass can be traced with a plan."""
    plan = str(plan_lib.Plan(divisions))
    changes: dict[str, object] = {'strategy.plan': plan, 'strategy.shares': ()}
    single, model = self._network.abstract_replica, self._network.model
    step = step_lib.ChannelSplitStep(
      config_lib.replaced(self._spec.config, changes),
      jax.tree.map(lambda leaf: leaf.sharding.spec, single.params),
    )

    def forward(params, stats, images, rows):
      key = jax.random.key(0)
      with step.convolution_context():
        outputs, _ = model.apply(
          {'params': params, example_randomness.EXAMPLE: {'row': rows}, **stats},
          images,
          True,
          mutable=list(stats),
          rngs={'dropout': key, example_randomness.EXAMPLE: key},
        )
      return step.of_whole_batch(outputs, len(images))

    mapped = jax.shard_map(
      forward, mesh=self._spec.mesh, in_specs=mesh_lib.P(), out_specs=mesh_lib.P(), check_vma=False
    )
    # Shapes without a mesh: the network's arrays are on one device.
    params, stats = jax.tree.map(
      lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (single.params, single.stats)
    )
    rows = jax.ShapeDtypeStruct(self._images.shape[:1], jnp.int32)
    try:
      jax.eval_shape(mapped, params, stats, self._images, rows)
    except config_lib.ConfigError:
      return False
    return True
