"""Heads: how a network's outputs are read as pairs, adjectives and nouns.

A head has no parameters. Any network that gives `outputs` numbers an image has
every head.
"""

import dataclasses

import jax
import jax.numpy as jnp
import optax


@dataclasses.dataclass(frozen=True)
class Factor:
  """The adjectives, or the nouns, of the classes.

  Attributes:
    name: 'adjective' or 'noun'.
    count: of the words; some may be of no class.
    ids: word of each class.
  """

  name: str
  count: int
  ids: tuple[int, ...]

  def sum_classes(self, values):
    """Sums over each word's classes: (batch, classes) to (batch, count)."""
    words = jnp.array(self.ids)
    members = jax.nn.one_hot(words, self.count, dtype=values.dtype)
    return jnp.matmul(values, members, precision=jax.lax.Precision.HIGHEST)

  def by_class(self, values):
    """Each class's word's value: (batch, count) to (batch, classes)."""
    return jnp.take(values, jnp.array(self.ids), axis=-1)


@dataclasses.dataclass(frozen=True)
class Head:
  """What every head inherits from, as one of the user's own does.

  Methods: `outputs`, `logits`, `scores` and `loss`, as those of `Joint`.

  Attributes:
    classes: number of classes.
    factors: adjectives and nouns; () for plain classes.
  """

  classes: int
  factors: tuple[Factor, ...] = ()


@dataclasses.dataclass(frozen=True)
class Joint(Head):
  """An output for each class; a word's probability is its classes' sum.

  Attributes:
    classes: number of classes.
    factors: adjectives and nouns; () for plain classes.
  """

  @property
  def outputs(self) -> int:
    """Numbers an image that the network gives."""
    return self.classes

  def logits(self, outputs):
    """(batch, outputs) to the (batch, classes) that rank the classes."""
    return outputs

  def scores(self, outputs) -> dict:
    """(batch, outputs) to probabilities by name; each row adds up to 1.

    Returns:
      anp (batch, classes) and, of pairs, adjective (batch, adjectives) and noun
      (batch, nouns).
    """
    anp = jax.nn.softmax(outputs)
    return {'anp': anp} | {factor.name: factor.sum_classes(anp) for factor in self.factors}

  def loss(self, outputs, targets):
    """Cross-entropy: (batch, outputs), (batch, classes) to (batch,) nats."""
    return optax.softmax_cross_entropy(outputs, targets)


@dataclasses.dataclass(frozen=True)
class Multitask(Head):
  """Outputs for classes, adjectives and nouns, each with its own softmax.

  Attributes:
    classes: number of classes.
    factors: adjectives and nouns.
    weights: of the losses of class, adjective and noun.
  """

  weights: tuple[float, ...] = ()

  @property
  def outputs(self) -> int:
    """Numbers an image that the network gives."""
    return self.classes + sum(factor.count for factor in self.factors)

  def logits(self, outputs):
    """(batch, outputs) to the (batch, classes) that rank the classes."""
    return outputs[:, : self.classes]

  def scores(self, outputs) -> dict:
    """The probabilities of `Joint.scores`; the three need not agree."""
    words = _words(self.factors, outputs[:, self.classes :])
    scores = {name: jax.nn.softmax(x) for name, x in words.items()}
    return {'anp': jax.nn.softmax(self.logits(outputs))} | scores

  def loss(self, outputs, targets):
    """The weighted sum of three cross-entropies; see `Joint.loss`."""
    words = _words(self.factors, outputs[:, self.classes :])
    word_targets = (targets, *(factor.sum_classes(targets) for factor in self.factors))
    logits = (self.logits(outputs), *words.values())
    return sum(
      weight * optax.softmax_cross_entropy(scores, target)
      for weight, scores, target in zip(self.weights, logits, word_targets)
    )


@dataclasses.dataclass(frozen=True)
class Factored(Head):
  """Outputs for adjectives and nouns; a class's logit is the sum of its two.

  Adjective and noun are taken to be independent given the image:
  p(adjective, noun) = p(adjective) p(noun).

  Attributes:
    classes: number of classes.
    factors: adjectives and nouns.
  """

  @property
  def outputs(self) -> int:
    """Numbers an image that the network gives."""
    return sum(factor.count for factor in self.factors)

  def logits(self, outputs):
    """(batch, outputs) to the (batch, classes) that rank the classes."""
    words = _words(self.factors, outputs)
    return sum(factor.by_class(words[factor.name]) for factor in self.factors)

  def scores(self, outputs) -> dict:
    """The probabilities of `Joint.scores`; the classes alone add up to 1."""
    words = _words(self.factors, outputs)
    scores = {name: jax.nn.softmax(x) for name, x in words.items()}
    return {'anp': jax.nn.softmax(self.logits(outputs))} | scores

  def loss(self, outputs, targets):
    """The cross-entropy of the adjective plus that of the noun.

    That is the cross-entropy of the pair among all combinations of adjectives
    and nouns; the classes are a few of these. A softmax over the classes alone
    would also teach that classes without an example are unlikely; here nothing
    is said of a pair, only of its words, so that pairs never seen can be named.
    Shapes are those of `Joint.loss`.
    """
    words = _words(self.factors, outputs)
    return sum(
      optax.softmax_cross_entropy(words[factor.name], factor.sum_classes(targets))
      for factor in self.factors
    )


def _words(factors, outputs):
  """Outputs of adjectives and nouns, which follow each other, by name."""
  words, start = {}, 0
  for factor in factors:
    words[factor.name] = outputs[:, start : start + factor.count]
    start += factor.count
  return words
