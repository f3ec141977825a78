"""Tests of image_folder: the files of a split, from trees and split files."""

import hashlib

import numpy as np
import pytest

from anp_jax.data import sources
from anp_jax.data.image_files import images
from anp_jax.data.sources import image_folder, skipped_files
from tests import builders, mutations

_ANPS = ('happy_dog', 'misty_morning', 'happy_morning')
_ADJECTIVES = ('misty', 'happy', 'sad')
_NOUNS = ('morning', 'dog')


def _tree(root, files):
  return str(builders.write_tree(root, {file: file.encode() for file in files}))


def _lines(path, lines, end='\n'):
  path.write_text(end.join(lines), newline='')
  return str(path)


@pytest.fixture
def lists(tmp_path):
  return ','.join(
    _lines(tmp_path / f'{name}.txt', lines)
    for name, lines in (('anps', _ANPS), ('adjectives', _ADJECTIVES), ('nouns', _NOUNS))
  )


def _refused(words, *args, **kwargs):
  builders.assert_refused(words, image_folder.find, *args, **kwargs)


# Trees.


def test_lists_give_a_tree_its_ids_and_choose_its_folders(tmp_path, lists, caplog):
  classes = ('misty_morning/2', 'misty_morning/1', 'happy_dog/3', 'old_car/4', 'a_b/5')
  root = _tree(tmp_path / 'tree', [f'train/{name}.jpg' for name in classes])
  for _ in range(2):
    listing = image_folder.find(root, 'train', lists)
  assert listing.vocabulary.names == _ANPS
  assert listing.vocabulary.adjectives == _ADJECTIVES
  assert listing.vocabulary.nouns == _NOUNS
  assert listing.vocabulary.noun_ids().tolist() == [1, 0, 0]
  assert listing.files == ('happy_dog/3.jpg', 'misty_morning/1.jpg', 'misty_morning/2.jpg')
  assert listing.labels.tolist() == [0, 1, 1] and listing.labels.dtype == np.int32
  assert listing.root == f'{root}/train'
  (record,) = caplog.records  # once
  assert '2 of 4 folders' in record.getMessage() and 'a_b' in record.getMessage()
  root = _tree(tmp_path / 'other', ['train/hapy_dog/1.jpg'])
  _refused([f'{root}/train', "'hapy_dog'", "mean 'happy_dog'"], root, 'train', lists)


def test_classes_of_the_other_split_count_too(tmp_path):
  root = _tree(tmp_path / 'tree', [f'{c}.jpg' for c in ('train/a/1', 'train/c/1')])
  _tree(tmp_path / 'tree', ['validation/b/1.jpg', 'validation/c/2.jpg'])
  train = image_folder.find(root, 'train', other_splits=('validation',))
  other = image_folder.find(root, 'validation', other_splits=('train',))
  assert train.vocabulary.names == other.vocabulary.names == ('a', 'b', 'c')
  assert train.labels.tolist() == [0, 2] and other.labels.tolist() == [1, 2]
  # A split that is not there is refused where it is opened.
  alone = image_folder.find(root, 'train', other_splits=('x',))
  assert alone.vocabulary.names == ('a', 'c')


def test_files_that_are_left_out(tmp_path):
  """Each by its suffix or place, with the first; hidden ones are nobody's."""
  names = '1.webp 2.JPG 3.TIFF 4.jfif 5.txt 6.webp plain .hid.svg x/7.jpg x/y/8.PNG x/9.txt'
  names = [*names.split(), '.z/10.jpg', '11.bmp', '12.gif', '13.png', '._2.JPG']
  files = [f'train/a/{name}' for name in names]
  files += ['train/b/0.jpg', 'train/b/1.txt', 'train/loose.gif', 'other.jpg']
  root = _tree(tmp_path / 'tree', files)
  split = image_folder.find(root, 'train')
  images = ('a/11.bmp', 'a/12.gif', 'a/13.png', 'a/2.JPG', 'a/4.jfif', 'b/0.jpg')
  assert split.files == images
  hint = '; prepare converts them'
  assert split.left_out == (
    f'{root}/train: left out '
    f'2 .txt (first a/5.txt), 2 .webp (first a/1.webp{hint}), '
    '2 in deeper folders (first a/x/7.jpg), '
    f'1 .tiff (first a/3.TIFF{hint}), '
    '1 outside of class folders (first loose.gif), '
    '1 without a suffix (first a/plain)'
  )
  every = (*image_folder.SUFFIXES, *image_folder.CONVERTIBLE)
  split = image_folder.find(root, 'train', suffixes=every)
  assert {*split.files} == {*images, 'a/1.webp', 'a/3.TIFF', 'a/6.webp'}
  assert 'webp' not in split.left_out and 'tiff' not in split.left_out
  assert image_folder.find(_tree(tmp_path / 't', ['a/1.jpg']), '.').left_out == ''
  for link in ('t/round', 't/a/round'):
    (tmp_path / link).symlink_to('round')
  assert image_folder.find(tmp_path / 't', '.').files == ('a/1.jpg',)


