"""The accuracy of several models together: the mean of what they say."""

import os

import jax.numpy as jnp
import numpy as np

_FILE = 'validation.npz'
_CHUNK = 4096  # examples


def keep(folder: str, scores: dict, labels, weights) -> None:
  """Writes what a model makes of the validation set.

  Args:
    folder: of the model.
    scores: probabilities (n, ...) by name, see `objective.Objective.scores`.
    labels: (n,) int32.
    weights: (n,) float32: 0 of an example that cannot be read.
  """
  path = os.path.join(folder, _FILE)
  with open(path + '.new', 'wb') as f:
    np.savez(f, **scores, labels=labels, weights=weights)
  os.replace(path + '.new', path)


def score(folders: list[str], objective) -> dict[str, float]:
  """The metrics of the mean of models' probabilities.

  Args:
    folders: of the models, in the order in which they are added up.
    objective: `objective.Objective`.

  Returns:
    Name to mean over the examples of weight 1.
  """
  totals = {}
  for folder in folders:
    with np.load(os.path.join(folder, _FILE)) as found:
      scores = dict(found)
    labels, weights = scores.pop('labels'), scores.pop('weights')
    for name, part in scores.items():
      totals[name] = totals.get(name, 0.0) + part.astype(np.float64)
  means = {
    name: (total / len(folders)).astype(np.float32)
    for name, total in totals.items()
  }
  # Of a probability of 0 the logarithm would be infinite.
  logits = np.log(np.maximum(means['anp'], 1e-30))
  sums = {}
  for start in range(0, len(labels), _CHUNK):
    cut = slice(start, start + _CHUNK)
    values = objective.measures(
      jnp.asarray(logits[cut]),
      {name: jnp.asarray(mean[cut]) for name, mean in means.items()},
      jnp.asarray(labels[cut]),
    )
    for name, value in values.items():
      sums[name] = sums.get(name, 0.0) + float(
        (np.asarray(value, np.float64) * weights[cut]).sum()
      )
  count = max(float(weights.sum()), 1.0)
  return {name: value / count for name, value in sums.items()}
