"""Whether all processes of a run read the same examples.

Each opens the data set where it runs: a copy on a node's own disk may have a
folder renamed, or an image missing.
"""

import hashlib
import json
from typing import TYPE_CHECKING

import numpy as np

from anp_jax import config as config_lib
from anp_jax.data.sources import source as source_lib

if TYPE_CHECKING:
  from anp_jax import cluster

# A pass over the labels of prepared records takes 24 us each.
_MAX_COUNTED = 200_000


def check(processes: 'cluster.Processes', **sources: source_lib.Source) -> None:
  """Refuses processes whose data differ, and examples without a label, before the first step.

  No image is read: names of classes, labels and names of files count, as far as
  the sources know them.

  Args:
    processes: the run's processes; all of them call it alike.
    **sources: data by their name in messages: training, evaluation.

  Raises:
    ConfigError: on all processes, naming the first rank whose data differ from
      those of rank 0, and the first difference; at an example without a label,
      naming it. One process makes no pass over prepared records for it: the
      batch with the example is refused.
  """
  if processes.count == 1:
    for source in sources.values():
      _labels(source, most=0)
    return
  for kind, source in sources.items():
    description = describe(source)
    digests = processes.gather(_digest(json.dumps(description)))
    other = next((i for i, d in enumerate(digests) if d != digests[0]), 0)
    if not other:
      continue
    # Only two processes send more: names of classes may be a megabyte.
    is_shown = processes.index in (0, other)
    details = processes.gather(description if is_shown else None)
    if not processes.is_ended_by(other):
      continue
    raise config_lib.ConfigError(
      f'{processes.name(other)} has other {kind} data than {processes.name(0)}: '
      f'{difference(details[other], details[0])}'
    )


def check_with(source: source_lib.Source, expected: dict, rank: int) -> None:
  """Refuses training data that are not those of rank 0.

  Args:
    source: training data of this process.
    expected: result of `describe` on rank 0.
    rank: rank of this process.

  Raises:
    ConfigError: naming the rank and the first difference.
  """
  text = difference(describe(source), expected)
  if text:
    raise config_lib.ConfigError(f'rank {rank} has other training data than rank 0: {text}')


def describe(source: source_lib.Source) -> dict:
  """JSON values that are equal where the examples are; refuses one without a label."""
  files, labels = source.listing(), _labels(source)
  text = '' if files is None else '\n'.join(files)
  counts = []
  if labels is not None:
    counts = np.bincount(labels, minlength=len(source.vocabulary)).tolist()
  return {
    'classes': list(source.vocabulary.names),
    'vocabulary': source.vocabulary.digest(),
    'examples': len(source),
    'counts': counts,
    'digest': _digest(text, b'' if labels is None else labels.tobytes()),
  }


def fingerprint(source: source_lib.Source) -> dict:
  """The properties of a source that a resumed run must find again, without a pass over records."""
  labels = _labels(source, most=0)
  return {
    'examples': len(source),
    'classes': len(source.vocabulary),
    'names': source.vocabulary.digest(),
    'labels': '' if labels is None else _digest('', labels.tobytes()),
  }


def difference(values: dict, expected: dict) -> str:
  """The first difference of two results of `describe`; '' without one."""
  names = values['classes']
  if text := _class_difference(names, expected['classes']):
    return text
  for what, count, other in (
    *(
      (f'examples of the class {name!r}', count, other)
      for name, count, other in zip(names, values['counts'], expected['counts'])
    ),
    ('examples', values['examples'], expected['examples']),
  ):
    if count != other:
      return f'{count} {what}, there {other}'
  if values['vocabulary'] != expected['vocabulary']:
    return 'the adjectives and nouns of the pairs are in another order'
  if values['digest'] != expected['digest']:
    return 'names of files, their order or labels differ'
  return ''


def check_classes(source: source_lib.Source, train: source_lib.Source) -> None:
  """Raises ConfigError for other classes than those of the training data, naming the first."""
  text = _class_difference(source.vocabulary.names, train.vocabulary.names)
  if text:
    raise config_lib.ConfigError(f'{source.name} has other classes than {train.name}: {text}')


def _class_difference(names, other_names):
  """The first difference of names of classes; '' without one."""
  for i, (name, other) in enumerate(zip(names, other_names)):
    if name != other:
      return f'class {i} is {name!r}, there it is {other!r}'
  count, other_count = len(names), len(other_names)
  return f'{count} classes, there {other_count}' if count != other_count else ''


def _labels(source, most=_MAX_COUNTED):
  """(n,) int32; None where they come with the config, or from a pass over more than `most`."""
  if source.kind == 'synthetic':
    return None
  if source.listing() is None and len(source) > most:
    return None
  labels = np.asarray(source.labels(), np.int32)
  source_lib.check_labelled(source, labels)
  return labels


def _digest(text, more=b''):
  # A file's name that is not UTF-8 holds surrogates.
  data = text.encode(errors='surrogatepass') + b'\0' + more
  return hashlib.sha256(data).hexdigest()[:16]
