"""Targets, losses and metrics of Adjective-Noun Pairs and plain classes."""

from collections.abc import Sequence
import dataclasses

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict
import optax

from anp_jax import config as config_lib
from anp_jax.config import errors, trust
from anp_jax.data import vocabulary as vocabulary_lib
from anp_jax.training import heads

_TOP = (1, 5, 10, 100)


@dataclasses.dataclass(frozen=True)
class Objective:
  """The losses and metrics of a network's outputs.

  Attributes:
    head: interpretation of the outputs.
    smoothing: share of the training target spread over all classes.
    class_weights: weight of each class in the training loss; (): all 1.
  """

  head: heads.Head
  smoothing: float = 0.0
  class_weights: tuple[float, ...] = ()

  def contributions(self, scores: dict) -> dict:
    """The evidence of adjective and noun for each class.

    Args:
      scores: probabilities, see `heads.Head.scores`.

    Returns:
      adjective and noun, each (batch, classes): logarithms of the probability
      of the class's adjective and of its noun; {} for plain classes. With the
      factored head their sum is that of the pair among all combinations, which
      is the logarithm of `anp` less a number that all classes share; with the
      others the rest is the evidence of the pair beyond its two words.
    """
    evidence = {}
    for factor in self.head.factors:
      values = jnp.asarray(scores[factor.name])
      # The logarithm of 0 would be infinite.
      least = jnp.finfo(values.dtype).tiny
      logs = jnp.log(jnp.maximum(values, least))
      evidence[factor.name] = factor.by_class(logs)
    return evidence

  def targets(self, labels: jax.Array, dtype: str) -> jax.Array:
    """(batch,) int32 labels to (batch, classes) probabilities, 0 or 1."""
    return jax.nn.one_hot(labels, self.head.classes, dtype=dtype)

  def loss(self, outputs: jax.Array, targets: jax.Array) -> jax.Array:
    """The training loss of each example, smoothed and weighted.

    Args:
      outputs: (batch, outputs), float32 or wider.
      targets: (batch, classes) probabilities.

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

  def train_metrics(self, outputs: jax.Array, labels: jax.Array) -> dict:
    """The metrics of a training step: (batch,) 0 or 1 for each example, by name."""
    hits = {'anp_top1': _hits(self.head.logits(outputs), labels, 1)}
    return hits | self._factor_hits(self.head.scores(outputs), labels)

  def metrics(self, outputs: jax.Array, labels: jax.Array) -> dict:
    """The metrics of an evaluation.

    Args:
      outputs: (batch, outputs) of the network.
      labels: (batch,) int32.

    Returns:
      (batch,) values by name: loss, the cross-entropy of the class among the
      classes with any head, in nats without smoothing or weights; the others are
      0 or 1.
    """
    logits = self.head.logits(outputs)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    top = {f'anp_top{k}': _hits(logits, labels, k) for k in self._top}
    return {'loss': loss} | top | self._factor_hits(self.head.scores(outputs), labels)

  @property
  def metric_names(self) -> tuple[str, ...]:
    """Names of `metrics`; top-k only for more than k classes."""
    return ('loss', *(f'anp_top{k}' for k in self._top), *self._factor_names)

  @property
  def train_names(self) -> tuple[str, ...]:
    """Names of the loss and of `train_metrics`."""
    return ('loss', 'anp_top1', *self._factor_names)

  @property
  def _top(self):
    return [k for k in _TOP if k == 1 or k < self.head.classes]

  @property
  def _factor_names(self):
    return tuple(f'{factor.name}_top1' for factor in self.head.factors)

  def _factor_hits(self, scores, labels):
    return {
      f'{factor.name}_top1': _hits(scores[factor.name], jnp.array(factor.ids)[labels], 1)
      for factor in self.head.factors
    }


def create(
  vocabulary: vocabulary_lib.Vocabulary, config: ConfigDict, class_weights: Sequence[float] = ()
) -> Objective:
  """The objective of a vocabulary.

  Args:
    vocabulary: classes of the data.
    config: config of the run.
    class_weights: weights from `data.balance.class_weights`; (): all 1.

  Raises:
    ConfigError: if a head of pairs meets plain classes.
  """
  m = config.model
  factors = tuple(
    heads.Factor(name, len(words), tuple(ids.tolist())) for name, words, ids in vocabulary.factors
  )
  if not factors and m.head in ('multitask', 'factored', 'bilinear'):
    raise config_lib.ConfigError(
      f"config.model.head={m.head!r}: expected 'joint' where classes are no "
      f'adjective_noun pairs, as {vocabulary.names[0]!r} and others '
      '(config.data.pairs=yes, if they are)'
    )
  classes = len(vocabulary)
  head: heads.Head
  if m.head == 'multitask':
    head = heads.Multitask(classes, factors, tuple(m.head_weights))
  elif m.head == 'factored':
    head = heads.Factored(classes, factors)
  elif m.head == 'bilinear':
    head = heads.Bilinear(classes, factors, m.head_rank)
  elif m.head == 'joint':
    head = heads.Joint(classes, factors)
  else:
    arguments = {'classes': classes, 'factors': factors}
    head = trust.made('model.head', m.head, heads.Head, arguments, required='classes')
    _check_own(m.head, head)
  return Objective(head, config.label_smoothing, tuple(class_weights))


def _check_own(name, head):
  """Refuses a user's head whose results have other shapes than `heads.Head` says."""

  def results():
    outputs, targets = jnp.zeros((2, head.outputs)), jnp.zeros((2, head.classes))
    loss, logits = head.loss(outputs, targets), head.logits(outputs)
    return {**head.scores(outputs), 'loss': loss, 'logits': logits}

  shapes = trust.called('model.head', name, jax.eval_shape, results)
  counts = {factor.name: (2, factor.count) for factor in head.factors}
  every = (2, head.classes)
  for key, shape in {'loss': (2,), 'logits': every, 'anp': every, **counts}.items():
    words = f'a head that gives {key} of shape {shape} for 2 examples'
    errors.check(getattr(shapes.get(key), 'shape', None) == shape, 'model.head', name, words)


def ranks(scores: jax.Array, labels: jax.Array) -> jax.Array:
  """The rank of each example's class among all classes.

  Args:
    scores: (batch, classes).
    labels: (batch,) int32.

  Returns:
    (batch,) int32, from 1; among equal scores the lower class comes first. If a
    score is not a number the rank is classes + 1.
  """
  label_scores = jnp.take_along_axis(scores, labels[:, None], axis=-1)
  lower = jnp.arange(scores.shape[-1]) < labels[:, None]
  ties = (scores == label_scores) & lower
  before = ((scores > label_scores) | ties).sum(-1)
  finite = jnp.isfinite(scores).all(-1)
  return jnp.where(finite, before, scores.shape[-1]).astype(jnp.int32) + 1


def _hits(scores, labels, k):
  return (ranks(scores, labels) <= k).astype(scores.dtype)
