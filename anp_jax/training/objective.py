"""Targets, losses and metrics of Adjective-Noun Pairs and plain classes."""

from flax import struct
import jax
import jax.numpy as jnp
import optax

from anp_jax import config as config_lib
from anp_jax.config import trust
from anp_jax.training import heads

_TOP = (1, 5, 10, 100)


@struct.dataclass
class Objective:
  """What is asked of the outputs of a network.

  Attributes:
    head: how outputs are read.
    smoothing: share of the training target spread over all classes.
    class_weights: what an example of each class counts in the training loss;
      (): all 1.
  """

  head: heads.Head = struct.field(pytree_node=False)
  smoothing: float = struct.field(pytree_node=False, default=0.0)
  class_weights: tuple[float, ...] = struct.field(pytree_node=False, default=())

  @property
  def classes(self) -> int:
    """Number of classes."""
    return self.head.classes

  @property
  def outputs(self) -> int:
    """Numbers an image that the network gives."""
    return self.head.outputs

  def logits(self, outputs):
    """(batch, outputs) to the (batch, classes) that rank the classes."""
    return self.head.logits(outputs)

  def scores(self, outputs) -> dict:
    """(batch, outputs) to probabilities; each row adds up to 1.

    Returns:
      anp (batch, classes) and, of pairs, adjective (batch, adjectives) and noun
      (batch, nouns).
    """
    return self.head.scores(outputs)

  def contributions(self, scores) -> dict:
    """What adjective and noun say for each class.

    Args:
      scores: as from `scores`.

    Returns:
      adjective and noun, each (batch, classes): logarithms of the probability
      of the class's adjective and of its noun; {} for plain classes. With the
      factored head their sum is that of the pair among all combinations, which
      is the logarithm of `anp` less a number that all classes share; with the
      others the rest is what the pair says beyond its two words.
    """
    evidence = {}
    for factor in self.head.factors:
      values = jnp.asarray(scores[factor.name])
      # Of a probability of 0 the logarithm would be infinite.
      least = jnp.finfo(values.dtype).tiny
      logs = jnp.log(jnp.maximum(values, least))
      evidence[factor.name] = factor.by_class(logs)
    return evidence

  def targets(self, labels, dtype):
    """(batch,) int32 labels to (batch, classes) probabilities, 0 or 1."""
    return jax.nn.one_hot(labels, self.classes, dtype=dtype)

  def loss(self, outputs, targets):
    """The training loss of each example, smoothed and weighted.

    Args:
      outputs: (batch, outputs), float32 or wider.
      targets: (batch, classes) probabilities; those of blended images blended.

    Returns:
      (batch,) nats. Weights are 1 in the mean over the training examples, so
      that a batch is still divided by its number of examples.
    """
    smoothed = optax.smooth_labels(targets, self.smoothing)
    losses = self.head.loss(outputs, smoothed)
    if self.class_weights:
      weights = jnp.array(self.class_weights, targets.dtype)
      losses *= (targets * weights).sum(-1)
    return losses

  def train_metrics(self, outputs, labels) -> dict:
    """What a training step shows: (batch,) 0 or 1 for each example."""
    hits = {'anp_top1': _hits(self.logits(outputs), labels, 1)}
    return hits | self._factor_hits(self.scores(outputs), labels)

  def metrics(self, outputs, labels) -> dict:
    """What evaluation counts.

    Args:
      outputs: (batch, outputs).
      labels: (batch,) int32.

    Returns:
      As `measures`.
    """
    return self.measures(self.logits(outputs), self.scores(outputs), labels)

  def measures(self, logits, scores, labels) -> dict:
    """The same from what the outputs were read as.

    Args:
      logits: (batch, classes), which rank the classes.
      scores: as from `scores`.
      labels: (batch,) int32.

    Returns:
      Name to (batch,): loss, the cross-entropy of the class among the classes
      whatever the head, in nats without smoothing or weights; the others 0 or
      1.
    """
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    top = {f'anp_top{k}': _hits(logits, labels, k) for k in self._top}
    return {'loss': loss} | top | self._factor_hits(scores, labels)

  @property
  def metric_names(self) -> tuple[str, ...]:
    """Names of what `metrics` gives; top-k where there are more classes."""
    return ('loss', *(f'anp_top{k}' for k in self._top), *self._factor_names)

  @property
  def train_names(self) -> tuple[str, ...]:
    """Names of a training step's: the loss, and what `train_metrics` gives."""
    return ('loss', 'anp_top1', *self._factor_names)

  @property
  def _top(self):
    return [k for k in _TOP if k == 1 or k < self.classes]

  @property
  def _factor_names(self):
    return tuple(f'{factor.name}_top1' for factor in self.head.factors)

  def _factor_hits(self, scores, labels):
    return {
      f'{factor.name}_top1': _hits(scores[factor.name], jnp.array(factor.ids)[labels], 1)
      for factor in self.head.factors
    }


def create(vocabulary, config, class_weights=()) -> Objective:
  """The objective of a vocabulary.

  Args:
    vocabulary: `data.vocabulary.Vocabulary`.
    config: the run's config.
    class_weights: of `data.balance.class_weights`; () where nothing is trained.

  Raises:
    ConfigError: for a head of pairs where classes are plain.
  """
  m = config.model
  factors = ()
  if vocabulary.is_anp:
    factors = (
      heads.Factor(
        'adjective', len(vocabulary.adjectives), tuple(vocabulary.adjective_ids().tolist())
      ),
      heads.Factor('noun', len(vocabulary.nouns), tuple(vocabulary.noun_ids().tolist())),
    )
  elif m.head in ('multitask', 'factored'):
    raise config_lib.ConfigError(
      f"config.model.head={m.head!r}: expected 'joint' where classes are no "
      f'adjective_noun pairs, as {vocabulary.names[0]!r} and others '
      '(config.data.pairs=yes, if they are)'
    )
  classes = len(vocabulary)
  if m.head == 'multitask':
    head = heads.Multitask(classes, factors, tuple(m.head_weights))
  elif m.head == 'factored':
    head = heads.Factored(classes, factors)
  elif m.head == 'joint':
    head = heads.Joint(classes, factors)
  else:
    arguments = {'classes': classes, 'factors': factors}
    head = trust.made('model.head', m.head, heads.Head, arguments)
  return Objective(head, config.label_smoothing, tuple(class_weights))


def ranks(scores, labels):
  """Where each example's class stands among all.

  Args:
    scores: (batch, classes).
    labels: (batch,) int32.

  Returns:
    (batch,) int32, from 1; of equal scores the lower class comes first. Where a
    score is not a number nothing is known: one more than there are classes.
  """
  label_scores = jnp.take_along_axis(scores, labels[:, None], axis=-1)
  lower = jnp.arange(scores.shape[-1]) < labels[:, None]
  ties = (scores == label_scores) & lower
  before = ((scores > label_scores) | ties).sum(-1)
  finite = jnp.isfinite(scores).all(-1)
  return jnp.where(finite, before, scores.shape[-1]).astype(jnp.int32) + 1


def _hits(scores, labels, k):
  return (ranks(scores, labels) <= k).astype(scores.dtype)
