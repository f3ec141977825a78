"""What a network makes of each example, in a few numbers an example."""

import jax
from jax import lax
import jax.numpy as jnp

from anp_jax.training import objective as objective_lib

TOP = 5


def rows(objective, outputs, labels, held_out: tuple[int, ...] = ()) -> dict:
  """The best classes of each example, and where its own class stands.

  Of equal scores the lower class comes first, as in the metrics.

  Args:
    objective: `objective.Objective`.
    outputs: (batch, outputs) of the network.
    labels: (batch,) int32.
    held_out: classes without a training example.

  Returns:
    Name to array with the batch as its first axis: classes (batch, k) int32 and
    probabilities (batch, k), k the smaller of 5 and the classes; rank int32, of
    the own class from 1; own, its probability; loss in nats. Of pairs,
    adjective, noun int32 and adjective_probability, noun_probability. Where
    classes were held out, held_out int32: the best among these.
  """
  logits, scores = objective.logits(outputs), objective.scores(outputs)
  # Ranked by logits: probabilities far below the best are all 0.
  classes = lax.top_k(logits, min(TOP, objective.classes))[1]
  probabilities = scores['anp']
  label = labels[:, None]
  results = {
    'classes': classes,
    'probabilities': jnp.take_along_axis(probabilities, classes, -1),
    # What is not known comes last.
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
