"""A trained network, compiled to name batches of images on this machine."""

import contextlib
from typing import NamedTuple

from flax import linen as nn
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from anp_jax import config as config_lib, models
from anp_jax.checkpoint import trained as trained_lib
from anp_jax.models import linear
from anp_jax.parallel import mesh as mesh_lib
from anp_jax.system import onednn
from anp_jax.training import mixing

_P = mesh_lib.P
_AXIS = 'data'
# Images a device, by default: XLA's convolutions on a CPU are quickest
# with few, an accelerator's with many.
_CPU_BATCH, _BATCH = 8, 64


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
    contributions: (batch, files, top), of each file of features to the logits of the
      named classes, see `models.linear`; None for images.
    arrays: features (batch, width), what the last dense layer reads, and logits (batch,
      classes), where they are wanted.
  """

  classes: np.ndarray
  probabilities: np.ndarray
  words: dict[str, Words]
  contributions: np.ndarray | None = None
  arrays: dict[str, np.ndarray] = {}


class Network:
  """Names batches of one size, over all devices of this process.

  Attributes:
    batch_size: images per batch.
    devices: devices that share a batch.
  """

  def __init__(
    self, trained: trained_lib.Trained, top: int, batch_size: int = 0, keeps_features: bool = False
  ):
    """Places the weights; the first batch compiles.

    Args:
      trained: trained network.
      top: classes to name, at least 1 and at most all.
      batch_size: images over all devices, rounded up to a multiple of their
        number; 0: what suits them.
      keeps_features: whether `Names.arrays` is wanted.
    """
    self.devices = jax.local_devices()
    platform = self.devices[0].platform
    target = platform
    # Without a library, a network that was trained with one needs none.
    if platform == 'cpu' and onednn.find():
      target = models.target(trained.config, platform, len(self.devices))
    each = _CPU_BATCH if platform == 'cpu' else _BATCH
    if batch_size:
      each = -(-batch_size // len(self.devices))
    self.batch_size = each * len(self.devices)
    self._folder = trained.folder
    mesh = jax.sharding.Mesh(np.array(self.devices), (_AXIS,))
    self._rows = jax.sharding.NamedSharding(mesh, _P(_AXIS))
    self._weights = jax.device_put(
      {'params': trained.params, **trained.stats}, jax.sharding.NamedSharding(mesh, _P())
    )
    program = _program(trained, top, target, keeps_features)
    self._program = jax.jit(mesh_lib.mapped(program, mesh, (_P(), _P(_AXIS)), _P(_AXIS)))

  def start(self, images: np.ndarray) -> Names:
    """Starts naming images (batch_size, ...), see `config.example`; see `names`."""
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


def _program(trained, top, target, keeps_features):
  """(weights, images) -> Names, of one device's part."""
  config, objective = trained.config, trained.objective
  model = trained.model(target)
  d, m = config.data, config.model

  def outputs_of(weights, images):
    # As `step` evaluates, so that both name the same.
    images = mixing.normalise(images, d.mean, d.std, m.dtype)
    return model.apply(weights, images, False).astype(m.param_dtype)

  def name(weights, images):
    with _dense_inputs() as inputs:
      outputs = outputs_of(weights, images)
    arrays = {}
    if keeps_features:
      if not inputs:
        raise config_lib.ConfigError(f'--features: {m.name} has no dense layer (flax.linen.Dense)')
      features = inputs[-1].reshape(len(images), -1).astype(jnp.float32)
      arrays = {'features': features, 'logits': objective.head.logits(outputs)}
    scores = objective.head.scores(outputs)
    # Ranked before the softmax, in which the unlikely ones are all 0.
    _, classes = lax.top_k(objective.head.logits(outputs), top)

    def of_named(values):
      return jnp.take_along_axis(values, classes, -1)

    words = {}
    for part, values in objective.contributions(scores).items():
      count = min(top, scores[part].shape[-1])
      likeliest, best = lax.top_k(scores[part], count)
      words[part] = Words(best, likeliest, of_named(values))
    parts = None
    if linear.is_fused(config, objective.head):
      parts = linear.contributions(
        lambda x: objective.head.logits(outputs_of(weights, x)), images, weights, d.widths
      )
      parts = jnp.take_along_axis(parts, classes[:, None], -1)
    return Names(classes, of_named(scores['anp']), words, parts, arrays)

  return name


@contextlib.contextmanager
def _dense_inputs():
  """A context that lists what each dense layer reads, in the order of their calls."""
  inputs: list[jax.Array] = []

  def intercept(call, arguments, keywords, context):
    if isinstance(context.module, nn.Dense) and context.method_name == '__call__':
      inputs.append(arguments[0])
    return call(*arguments, **keywords)

  with nn.intercept_methods(intercept):
    yield inputs