def test_both_parts_of_a_tree_leave_out_its_files(tmp_path, config, caplog):
  files = [f'{c}/{i}.jpg' for c in 'ab' for i in range(20)]
  root = _tree(tmp_path / 'tree', [*files, 'a/x.svg', 'b/y.svg', 'b/z.svg'])
  texts = {image_folder.find(root, s).left_out for s in ('train', 'validation')}
  assert texts == {f'{root}: left out 3 .svg (first a/x.svg)'}
  for split in ('train', 'validation'):
    config.data.source, config.data.path = 'folder', root
    sources.open_split(config, split, split)
  assert caplog.text.count('left out') == 1  # one line for both splits


@pytest.mark.parametrize('has', [True, False])
def test_heic_is_left_out_with_what_would_read_it(tmp_path, monkeypatch, has):
  monkeypatch.setattr(images, 'has_heif', lambda: has)
  root = _tree(tmp_path / 'tree', ['a/1.HEIC', 'a/2.jpg'])
  training = image_folder.find(root, '.')
  assert training.files == ('a/2.jpg',)
  hint = 'prepare converts them' if has else 'pip install pillow-heif'
  assert '1 .heic (first a/1.HEIC; ' in training.left_out
  assert hint in training.left_out
  suffixes = (*image_folder.SUFFIXES, *image_folder.convertible())
  assert len(image_folder.find(root, '.', suffixes=suffixes).files) == 1 + has


def test_many_suffixes_do_not_fill_the_line():
  counts = skipped_files.SkippedFiles()
  for i in range(30):
    counts.add(f'{i}.x{i:02}')
  assert len(counts) == 30
  text = counts.text({})
  assert text.startswith('1 .x00 (first 0.x00), 1 .x01 ')
  assert text.endswith(', 1 .x07 (first 7.x07), 22 others')


# Names and shapes of trees.


@pytest.mark.parametrize(
  'folder, split',
  [
    *((name, 'train') for name in ('Train', 'TRAINING')),
    *((name, 'validation') for name in ('Validation', 'val', 'valid', 'VAL')),
    *((name, 'test') for name in ('Test', 'testing')),
    ('validation', 'val'),
    ('Mine', 'mine'),
  ],
)
def test_split_folders_by_their_usual_names(tmp_path, folder, split):
  root = _tree(tmp_path / 'tree', [f'{folder}/a/1.jpg', 'other/b/2.jpg'])
  listing = image_folder.find(root, split, other_splits=('Other',))
  assert (listing.root, listing.files) == (f'{root}/{folder}', ('a/1.jpg',))
  assert listing.vocabulary.names == ('a', 'b')


@pytest.mark.parametrize('name', ['Train', 'Testing', 'valid'])
def test_a_class_may_have_a_name_like_that_of_a_split(tmp_path, name):
  """It has images, where a split has class folders."""
  files = [f'{c}/{i}.jpg' for c in (name, 'car') for i in range(40)]
  root = _tree(tmp_path / 'tree', files)
  listings = [image_folder.find(str(root), s) for s in ('train', 'validation')]
  for part in listings:
    assert part.vocabulary.names == tuple(sorted([name, 'car']))
  assert sorted(listings[0].files + listings[1].files) == sorted(files)


def test_split_folders_that_are_not_the_one(tmp_path):
  root = _tree(tmp_path / 'tree', ['Train/a/1.jpg', 'Test/a/2.jpg'])
  _refused(
    ["no split 'validation'", 'it has Train, Test', 'config.data.eval_split'], root, 'validation'
  )
  _tree(tmp_path / 'tree', ['val/a/1.jpg', 'Valid/a/2.jpg'])
  _refused(["several splits that may be 'validation'", 'Valid, val'], root, 'validation')
  none = _tree(tmp_path / 'none', ['validation/a/1.jpg', 'test/a/1.jpg'])
  text = builders.assert_refused(['no split'], image_folder.find, none, 'train')
  assert text.endswith('config.data.eval_split')  # and no wrong advice
  # The name itself comes before others, in its own case before others.
  assert image_folder.find(root, 'VALID').root == f'{root}/Valid'
  _tree(tmp_path / 'tree', ['Validation/a/1.jpg'])
  assert image_folder.find(root, 'validation').root == f'{root}/Validation'
  alone = _tree(tmp_path / 'alone', ['train/a/1.jpg'])
  words = ['(it has train)', f'config.data.path={alone}/train']
  _refused(["no split 'validation'", *words], alone, 'validation')


