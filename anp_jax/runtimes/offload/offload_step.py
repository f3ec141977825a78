"""The step of the training device, whose convolutions are offloaded in part."""

from collections.abc import Sequence
import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections

from anp_jax.parallel import mesh as mesh_lib
from anp_jax.parallel.channel_split import convolutions, split as split_lib
from anp_jax.parallel.sync import sync_step as sync
from anp_jax.runtimes.offload import offload_operation


class OffloadStep(sync.SyncStep):
  """Trains on one device, with offload devices for some of the channels."""

  def __init__(
    self,
    config: ml_collections.ConfigDict,
    specs: Any,
    forward_order: Sequence[str],
    offload_devices: Sequence[Any],
  ):
    """Prepares the strategy.

    Args:
      config: the run's config.
      specs: PartitionSpec of each parameter.
      forward_order: see `SyncStep`.
      offload_devices: `device.LocalDevice` or `replaceable.ReplaceableDevice`,
        in the order of the plan's counts.
    """
    super().__init__(config, specs, forward_order)
    self._plan = split_lib.from_config(config)
    self._devices = tuple(offload_devices)
    self._layers: set[str] = set()  # paths of the convolutions that were traced
    # Convolutions of the trace under way, by the kernel's path.
    self._convolutions: dict[str, list[offload_operation.OffloadedConvolution]] = {}

  def reduce(self, gradients: Any, metrics: Any) -> Any:
    """Sums over data, see `SyncStep`; adds the offload devices' gradients.

    They are awaited here, all at once, since nothing needs them before.
    """
    split_lib.check_layers(self._plan, self._layers)
    leaves, tree = jax.tree_util.tree_flatten_with_path(gradients)
    totals = [gradient for _, gradient in leaves]
    split = {}  # index of a kernel's gradient to its convolutions
    for i, (path, _) in enumerate(leaves):
      traced = self._convolutions.pop(mesh_lib.path_name(path), [])
      trained = [c for c in traced if c.has_backward]
      if trained:
        split[i] = trained
    if split:
      parts = offload_operation.kernel_gradients(list(split.values()), [totals[i] for i in split])
      for i, part in zip(split, parts, strict=True):
        before = totals[i].shape[-1] - part.shape[-1]
        totals[i] += jnp.pad(part, [(0, 0)] * (part.ndim - 1) + [(before, 0)])
    return super().reduce(tree.unflatten(totals), metrics)

  def convolution_context(self) -> contextlib.AbstractContextManager:
    """Returns the context in which an applied model has its convolutions split."""
    return convolutions.computed_by(self._convolve)

  def _convolve(self, layer, convolve, x, kernel):
    self._layers.add(layer)
    features = kernel.shape[-1]
    counts = self._plan.counts(layer, features, 1 + len(self._devices))
    if counts is None or counts[0] == features:
      return convolve(x, kernel)
    convolution = offload_operation.OffloadedConvolution(convolve, x, kernel, counts, self._devices)
    self._convolutions.setdefault(f'{layer}/kernel', []).append(convolution)
    return offload_operation.split(x, kernel, convolution)
