"""Targets, losses and metrics of Adjective-Noun Pairs and plain classes."""

from flax import struct
import jax
import jax.numpy as jnp
import optax

_TOP = (1, 5, 10, 100)


@struct.dataclass
class Objective:
  """What is asked of the logits.

  Attributes:
    classes: number of classes.
    smoothing: share of the training target spread over all classes.
    adjective_ids: adjective of each class, a tuple; empty for plain classes.
    noun_ids: noun of each class, likewise.
  """

  classes: int = struct.field(pytree_node=False)
  smoothing: float = struct.field(pytree_node=False)
  adjective_ids: tuple[int, ...] = struct.field(pytree_node=False)
  noun_ids: tuple[int, ...] = struct.field(pytree_node=False)

  def targets(self, labels, dtype):
    """(batch,) int32 labels to (batch, classes) smoothed probabilities."""
    one_hot = jax.nn.one_hot(labels, self.classes, dtype=dtype)
    return optax.smooth_labels(one_hot, self.smoothing)

  def loss(self, logits, targets):
    """Cross-entropy of each example.

    Args:
      logits: (batch, classes), float32 or wider.
      targets: (batch, classes) probabilities.

    Returns:
      (batch,) nats.
    """
    return optax.softmax_cross_entropy(logits, targets)

  def train_metrics(self, logits, labels) -> dict:
    """What a training step shows: (batch,) 0 or 1 for each example."""
    return {'anp_top1': _hits(logits, labels, 1)} | self._parts(logits, labels)

  def metrics(self, logits, labels) -> dict:
    """What evaluation counts.

    A noun's probability is the sum over its ANPs, an adjective's likewise.

    Args:
      logits: (batch, classes).
      labels: (batch,) int32.

    Returns:
      Name to (batch,): loss in nats without smoothing, the others 0 or 1.
    """
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    top = {f'anp_top{k}': _hits(logits, labels, k) for k in self._top}
    return {'loss': loss} | top | self._parts(logits, labels)

  @property
  def metric_names(self) -> tuple[str, ...]:
    """Names of what `metrics` gives; top-k where there are more classes."""
    parts = ('adjective_top1', 'noun_top1') if self.noun_ids else ()
    return ('loss', *(f'anp_top{k}' for k in self._top), *parts)

  @property
  def _top(self):
    return [k for k in _TOP if k == 1 or k < self.classes]

  def _parts(self, logits, labels):
    if not self.noun_ids:
      return {}
    result = {}
    for name, ids in (
      ('adjective_top1', self.adjective_ids),
      ('noun_top1', self.noun_ids),
    ):
      members = jax.nn.one_hot(jnp.array(ids), max(ids) + 1, dtype=logits.dtype)
      sums = jnp.matmul(
        jax.nn.softmax(logits), members, precision=jax.lax.Precision.HIGHEST
      )
      result[name] = _hits(sums, jnp.array(ids)[labels], 1)
    return result


def create(vocabulary, smoothing: float = 0.0) -> Objective:
  """The objective of a vocabulary (`data.vocabulary.Vocabulary`)."""
  return Objective(
    classes=len(vocabulary),
    smoothing=smoothing,
    adjective_ids=tuple(vocabulary.adjective_ids().tolist()),
    noun_ids=tuple(vocabulary.noun_ids().tolist()),
  )


def _hits(scores, labels, k):
  """Whether the label is among the k best; of equals the lower class wins."""
  own = jnp.take_along_axis(scores, labels[:, None], axis=-1)
  lower = jnp.arange(scores.shape[-1]) < labels[:, None]
  before = (scores > own) | ((scores == own) & lower)
  # Where a score is not a number nothing is known: never a hit.
  known = jnp.isfinite(scores).all(-1)
  return ((before.sum(-1) < k) & known).astype(scores.dtype)
