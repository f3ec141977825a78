"""Heads: how a network's outputs are read as pairs, adjectives and nouns.

A head has no parameters. Any network that gives `outputs` numbers per image has
every head.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import optax


@dataclasses.dataclass(frozen=True)
class Factor:
  """The adjectives, or the nouns, of the classes.

  Attributes:
    name: 'adjective' or 'noun'.
    count: number of words; some may belong to no class.
    ids: word of each class.
  """

  name: str
  count: int
  ids: tuple[int, ...]

  def sum_classes(self, values: jax.Array) -> jax.Array:
    """Sums over each word's classes: (batch, classes) to (batch, count)."""
    words = jnp.array(self.ids)
    members = jax.nn.one_hot(words, self.count, dtype=values.dtype)
    return jnp.matmul(values, members, precision=jax.lax.Precision.HIGHEST)

  def by_class(self, values: jax.Array) -> jax.Array:
    """The value of each class's word: (batch, count) to (batch, classes)."""
    return jnp.take(values, jnp.array(self.ids), axis=-1)


@dataclasses.dataclass(frozen=True)
class Head:
  """The interface of all heads, and the base class of a user's own.

  Attributes:
    classes: number of classes.
    factors: adjectives and nouns; () for plain classes.
    scores_all_combinations: whether log p(adjective) + log p(noun) ranks all
      combinations, classes or not.
    is_linear: whether logits are linear in the outputs.
  """

  classes: int
  factors: tuple[Factor, ...] = ()
  scores_all_combinations: ClassVar[bool] = False
  is_linear: ClassVar[bool] = False

  @property
  def outputs(self) -> int:
    """Numbers per image that the network gives."""
    raise NotImplementedError

  def logits(self, outputs: jax.Array) -> jax.Array:
    """(batch, outputs) to the (batch, classes) that rank the classes."""
    raise NotImplementedError

  def scores(self, outputs: jax.Array) -> dict:
    """(batch, outputs) to probabilities by name.

    Returns:
      anp (batch, classes) and, for pairs, adjective (batch, adjectives) and noun
      (batch, nouns). Each row adds up to 1.
    """
    raise NotImplementedError

  def log_scores(self, outputs: jax.Array) -> dict:
    """The logarithms of `scores`."""
    return jax.tree.map(jnp.log, self.scores(outputs))

  def loss(self, outputs: jax.Array, targets: jax.Array) -> jax.Array:
    """(batch, outputs) and target probabilities (batch, classes) to (batch,) nats."""
    raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Joint(Head):
  """An output for each class; a word's probability is the sum over its classes."""

  is_linear: ClassVar[bool] = True

  @property
  def outputs(self) -> int:
    """The classes."""
    return self.classes

  def logits(self, outputs: jax.Array) -> jax.Array:
    """The outputs."""
    return outputs

  def scores(self, outputs: jax.Array) -> dict:
    """A softmax over the classes, and its sums by word."""
    anp = jax.nn.softmax(outputs)
    return {'anp': anp} | {factor.name: factor.sum_classes(anp) for factor in self.factors}

  def loss(self, outputs: jax.Array, targets: jax.Array) -> jax.Array:
    """The cross-entropy of the class."""
    return optax.softmax_cross_entropy(outputs, targets)


