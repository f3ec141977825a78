"""The global order of examples: a permutation that is computed, not stored.

Position p of the endless stream belongs to epoch p // size; each epoch is another
permutation. Any process can therefore read any part of the stream, and a resumed
run needs only its step. Where all classes come equally often, each class has its
permutation.

The permutation is a Feistel network (Luby and Rackoff 1988) over the next power
of four, walked until it falls inside the set (Black and Rogaway 2002).
"""

import numpy as np

_ROUNDS = 6
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
# Arrays, since NumPy warns when a scalar product wraps around.
_SALTS = np.arange(1, _ROUNDS + 1, dtype=np.uint64) * _GOLDEN
# Streams 1 and 2 of `uniform` are those of data/input and data/show.
_CLASS_STREAM = 3


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


def uniform(seed: int, stream: int, positions: np.ndarray, count: int) -> np.ndarray:
  """Random numbers that belong to positions of the stream.

  Args:
    seed: the run's seed.
    stream: tells independent uses apart.
    positions: (n,) int64, at least 0.
    count: numbers per position.

  Returns:
    (n, count) float64 in [0, 1), a pure function of the arguments.
  """
  key = _key(seed, stream)
  base = mix(np.asarray(positions).astype(np.uint64) * _GOLDEN + key)
  offsets = np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN
  bits = mix(base[:, None] + offsets)
  return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def shuffled(positions: np.ndarray, seed: int, size: int) -> np.ndarray:
  """The example at each position of the endless shuffled stream.

  Args:
    positions: (n,) int64, at least 0; position p belongs to epoch p // size.
    seed: the run's seed.
    size: examples per epoch.

  Returns:
    (n,) int64 in [0, size); every example once within each epoch.
  """
  positions = np.asarray(positions, np.int64)
  epochs = (positions // size).astype(np.uint64)
  keys = mix(epochs * _GOLDEN + _key(seed, 0))
  return _permuted(positions % size, keys, np.full(len(positions), size))


def balanced(positions: np.ndarray, seed: int, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """The example at each position of the stream with classes equally often.

  An epoch is as long as that of `shuffled`. After any number of epochs the
  classes that have examples have come equally often, to 1; and a class's
  examples, each once before one comes again, equally often, to 1.

  Args:
    positions: (n,) int64, at least 0.
    seed: the run's seed.
    counts: (classes,) int, examples of each class.

  Returns:
    classes (n,) int64, and which of the class's examples, (n,) int64 from 0.
  """
  positions = np.asarray(positions, np.int64)
  counts = np.asarray(counts, np.int64)
  size = int(counts.sum())
  present = np.flatnonzero(counts)
  # Shuffled within its epoch, a place names a class and a count in that class.
  places = positions // size * size + shuffled(positions, seed, size)
  classes = present[places % len(present)]
  counts_in_class = places // len(present)
  sizes = counts[classes]
  rounds = (counts_in_class // sizes).astype(np.uint64)
  keys = mix(rounds * _GOLDEN + _key(seed, _CLASS_STREAM))
  keys = mix(keys + classes.astype(np.uint64) * _GOLDEN)
  return classes, _permuted(counts_in_class % sizes, keys, sizes)


def _permuted(values, keys, sizes):
  """Each value in [0, size) by the permutation of its key; all (n,)."""
  # Bits of size - 1, which a float64 tells exactly up to 2^53.
  bits = np.frexp(np.float64(sizes - 1))[1]
  half = np.maximum(1, (bits + 1) // 2).astype(np.uint64)
  mask = (np.uint64(1) << half) - np.uint64(1)
  sizes = sizes.astype(np.uint64)
  result = values.astype(np.uint64)
  outside = np.arange(len(result))
  while outside.size:  # under four rounds on average
    shift, low, key = half[outside], mask[outside], keys[outside]
    left = result[outside] >> shift
    right = result[outside] & low
    for i in range(_ROUNDS):
      salt = key + _SALTS[i]
      left, right = right, left ^ (mix(right * _GOLDEN ^ salt) & low)
    result[outside] = (left << shift) | right
    outside = outside[result[outside] >= sizes[outside]]
  return result.astype(np.int64)


def _key(seed, stream):
  words = np.asarray([seed, stream], np.uint64)
  with np.errstate(over='ignore'):
    return mix(mix(words[0] + _GOLDEN) ^ (words[1] * _GOLDEN))
