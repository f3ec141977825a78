"""The accuracy of several models together: the mean of their probabilities."""

import io
import os

import jax.numpy as jnp
import numpy as np

from anp_jax.system import files

_FILE = 'validation.npz'
_CHUNK = 4096  # examples


def write(folder: str, scores: dict, labels, weights) -> None:
  """Writes a model's probabilities of the validation set.

  Args:
    folder: of the model.
    scores: probabilities (n, ...) by name, see `objective.Objective.scores`.
    labels: (n,) int32.
    weights: (n,) float32: 0 of an example that cannot be read.
  """
  buffer = io.BytesIO()
  np.savez(buffer, **scores, labels=labels, weights=weights)
  files.write_atomic(os.path.join(folder, _FILE), buffer.getvalue())


def score(folders: list[str], objective) -> dict[str, float]:
  """Computes the metrics of the mean of models' probabilities.

  Args:
    folders: of the models, in the order in which they are added up.
    objective: `objective.Objective`.

  Returns:
    Name to mean over the examples of weight 1.
  """
  totals = {}
  for folder in folders:
    with np.load(os.path.join(folder, _FILE)) as arrays:
      scores = dict(arrays)
    labels, weights = scores.pop('labels'), scores.pop('weights')
    for name, probabilities in scores.items():
      totals[name] = totals.get(name, 0.0) + probabilities.astype(np.float64)
  means = {name: (total / len(folders)).astype(np.float32) for name, total in totals.items()}
  # The logarithm of a probability of 0 would be infinite.
  logits = np.log(np.maximum(means['anp'], 1e-30))
  sums = {}
  for start in range(0, len(labels), _CHUNK):
    chunk = slice(start, start + _CHUNK)
    values = objective.measures(
      jnp.asarray(logits[chunk]),
      {name: jnp.asarray(mean[chunk]) for name, mean in means.items()},
      jnp.asarray(labels[chunk]),
    )
    for name, value in values.items():
      sums[name] = sums.get(name, 0.0) + float(
        (np.asarray(value, np.float64) * weights[chunk]).sum()
      )
  count = max(float(weights.sum()), 1.0)
  return {name: value / count for name, value in sums.items()}
