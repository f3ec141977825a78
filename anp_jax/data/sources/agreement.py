"""Whether all processes of a run read the same examples.

Each opens the data set where it runs: a copy on a node's own disk may have a
folder renamed, or an image missing.
"""

import hashlib
import json
import math

import numpy as np

from anp_jax import config as config_lib
from anp_jax.data.sources import source as source_lib

_BLOCKS = 256  # whose digests narrow the first difference down
# A pass over the labels of prepared records takes 24 us each.
_MAX_COUNTED = 200_000


def check(processes, **sources: source_lib.Source) -> None:
  """Refuses processes whose data differ, before the first step.

  No image is read: names of classes, labels and names of files count, as far as
  the sources know them.

  Args:
    processes: `cluster.Processes`; all of them call it alike.
    **sources: by what messages call the data: training, evaluation.

  Raises:
    ConfigError: on all processes, naming the first rank whose data differ from
      those of rank 0, and the first difference.
  """
  if processes.count == 1:
    return
  for kind, source in sources.items():
    description = describe(source)
    digests = processes.gather(_digest(json.dumps(description)))
    rank = next((i for i, d in enumerate(digests) if d != digests[0]), 0)
    if not rank:
      continue
    # Only two processes send more: names of classes may be a megabyte.
    is_shown = processes.index in (0, rank)
    details = processes.gather(description if is_shown else None)
    text, block = difference(details[rank], details[0])
    names = _block_names(source, block) if is_shown else None
    names = processes.gather(names)
    raise config_lib.ConfigError(
      f'rank {rank} on {processes.hosts[rank]} has other {kind} data than '
      f'rank 0 on {processes.hosts[0]}: '
      f'{text or _first_example(names[rank], names[0])}'
    )


def check_with(source: source_lib.Source, expected: dict, rank: int) -> None:
  """Refuses training data that are not those of rank 0.

  Args:
    source: of this process.
    expected: what `describe` has returned on rank 0.
    rank: of this process.

  Raises:
    ConfigError: naming the rank and the first difference.
  """
  text, block = difference(describe(source), expected)
  if text or block is not None:
    size = expected['block']
    raise config_lib.ConfigError(
      f'rank {rank} has other training data than rank 0: '
      + (text or f'examples {block * size} to {(block + 1) * size - 1} differ')
    )


def describe(source: source_lib.Source) -> dict:
  """Returns JSON values that are equal where the examples are."""
  total = len(source)
  files, labels = source.listing(), _labels(source)
  block = max(math.ceil(total / _BLOCKS), 1)
  digests = []
  for i in range(0, total, block):
    rows = slice(i, i + block)
    text = '\n'.join(files[rows]) if files is not None else ''
    digests.append(_digest(text, _bytes(labels, rows)))
  counts = []
  if labels is not None:
    counts = np.bincount(labels[labels >= 0], minlength=len(source.vocabulary)).tolist()
  return {
    'classes': list(source.vocabulary.names),
    'vocabulary': source.vocabulary.digest(),
    'examples': total,
    'counts': counts,
    'block': block,
    'digests': digests,
  }


def difference(values: dict, expected: dict) -> tuple[str, int | None]:
  """Compares two results of `describe`.

  Returns:
    The first difference in classes and counts, or ''; and the first block of
    examples that differ, None where none do.
  """
  names, other_names = values['classes'], expected['classes']
  for i, (name, other) in enumerate(zip(names, other_names)):
    if name != other:
      return f'class {i} is {name!r}, there it is {other!r}', None
  for what, count, other in (
    ('classes', len(names), len(other_names)),
    *(
      (f'examples of the class {name!r}', count, other)
      for name, count, other in zip(names, values['counts'], expected['counts'])
    ),
    ('examples', values['examples'], expected['examples']),
  ):
    if count != other:
      return f'{count} {what}, there {other}', None
  if values['vocabulary'] != expected['vocabulary']:
    return 'the adjectives and nouns of the pairs are in another order', None
  digests = zip(values['digests'], expected['digests'])
  return '', next((i for i, (a, b) in enumerate(digests) if a != b), None)


def _labels(source):
  """(n,) int32; None where they take long, or come with the config."""
  if source.kind == 'synthetic':
    return None
  if source.listing() is None and len(source) > _MAX_COUNTED:
    return None
  return np.asarray(source.labels(), np.int32)


def _block_names(source, block):
  """The (file, class) of each example of a block; [] of no block."""
  if block is None:
    return []
  size = describe(source)['block']
  rows = range(block * size, min((block + 1) * size, len(source)))
  files, labels = source.listing(), _labels(source)
  names = source.vocabulary.names
  return [
    (
      files[i] if files is not None else '',
      names[labels[i]] if labels is not None and labels[i] >= 0 else '',
    )
    for i in rows
  ]


def _first_example(values, expected):
  """Says which example of a block is the first to differ."""
  texts = (
    [' of the class '.join(repr(text) for text in x if text) for x in pair]
    for pair in zip(values, expected)
  )
  text, other = next(pair for pair in texts if pair[0] != pair[1])
  return f'one example is {text}, there it is {other}'


def _bytes(labels, rows):
  return b'' if labels is None else labels[rows].tobytes()


def _digest(text, more=b''):
  # A file's name that is not UTF-8 holds surrogates.
  data = text.encode(errors='surrogatepass') + b'\0' + more
  return hashlib.sha256(data).hexdigest()[:16]
