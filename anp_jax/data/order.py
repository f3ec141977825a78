"""The global order of examples: a permutation that is computed, not stored.

Position p of the endless stream belongs to epoch p // size; each epoch is a
permutation of its own. Any process can therefore read any part
of the stream, and a resumed run needs nothing but its step.

The permutation is a Feistel network (Luby and Rackoff 1988) over the next power
of four, walked until it falls inside the set (Black and Rogaway 2002).
"""

import numpy as np

_ROUNDS = 6
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
# Arrays, since NumPy warns when a scalar product wraps around.
_SALTS = np.arange(1, _ROUNDS + 1, dtype=np.uint64) * _GOLDEN


def mix(x: np.ndarray) -> np.ndarray:
  """A hash of 64 bits (the finaliser of SplitMix64, Steele et al. 2014).

  Args:
    x: any shape, uint64.

  Returns:
    Like x; a bijection.
  """
  x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
  x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
  return x ^ (x >> np.uint64(31))


def uniform(seed: int, stream: int, positions: np.ndarray, count: int):
  """Random numbers that belong to positions of the stream.

  Args:
    seed: of the run.
    stream: tells independent uses apart.
    positions: (n,) int64, at least 0.
    count: numbers a position.

  Returns:
    (n, count) float64 in [0, 1), a pure function of the arguments.
  """
  key = _key(seed, stream)
  base = mix(np.asarray(positions).astype(np.uint64) * _GOLDEN + key)
  lanes = np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN
  bits = mix(base[:, None] + lanes)
  return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def shuffled(positions: np.ndarray, seed: int, size: int) -> np.ndarray:
  """Which example stands at each position of the endless shuffled stream.

  Args:
    positions: (n,) int64, at least 0; position p belongs to epoch p // size.
    seed: of the run.
    size: examples an epoch.

  Returns:
    (n,) int64 in [0, size); every example once within each epoch.
  """
  positions = np.asarray(positions, np.int64)
  if size == 1:
    return np.zeros_like(positions)
  half = np.uint64(max(1, (int(size - 1).bit_length() + 1) // 2))
  mask = np.uint64((1 << int(half)) - 1)
  epochs = (positions // size).astype(np.uint64)
  keys = mix(epochs * _GOLDEN + _key(seed, 0))
  result = (positions % size).astype(np.uint64)
  outside = np.arange(len(result))
  while outside.size:  # under four turns on average
    left = result[outside] >> half
    right = result[outside] & mask
    for i in range(_ROUNDS):
      salt = keys[outside] + _SALTS[i]
      left, right = right, left ^ (mix(right * _GOLDEN ^ salt) & mask)
    result[outside] = (left << half) | right
    outside = outside[result[outside] >= np.uint64(size)]
  return result.astype(np.int64)


def _key(seed, stream):
  words = np.asarray([seed, stream], np.uint64)
  with np.errstate(over='ignore'):
    return mix(mix(words[0] + _GOLDEN) ^ (words[1] * _GOLDEN))