@pytest.mark.parametrize(
  'files, words',
  [
    ('1.jpg 2.jpg notes.txt', ['no class folders', 'left out 2 outside of class folders (first 1']),
    ('images/a/1.jpg images/b/2.JPG', ['left out 2 in deeper folders (first images/a/1.jpg)']),
    ('images/a/1.jpg images/b/2.JPG', ['is config.data.path=ROOT/images meant?']),
    ('train/x/a/1.jpg train/x/b/2.jpg', ['ROOT/train has no images', 'ROOT/SPLIT/CLASS/IMAGE']),
    ('train/x/a/1.jpg train/x/b/2.jpg', ['2 in deeper folders (first x/a/1.jpg)']),
    ('train/1.jpg validation/2.jpg', ['ROOT/train has no class folders', 'first 1.jpg']),
    ('a/1.svg b/2.svg', ['no images', 'left out 2 .svg (first a/1.svg)']),
    ('a/.hidden.jpg', ['no images in its class folders; expected']),
    ('', ['is not a folder']),
  ],
)
def test_trees_of_another_shape(tmp_path, files, words):
  root = _tree(tmp_path / 'tree', files.split())
  _refused([w.replace('ROOT', root) for w in words], root, 'train')


def test_a_tree_too_small_to_be_divided(tmp_path):
  """By the documented rule a/1.jpg is one of the training images."""
  root = _tree(tmp_path / 'tree', ['a/1.jpg'])
  digest = hashlib.sha256(b'a/1.jpg').digest()
  assert int.from_bytes(digest[:8], 'big') < 0.8 * 2**64
  assert image_folder.find(root, 'train').files == ('a/1.jpg',)
  _refused(['none of the 1 images falls into validation'], root, 'validation')


# Split files.

_FOUR = [
  'happy_dog/1_a.jpg 0 1 1',
  'misty_morning/2_b.jpg 1 0 0',
  'happy_morning/3_c.jpg 2 0 1',
  'happy_dog/4_d.jpg 0 1 1',
]


def _split(tmp_path, lines, name='train.txt', end='\n'):
  """A tree with the files of all lines, and the split file in it."""
  root = _tree(tmp_path / 'tree', [x.split(' ')[0] for x in lines if x.split(' ')[0]])
  return root, _lines(tmp_path / name, lines, end)


@pytest.mark.parametrize('end', ['\n', '\r\n'])
@pytest.mark.parametrize('columns', [2, 4])
def test_split_file(tmp_path, lists, columns, end):
  lines = [' '.join(x.split(' ')[:columns]) for x in _FOUR]
  root, file = _split(tmp_path, lines, end=end)
  listing = image_folder.find(root, file, lists)
  assert listing.files == tuple(x.split(' ')[0] for x in lines)  # in its order
  assert listing.labels.tolist() == [0, 1, 2, 0]
  assert listing.labels.dtype == np.int32
  assert listing.vocabulary.adjectives == _ADJECTIVES
  assert (listing.root, listing.name) == (root, file)


def test_split_file_names_its_own_classes(tmp_path):
  """The order of nouns and adjectives is that of the ids in the file."""
  root, file = _split(tmp_path, ['happy_dog/1_a.jpg 0 1 1', 'misty_morning/2_b.jpg 1 0 0'])
  _lines(tmp_path / 'test.txt', ['sad_cat/x.jpg 2 2 2'])
  other = str(tmp_path / 'test.txt')
  listing = image_folder.find(root, file, other_splits=(other,))
  assert listing.vocabulary.names == ('happy_dog', 'misty_morning', 'sad_cat')
  assert listing.vocabulary.adjectives == ('misty', 'happy', 'sad')
  assert listing.vocabulary.nouns == ('morning', 'dog', 'cat')
  plain = image_folder.find(*_split(tmp_path, ['z/1.jpg 0', 'a/2.jpg 1'], 'p.txt'))
  assert plain.vocabulary.names == ('z', 'a')
  assert plain.vocabulary.adjectives == ()


