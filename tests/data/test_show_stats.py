"""Tests of show --stats: counts, balance, sentiment and emotions of sets."""

import os

import pytest

from anp_jax.data import vocabulary
from anp_jax.data.show import stats
from tests import showing


@pytest.fixture
def tree(tmp_path):
  """The flags of a tree of one-coloured PNG files in tmp_path."""
  return showing.tree_flags(tmp_path / 'tree')


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


def test_records_that_cannot_be_read_do_not_count():
  classes = vocabulary.Vocabulary(('tall_tree', 'red_car')).with_pairs('yes')
  counts = stats.count(showing.LabelSource(classes, [1, 0, -1, -2, 1, 7]))
  assert counts.images == 6
  assert counts.classes.tolist() == [1, 2]
  assert counts.adjectives.tolist() == [2, 1]  # red, tall
  assert counts.nouns.tolist() == [2, 1]  # car, tree
  lines = [line.split() for line in stats.balance([counts, counts])]
  assert ['images', 'without', 'a', 'class', '3', '3'] in lines


def test_a_split_of_damaged_records_has_no_images():
  classes = vocabulary.Vocabulary(('a', 'b'))
  assert stats.count(showing.LabelSource(classes, [-2])).classes.tolist() == [0, 0]


def test_a_label_that_is_no_class_has_a_name():
  classes = vocabulary.Vocabulary(('a', 'b'))
  names = [stats.class_name(classes, i) for i in (-1, 0, 1, 2)]
  assert names == ['label -1', 'a', 'b', 'label 2']


# Lexicons.


def test_sentiment_is_a_mean_over_images(tree, tmp_path, capsys):
  file = tmp_path / 'mvso.csv'
  file.write_text('old_car,-1.5\nbig_cat,0.5\nbig_dog,2\nfar_away,-2\n')
  lines = _stats(tree, capsys, f'--sentiment={file}')
  start = lines.index('sentiment: of 3 of 4 classes')
  # Training (-1.5 + 2 * 0.5 + 3 * 2) / 6, evaluation (3 * -1.5 + 0.5) / 4.
  assert (
    lines[start : start + 15]
    == """\
sentiment: of 3 of 4 classes
not of old_dog

                  training  evaluation
mean over images    +0.917      -1.000

most negative  sentiment  training  evaluation
old_car           -1.500         1           3
big_cat           +0.500         2           1
big_dog           +2.000         3           0

most positive  sentiment  training  evaluation
big_dog           +2.000         3           0
big_cat           +0.500         2           1
old_car           -1.500         1           3
""".splitlines()
  )


def test_only_the_five_most_are_named(tmp_path, capsys):
  names = [f'adjective_n{i}' for i in range(12)]
  flags = showing.save_arrays(tmp_path / 'set.npz', range(6), range(12), names)
  file = tmp_path / 'vso.txt'
  file.write_text(
    '1. adjective [sentiment: 0.00] [#images: 1]\n'
    + ''.join(f'\t{n} [sentiment: {-(i % 7) / 4}] [#imgs: 2]\n' for i, n in enumerate(names))
  )
  lines = _stats(flags, capsys, f'--sentiment={file}')
  assert 'sentiment: of 12 of 12 classes' in lines
  assert not any(line.startswith('not of') for line in lines)
  tables = [i for i, line in enumerate(lines) if line.startswith('most ')]
  pairs = [[line.split()[0][10:] for line in lines[i + 1 : i + 6]] for i in tables]
  # Scores 0 to -6 quarters twice; equal ones in the order of the classes.
  assert pairs == [['n6', 'n5', 'n4', 'n11', 'n3'], ['n0', 'n7', 'n1', 'n8', 'n2']]
  assert all(lines[i + 6] == '' for i in tables)


def test_emotions_are_shares_of_images(tree, tmp_path, capsys):
  file = tmp_path / 'emotions.csv'
  names = [f'e{i}' for i in range(24)]
  rows = [('ANP', *names)]
  for pair, shares in (('big_cat', {3: 0.75, 5: 0.25}), ('old_car', {5: 1}), ('no_pair', {0: 1})):
    rows.append((pair, *(str(shares.get(i, 0)) for i in range(24))))
  file.write_text('\n'.join(map(','.join, rows)))
  lines = _stats(tree, capsys, f'--emotions={file}')
  start = lines.index('emotions: of 2 of 4 classes')
  assert lines[start + 1] == 'not of big_dog, old_dog'
  # Training: big_cat 2 images, old_car 1. Evaluation: 1 and 3.
  assert [line.split() for line in lines[start + 5 : start + 8]] == [
    ['e3', '50.0%', '18.8%', '66.7%', '25.0%'],
    ['e5', '50.0%', '81.2%', '33.3%', '75.0%'],
    ['e0', '0.0%', '0.0%', '0.0%', '0.0%'],
  ]
  assert lines[start + 4].split('  ')[-3:] == [
    'evaluation',
    'strongest in training',
    'strongest in evaluation',
  ]
  assert lines[start + 5 + 24] == ''


def test_a_lexicon_of_other_pairs_covers_no_class(tree, tmp_path, capsys):
  file = tmp_path / 'mvso.csv'
  file.write_text('far_away,-2\n')
  lines = _stats(tree, capsys, f'--sentiment={file}')
  start = lines.index('sentiment: of 0 of 4 classes')
  assert lines[start + 1] == 'not of big_cat, big_dog, old_car, old_dog'
  assert lines[start + 2 : start + 4] == ['', 'adjectives  training  evaluation']


@pytest.mark.filterwarnings('error')
def test_a_split_without_images_of_the_lexicon_has_no_mean(tree, tmp_path, capsys):
  file = tmp_path / 'mvso.csv'
  file.write_text('big_dog,1\n')
  lines = _stats(tree, capsys, f'--sentiment={file}')
  assert 'mean over images    +1.000           -' in lines


@pytest.mark.skipif(
  not showing.CLOTHING.is_dir(), reason='the photographs of clothing are not here'
)
def test_photographs_are_counted_by_class(tmp_path, capsys):
  flags = [
    showing.CONFIG,
    '--config.data.source=folder',
    f'--config.data.path={showing.CLOTHING}',
    '--config.data.eval_split=test',
  ]
  rows = [line.split() for line in _stats(flags, capsys)]
  for name in os.listdir(showing.CLOTHING / 'test'):
    files = [len(list((showing.CLOTHING / s / name).iterdir())) for s in ('train', 'test')]
    assert [name, *map(str, files)] in rows
