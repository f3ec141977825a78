"""A trained network, compiled to name batches of images on this machine."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from anp_jax import config as config_lib, models
from anp_jax.checkpoint import trained as trained_lib
from anp_jax.system import onednn
from anp_jax.training import mixing

_P = jax.sharding.PartitionSpec
_AXIS = 'data'
# Images a device, by default: XLA's convolutions on a CPU are quickest
# with few, an accelerator's with many.
_BATCH = {'cpu': 8}
_BATCH_ELSEWHERE = 64


class Words(NamedTuple):
  """Adjectives, or nouns, of a batch.

  Attributes:
    best: (batch, n) int32, the likeliest ones, the best first; n is `top`, or
      as many as there are.
    probabilities: (batch, n), those of `best`.
    of_classes: (batch, top), natural logarithm of the probability of the word
      that each named class has.
  """

  best: np.ndarray
  probabilities: np.ndarray
  of_classes: np.ndarray


class Names(NamedTuple):
  """What a batch shows.

  Attributes:
    classes: (batch, top) int32, the best first; the lower of equals first.
    probabilities: (batch, top), those of `classes`.
    words: Words of 'adjective' and 'noun'; {} for plain classes.
  """

  classes: np.ndarray
  probabilities: np.ndarray
  words: dict[str, Words]


class Network:
  """Names batches of one size, over all devices.

  Attributes:
    batch_size: images per batch.
    devices: devices that share a batch.
  """

  def __init__(
    self,
    trained: trained_lib.Trained,
    top: int,
    batch_size: int = 0,
    devices: Sequence[jax.Device] | None = None,
  ):
    """Places the weights; the first batch compiles.

    Args:
      trained: trained network.
      top: classes to name, at least 1 and at most all.
      batch_size: images over all devices, rounded up to a multiple of their
        number; 0: what suits them.
      devices: devices to compute on; None: those of this process.
    """
    self.devices = jax.local_devices() if devices is None else devices
    platform = self.devices[0].platform
    target = platform
    # Without a library, a network that was trained with one needs none.
    if platform == 'cpu' and onednn.find():
      target = models.target(trained.config, platform, len(self.devices))
    each = _BATCH.get(platform, _BATCH_ELSEWHERE)
    if batch_size:
      each = -(-batch_size // len(self.devices))
    self.batch_size = each * len(self.devices)
    self._folder = trained.folder
    mesh = jax.sharding.Mesh(np.array(self.devices), (_AXIS,))
    self._rows = jax.sharding.NamedSharding(mesh, _P(_AXIS))
    self._weights = jax.device_put(
      {'params': trained.params, **trained.stats}, jax.sharding.NamedSharding(mesh, _P())
    )
    self._program = jax.jit(
      jax.shard_map(
        _program(trained, top, target),
        mesh=mesh,
        in_specs=(_P(), _P(_AXIS)),
        out_specs=_P(_AXIS),
        check_vma=False,
      )
    )

  def start(self, images: np.ndarray) -> Names:
    """Starts naming images (batch_size, side, side, 3) uint8; see `names`."""
    return self._program(self._weights, jax.device_put(images, self._rows))

  def names(self, started: Names, count: int) -> Names:
    """Waits for a batch, and returns what its first `count` images show.

    Raises:
      ConfigError: if the network gives no numbers for one of them.
    """
    names = jax.tree.map(lambda x: x[:count], jax.device_get(started))
    if not np.isfinite(names.probabilities).all():
      raise config_lib.ConfigError(
        f'{self._folder}: its network gives values that are not finite, as '
        'after a training that diverged'
      )
    return names


def _program(trained, top, target):
  """(weights, images) -> Names, of one device's part."""
  config, objective = trained.config, trained.objective
  model = trained.model(target)
  d, m = config.data, config.model

  def name(weights, images):
    # As `step` evaluates, so that both name the same.
    images = mixing.normalise(images, d.mean, d.std, m.dtype)
    outputs = model.apply(weights, images, False).astype(m.param_dtype)
    scores = objective.scores(outputs)
    # Ranked before the softmax, in which the unlikely ones are all 0.
    _, classes = lax.top_k(objective.logits(outputs), top)

    def of_named(values):
      return jnp.take_along_axis(values, classes, -1)

    words = {}
    for part, values in objective.contributions(scores).items():
      count = min(top, scores[part].shape[-1])
      likeliest, best = lax.top_k(scores[part], count)
      words[part] = Words(best, likeliest, of_named(values))
    return Names(classes, of_named(scores['anp']), words)

  return name
