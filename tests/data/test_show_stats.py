"""Tests of show --stats: counts and balance of sets."""

from anp_jax.data import vocabulary
from anp_jax.data.show import stats
from tests import image_sources, showing

# Counts.


def _stats(tree, capsys, *flags):
  return showing.printed([*tree, '--stats', *flags], capsys)


def test_counts_of_the_tree(tree, tmp_path, capsys):
  root = tmp_path / 'tree'
  assert (
    _stats(tree, capsys)
    == f"""\
training    {root}: train
evaluation  {root}: validation
classes     4 of 2 adjectives and 3 nouns

                                      training   evaluation
images                                       9            6
smallest class                     1 (old_car)  0 (big_dog)
middle class                       2 (big_cat)  1 (big_cat)
largest class           3 (old_dog and 1 more)  3 (old_car)
classes without images                       0            1
no image in evaluation: big_dog

adjectives  training  evaluation
big                5           1
old                4           5

nouns  training  evaluation
dog           6           2
cat           2           1
car           1           3

classes  training  evaluation
old_dog         3           2
big_dog         3           0
big_cat         2           1
old_car         1           3""".splitlines()
  )


def test_counts_of_plain_classes(tmp_path, capsys):
  names = [f'n{i}' for i in range(9)]
  flags = showing.save_arrays(tmp_path / 'set.npz', [3, 3, 1, 2], [8] * 1234, names)
  text = '\n'.join(_stats(flags, capsys))
  assert 'classes     9\n' in text
  assert 'no image in training: n0, n4, n5, n6, n7 and 1 more' in text
  assert 'adjective' not in text and 'noun' not in text
  rows = [line.split() for line in text.splitlines()]
  assert ['images', '4', '1,234'] in rows
  assert ['n8', '0', '1,234'] in rows
  assert [r[0] for r in rows[-9:]] == ['n3', 'n1', 'n2', 'n8', 'n0', 'n4', 'n5', 'n6', 'n7']


def test_equal_classes_are_not_told_apart(tmp_path, capsys):
  flags = showing.save_arrays(tmp_path / 'set.npz', [0, 1, 1, 0], [1, 0], ['a', 'b'])
  lines = [line.split() for line in _stats(flags, capsys)]
  assert ['smallest', 'class', '2', '(all)', '1', '(all)'] in lines
  assert ['largest', 'class', '2', '(all)', '1', '(all)'] in lines


class _Records(image_sources.Source):
  """A set whose labels are in its records."""

  def labels(self):
    return self.read(range(len(self)))[1]


def test_records_that_cannot_be_read_do_not_count():
  images = [b'', b'', b'', ValueError('this record is damaged'), b'', b'']
  source = _Records(images, [1, 0, -1, 0, 1, 7], ('tall_tree', 'red_car'))
  source.vocabulary = source.vocabulary.with_pairs('yes')
  counts = stats.count(source)
  assert counts.images == 6
  assert counts.classes.tolist() == [1, 2]
  rows = [line.split() for line in stats.tables([counts, counts])]
  for word, number in (('red', '2'), ('tall', '1'), ('car', '2'), ('tree', '1')):
    assert [word, number, number] in rows
  lines = [line.split() for line in stats.balance([counts, counts])]
  assert ['images', 'without', 'a', 'class', '3', '3'] in lines


def test_a_label_that_is_no_class_has_a_name():
  classes = vocabulary.Vocabulary(('a', 'b'))
  names = [stats.class_name(classes, i) for i in (-1, 0, 1, 2)]
  assert names == ['label -1', 'a', 'b', 'label 2']
