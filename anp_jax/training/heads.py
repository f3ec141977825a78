"""Heads: how a network's outputs are read as pairs, adjectives and nouns.

A head has no parameters. Any network that gives `outputs` numbers an image has
every head.
"""

import dataclasses

import jax
import jax.numpy as jnp
import optax


@dataclasses.dataclass(frozen=True)
class Part:
  """The adjectives, or the nouns, of the classes.

  Attributes:
    name: 'adjective' or 'noun'.
    count: of the words; some may be of no class.
    ids: word of each class.
  """

  name: str
  count: int
  ids: tuple[int, ...]

  def sums(self, values):
    """Of each word over its classes: (batch, classes) to (batch, count)."""
    words = jnp.array(self.ids)
    members = jax.nn.one_hot(words, self.count, dtype=values.dtype)
    return jnp.matmul(values, members, precision=jax.lax.Precision.HIGHEST)

  def of_classes(self, values):
    """Of each class that of its word: (batch, count) to (batch, classes)."""
    return jnp.take(values, jnp.array(self.ids), axis=-1)


@dataclasses.dataclass(frozen=True)
class Joint:
  """An output for each class; a word's probability is its classes' sum.

  Attributes:
    classes: number of classes.
    parts: adjectives and nouns; () for plain classes.
  """

  classes: int
  parts: tuple[Part, ...] = ()

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
    return {'anp': anp} | {part.name: part.sums(anp) for part in self.parts}

  def loss(self, outputs, targets):
    """Cross-entropy: (batch, outputs), (batch, classes) to (batch,) nats."""
    return optax.softmax_cross_entropy(outputs, targets)


@dataclasses.dataclass(frozen=True)
class Multitask:
  """Outputs for classes, adjectives and nouns, each with its own softmax.

  Attributes:
    classes: number of classes.
    parts: adjectives and nouns.
    weights: of the losses of class, adjective and noun.
  """

  classes: int
  parts: tuple[Part, ...]
  weights: tuple[float, ...]

  @property
  def outputs(self) -> int:
    """See `Joint.outputs`."""
    return self.classes + sum(part.count for part in self.parts)

  def logits(self, outputs):
    """See `Joint.logits`."""
    return outputs[:, : self.classes]

  def scores(self, outputs) -> dict:
    """See `Joint.scores`; the three need not agree."""
    words = _words(self.parts, outputs[:, self.classes :])
    found = {name: jax.nn.softmax(x) for name, x in words.items()}
    return {'anp': jax.nn.softmax(self.logits(outputs))} | found

  def loss(self, outputs, targets):
    """The weighted sum of three cross-entropies; see `Joint.loss`."""
    words = _words(self.parts, outputs[:, self.classes :])
    wanted = (targets, *(part.sums(targets) for part in self.parts))
    given = (self.logits(outputs), *words.values())
    return sum(
      weight * optax.softmax_cross_entropy(logits, target)
      for weight, logits, target in zip(self.weights, given, wanted)
    )


@dataclasses.dataclass(frozen=True)
class Factored:
  """Outputs for adjectives and nouns; a class's logit is the sum of its two.

  Adjective and noun are taken to be independent given the image:
  p(adjective, noun) = p(adjective) p(noun).

  Attributes:
    classes: number of classes.
    parts: adjectives and nouns.
  """

  classes: int
  parts: tuple[Part, ...]

  @property
  def outputs(self) -> int:
    """See `Joint.outputs`."""
    return sum(part.count for part in self.parts)

  def logits(self, outputs):
    """See `Joint.logits`."""
    words = _words(self.parts, outputs)
    return sum(part.of_classes(words[part.name]) for part in self.parts)

  def scores(self, outputs) -> dict:
    """See `Joint.scores`; of pairs, those among the classes share the whole."""
    words = _words(self.parts, outputs)
    found = {name: jax.nn.softmax(x) for name, x in words.items()}
    return {'anp': jax.nn.softmax(self.logits(outputs))} | found

  def loss(self, outputs, targets):
    """The cross-entropy of the adjective plus that of the noun.

    That is the cross-entropy of the pair among all combinations of adjectives
    and nouns, of which the classes are a few. A softmax over the classes alone
    would also teach that classes without an example are unlikely; here nothing
    is said of a pair, only of its words, so that pairs never seen can be named.

    See `Joint.loss`.
    """
    words = _words(self.parts, outputs)
    return sum(
      optax.softmax_cross_entropy(words[part.name], part.sums(targets))
      for part in self.parts
    )


def _words(parts, outputs):
  """Outputs of adjectives and nouns, which follow each other, by name."""
  found, start = {}, 0
  for part in parts:
    found[part.name] = outputs[:, start : start + part.count]
    start += part.count
  return found