def test_split_file_is_looked_for_in_the_root_too(tmp_path, monkeypatch):
  root, _ = _split(tmp_path, _FOUR)
  _lines(tmp_path / 'tree' / 'inside.txt', _FOUR)
  assert image_folder.find(root, 'inside.txt').labels.tolist() == [0, 1, 2, 0]
  monkeypatch.chdir(tmp_path)
  assert image_folder.find('tree', 'train.txt').labels.tolist() == [0, 1, 2, 0]


def test_paths_may_hold_blanks_and_no_class(tmp_path, lists):
  root, file = _split(tmp_path, _FOUR)
  _tree(tmp_path / 'tree', ['all images/1 a.jpg'])
  _lines(tmp_path / 'train.txt', ['all images/1 a.jpg 2 0 1'])
  listing = image_folder.find(root, file, lists)
  assert listing.files == ('all images/1 a.jpg',)
  assert listing.labels.tolist() == [2]


_FORM = 'PATH ANP_ID NOUN_ID ADJECTIVE_ID, with single spaces'


@pytest.mark.parametrize(
  'line, words',
  [
    ('happy_dog/9.jpg 1 0 0', ["'misty_morning'", "'happy_dog'", 'class 0']),
    ('happy_dog/9.jpg 3 0 0', ['class 3', '0 to 2']),
    ('happy_dog/9.jpg 0 0 1', ['noun 0', "'happy_dog' is 1"]),
    ('happy_dog/9.jpg 0 1 2', ['adjective 2', "'happy_dog' is 1"]),
    *((f'happy_dog/9.jpg {ids}', [_FORM]) for ids in ('0', '0 1 x', '0 1 -1', '0  1 1', '0 1 ١')),
    (f'happy_dog/9.jpg 0 {"1" * 5000} 1', [_FORM]),
    *((line, [_FORM]) for line in (' happy_dog/9.jpg 0 1 1', '0 1 1', '')),
    ('happy_dog/1_a.jpg 0 1 1', ["'happy_dog/1_a.jpg'", 'line 1']),
    ('happy_dog/1_a.jpg 2 0 1', ["'happy_dog/1_a.jpg'", 'line 1']),
  ],
)
def test_bad_lines_are_named(tmp_path, lists, line, words):
  lines = [*_FOUR[:3], line, _FOUR[3]]
  root, file = _split(tmp_path, lines)
  _refused([f'{file}:4: ', *words], root, file, lists)


@pytest.mark.parametrize(
  'lines, words',
  [
    (['a_b/1.jpg 0 0 0', 'a_c/2.jpg 1 0 0'], [':2: ', 'noun 0', "'c'", "'b'"]),
    (['a_b/1.jpg 0', 'a_c/2.jpg 0'], [':2: ', 'class 0', "'a_c'", "'a_b'"]),
    (['a_b/1.jpg 0', 'a_b/2.jpg 1'], ["class 1: 'a_b' repeats class 0"]),
    (['a_b/1.jpg 1', 'a_c/2.jpg 2'], ['class 0', 'config.data.lists']),
    (['a_b/1.jpg 0 0 1', 'a_c/2.jpg 1 1 1'], ['adjective 0', 'config.data.lists']),
    (['1.jpg 0'], [':1: ', 'config.data.lists']),
    (['dog/1.jpg 0 0 0'], ["class 0: 'dog'", 'adjective_noun']),
  ],
)
def test_ids_that_do_not_name_classes(tmp_path, lines, words):
  root, file = _split(tmp_path, lines)
  _refused([file, *words], root, file)


def test_files_that_are_not_there(tmp_path, lists):
  root, file = _split(tmp_path, _FOUR)
  _refused([tmp_path / 'none'], str(tmp_path / 'none'), 'train')
  _refused(['none.txt'], root, 'none.txt')
  _refused([f'{file}:1: ', str(tmp_path)], str(tmp_path), file, lists)
  _refused([file, 'empty'], root, _lines(tmp_path / 'train.txt', ['', '']))
  (tmp_path / 'train.txt').write_bytes(b'a\xff/1.jpg 0\n')
  _refused([f'{file}:1', 'UTF-8'], root, file)


def test_damaged_split_files_are_refused_in_one_line_or_mean_what_they_say(tmp_path, lists):
  root, file = _split(tmp_path, _FOUR)

  def check(listing):
    assert len(listing.files) == len(listing.labels) == len(set(listing.files))
    for name, label in zip(listing.files, listing.labels):
      folder = name.split('/')[-2] if '/' in name else ''
      # A folder that is one of the classes is the class.
      assert folder not in _ANPS or folder == _ANPS[label]

  data = '\n'.join(_FOUR).encode()
  mutations.check_reader(file, data, lambda path: image_folder.find(root, path, lists), check)
