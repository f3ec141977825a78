"""Processes whose copies of a data set differ."""

from concurrent import futures
import threading

import pytest

from anp_jax import config as config_lib
from anp_jax.data import vocabulary
from anp_jax.data.sources import agreement
from tests import builders, coordinating, image_sources, opening, prepared


class _Listed(image_sources.Source):
  """Examples that have names and labels only."""

  def __init__(self, names, files, labels):
    super().__init__(labels, labels, names)
    self._files = files

  def listing(self):
    """All files; None: they have no names."""
    return self._files


def _check(*by_rank, kind='training', goes_on=False):
  """Checks each process's source; returns each one's error, or ''."""
  count = len(by_rank)
  values, barrier = [None] * count, threading.Barrier(count)

  def one(index):
    processes = coordinating.Gathering(index, values, barrier, goes_on)
    try:
      agreement.check(processes, **{kind: by_rank[index]})
    except config_lib.ConfigError as e:
      return str(e)
    return ''

  with futures.ThreadPoolExecutor(count) as pool:
    return list(pool.map(one, range(count)))


def _source(names=('fog', 'misty_morning', 'sun'), **changes):
  files = [f'{names[i % 3]}/{i:04d}.jpg' for i in range(1000)]
  labels = [i % 3 for i in range(1000)]
  for key, value in changes.items():
    if key == 'swap':
      files[value], files[value + 3] = files[value + 3], files[value]
    if key == 'label':
      labels[value], labels[value + 1] = labels[value + 1], labels[value]
    if key == 'drop':
      del files[value], labels[value]
  return _Listed(names, files, labels)


_DIFFER = 'names of files, their order or labels differ'


def test_the_same_examples_agree():
  assert _check(_source(), _source(), _source()) == ['', '', '']


@pytest.mark.parametrize(
  'other, text',
  [
    (
      _source(names=('fog', 'misty morning', 'sun')),
      "class 1 is 'misty morning', there it is 'misty_morning'",
    ),
    (_source(names=('fog', 'misty_morning', 'sun', 'z')), '4 classes, there 3'),
    (_source(drop=500), "332 examples of the class 'sun', there 333"),
    (_source(swap=500), _DIFFER),
    (_source(label=999 - 1), _DIFFER),
  ],
  ids=['renamed', 'more classes', 'missing', 'order', 'labels'],
)
@pytest.mark.parametrize('rank, kind', [(1, 'training'), (2, 'evaluation')])
def test_the_first_difference_is_named_by_all(other, text, rank, kind):
  by_rank = [_source(), _source(), _source()]
  by_rank[rank] = other
  assert (
    _check(*by_rank, kind=kind)
    == [f'rank {rank + 3} on node{rank} has other {kind} data than rank 3 on node0: ' + text] * 3
  )


def test_labels_without_files_differ():
  """The arrays of two nodes may, for example."""
  first = _Listed('ab', None, [0, 1, 1, 0])
  other = _Listed('ab', None, [0, 1, 0, 1])
  assert all(line.endswith(_DIFFER) for line in _check(first, other))


def test_the_order_of_the_factors_counts():
  """Adjective and noun heads give their scores in that order."""
  first, other = _source(), _source()
  first.vocabulary = vocabulary.Vocabulary(('a_x', 'b_x', 'b_y'))
  other.vocabulary = vocabulary.Vocabulary(('a_x', 'b_x', 'b_y'), ('b', 'a'), ('x', 'y'))
  assert 'adjectives and nouns' in _check(first, other)[1]


def test_a_worker_compares_with_the_first():
  expected = agreement.describe(_source())
  agreement.check_with(_source(), expected, 3)
  for other, text in (
    (_source(drop=1), "332 examples of the class 'misty_morning', there 333"),
    (_source(swap=500), _DIFFER),
  ):
    builders.assert_refused(f'^rank 3 has.*{text}', agreement.check_with, other, expected, 3)


def test_in_a_run_that_goes_on_only_the_one_with_other_data_ends():
  first, other, last = _check(_source(), _source(drop=1), _source(), goes_on=True)
  assert (first, last) == ('', '') and other.startswith('rank 4 on node1 has other training data')


@pytest.mark.parametrize('kind', ['training', 'evaluation'])
@pytest.mark.parametrize('count', [1, 2])
def test_an_example_without_a_label_is_named_at_the_start(count, kind):
  source = _source()
  source._labels[500] = -1
  text = 'test: example 500 has no label; expected a split'
  assert all(error.startswith(text) for error in _check(*[source] * count, kind=kind))


@pytest.mark.parametrize('cache, held_out', [('none', ()), ('none', ('red_car',)), ('mapped', ())])
def test_folders_of_two_nodes(config, tmp_path, cache, held_out):
  """Their roots may differ; the trees below them may not."""
  names = [
    f'{split}/{name}/{i}.png'
    for split in ('train', 'validation')
    for name in ('red_car', 'red_sky', 'old_car', 'old_sky')
    for i in range(3)
  ]
  renamed = [name.replace('train/old_sky/1', 'train/old_sky/01') for name in names]
  config.data.cache, config.data.held_out = cache, held_out
  opened = []
  for node, files in enumerate((names, names, renamed)):
    root = builders.write_tree(tmp_path / f'node{node}', dict.fromkeys(files, prepared.photo(0)))
    opened.append(opening.source(config, 'folder', root))
  assert _check(opened[0], opened[1]) == ['', '']
  assert _check(opened[0], opened[2])[0].endswith(_DIFFER)
