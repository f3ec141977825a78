"""A few numbers per example that describe the network's prediction."""

import jax
from jax import lax
import jax.numpy as jnp

from anp_jax.training import objective as objective_lib

TOP = 5


def rows(
  objective: objective_lib.Objective, outputs: jax.Array, labels: jax.Array, held_out: tuple = ()
) -> dict:
  """The best classes of each example, and the rank of its true class.

  Among equal scores the lower class comes first, as in the metrics.

  Args:
    objective: losses and metrics.
    outputs: (batch, outputs), outputs of the network.
    labels: (batch,) int32.
    held_out: classes without a training example.

  Returns:
    Arrays by name, with the batch as the first axis: classes (batch, k) int32 and
    probabilities (batch, k), k the smaller of 5 and the classes; rank int32 of the
    true class, from 1; own, its probability; loss in nats. For pairs also
    adjective and noun, int32, with adjective_probability and noun_probability. If
    classes were held out, held_out int32: the best class among them.
  """
  logits, scores = objective.logits(outputs), objective.scores(outputs)
  # Ranked by logits: probabilities far below the best are all 0.
  classes = lax.top_k(logits, min(TOP, objective.classes))[1]
  probabilities = scores['anp']
  label = labels[:, None]
  results = {
    'classes': classes,
    'probabilities': jnp.take_along_axis(probabilities, classes, -1),
    # A rank that is not known (a score is not a number) is the last one.
    'rank': jnp.minimum(objective_lib.ranks(logits, labels), logits.shape[-1]),
    'own': jnp.take_along_axis(probabilities, label, -1)[:, 0],
    'loss': -jnp.take_along_axis(jax.nn.log_softmax(logits), label, -1)[:, 0],
  }
  for part in ('adjective', 'noun'):
    if part in scores:
      results[part] = scores[part].argmax(-1).astype(jnp.int32)
      results[f'{part}_probability'] = scores[part].max(-1)
  if held_out:
    chosen = jnp.array(held_out, jnp.int32)
    results['held_out'] = chosen[logits[:, chosen].argmax(-1)]
  return results