@dataclasses.dataclass(frozen=True)
class Bilinear(Joint):
  """A bilinear form of adjective and noun for each class.

  The logit of a class is the sum of its adjective's and its noun's, as with
  `Factored`, and of `rank` products of an output of its adjective with one of its
  noun. After the factorised network of Narihira et al. 2015 (arXiv 1511.06838); the
  sum lets it begin as the additive form does.

  Attributes:
    rank: number of products.
  """

  is_linear: ClassVar[bool] = False
  rank: int = 1

  @property
  def outputs(self) -> int:
    """1 + rank numbers for each adjective and noun."""
    return (1 + self.rank) * sum(factor.count for factor in self.factors)

  def logits(self, outputs: jax.Array) -> jax.Array:
    """The sums of two outputs and of products."""
    words = outputs.reshape(outputs.shape[0], 1 + self.rank, -1)
    parts = jnp.split(words, [self.factors[0].count], axis=-1)
    adjective, noun = (factor.by_class(x) for factor, x in zip(self.factors, parts))
    return adjective[:, 0] + noun[:, 0] + (adjective * noun)[:, 1:].sum(1)

  def scores(self, outputs: jax.Array) -> dict:
    """A softmax over the classes, and its sums by word."""
    return super().scores(self.logits(outputs))

  def loss(self, outputs: jax.Array, targets: jax.Array) -> jax.Array:
    """The cross-entropy of the class."""
    return super().loss(self.logits(outputs), targets)


class _WordHead(Head):
  """A head with outputs for adjectives and nouns, which follow those of classes."""

  is_linear: ClassVar[bool] = True

  def _words(self, outputs: jax.Array) -> list[jax.Array]:
    """Outputs of adjectives and of nouns."""
    counts = [factor.count for factor in self.factors]
    return jnp.split(outputs[:, -sum(counts) :], [counts[0]], axis=1)

  def scores(self, outputs: jax.Array) -> dict:
    """Softmaxes over classes, adjectives and nouns, which need not agree."""
    return self._normalised(outputs, jax.nn.softmax)

  def log_scores(self, outputs: jax.Array) -> dict:
    """The logarithms of `scores`, finite where a probability is too small for a float."""
    return self._normalised(outputs, jax.nn.log_softmax)

  def _normalised(self, outputs, function):
    logits = (self.logits(outputs), *self._words(outputs))
    names = ('anp', *(factor.name for factor in self.factors))
    return {name: function(x) for name, x in zip(names, logits)}

  def _losses(self, outputs, targets):
    """Cross-entropies of adjective and noun."""
    return [
      optax.softmax_cross_entropy(words, factor.sum_classes(targets))
      for factor, words in zip(self.factors, self._words(outputs))
    ]


@dataclasses.dataclass(frozen=True)
class Multitask(_WordHead):
  """Outputs for classes, adjectives and nouns, each with its own softmax.

  Attributes:
    weights: weights of the losses of class, adjective and noun.
  """

  weights: tuple[float, ...] = ()

  @property
  def outputs(self) -> int:
    """Classes, adjectives and nouns."""
    return self.classes + sum(factor.count for factor in self.factors)

  def logits(self, outputs: jax.Array) -> jax.Array:
    """The outputs of the classes."""
    return outputs[:, : self.classes]

  def loss(self, outputs: jax.Array, targets: jax.Array) -> jax.Array:
    """The weighted sum of three cross-entropies."""
    pair = optax.softmax_cross_entropy(self.logits(outputs), targets)
    losses = (pair, *self._losses(outputs, targets))
    return sum(weight * loss for weight, loss in zip(self.weights, losses))


class Factored(_WordHead):
  """Outputs for adjectives and nouns; a class's logit is the sum of its two.

  Adjective and noun are taken to be independent given the image:
  p(adjective, noun) = p(adjective) p(noun).
  """

  scores_all_combinations = True

  @property
  def outputs(self) -> int:
    """Adjectives and nouns."""
    return sum(factor.count for factor in self.factors)

  def logits(self, outputs: jax.Array) -> jax.Array:
    """The sum of the logits of adjective and noun."""
    words = self._words(outputs)
    return sum(factor.by_class(x) for factor, x in zip(self.factors, words))

  def loss(self, outputs: jax.Array, targets: jax.Array) -> jax.Array:
    """The cross-entropy of the adjective plus that of the noun.

    It equals the cross-entropy of the pair among all combinations of adjectives
    and nouns. The classes are a few of these: a softmax over them alone would
    also teach that classes without an example are unlikely. This loss concerns
    words only, so that pairs never seen can be named.
    """
    return sum(self._losses(outputs, targets))
