"""Tests of the one rule for labels, whatever kind of set they come in."""

import contextlib
import os
import unicodedata

import jax
import numpy as np
import pytest

from anp_jax.data import sources
from anp_jax.data.input import stream as stream_lib
from anp_jax.data.sources import image_folder
from tests import builders, listed_sets, opening, prepared

_KINDS = ('list', 'tar', 'hf', 'arrays')


def _write(folder, config, kind, labels):
  """A set of one kind whose examples have these labels."""
  if kind == 'arrays':
    config.data.source, config.data.path = 'arrays', str(folder)
    np.save(folder / 'train_images.npy', np.zeros((len(labels), 5, 5, 3), np.uint8))
    np.save(folder / 'train_labels.npy', np.array(labels))
  elif kind == 'folder':
    config.data.source, config.data.path = kind, listed_sets.write(folder, kind, labels)
  else:
    config.data.source = listed_sets.write(folder, kind, labels)


def _labels(folder, config, kind, labels):
  _write(folder, config, kind, labels)
  source = sources.open_source(config, True)
  return source.labels().tolist(), source.vocabulary.names


def _refused(folder, config, kind, labels):
  _write(folder, config, kind, labels)
  return builders.refusal(sources.open_source, config, True)


@pytest.mark.parametrize('kind', _KINDS)
def test_whole_floats_are_numbers(tmp_path, config, kind):
  got = _labels(tmp_path, config, kind, [3.0, 0.0, 1.0, 3.0])
  assert got == ([3, 0, 1, 3], ('class0', 'class1', 'class2', 'class3'))


@pytest.mark.parametrize('kind', ['list', 'tar', 'arrays'])
def test_minus_one_is_no_class(tmp_path, config, kind):
  text = _refused(tmp_path, config, kind, [0, 1, -1, 1])
  assert '-1' in text and 'expected 0' in text


@pytest.mark.parametrize('label', [-1, -1.0, None])
def test_minus_one_has_no_label_in_a_table_of_hugging_face(tmp_path, config, label):
  labels, names = _labels(tmp_path, config, 'hf', [0, 1, label])
  assert labels == [0, 1, -1] and names == ('class0', 'class1')


@pytest.mark.parametrize('kind', ['list', 'tar'])
def test_minus_one_may_be_the_name_of_a_listed_class(tmp_path, config, kind):
  (tmp_path / 'classes.txt').write_text('-1\n0\n1\n')
  labels, names = _labels(tmp_path, config, kind, [0, 1, -1])
  assert labels == [1, 2, 0] and names == ('-1', '0', '1')


@pytest.mark.parametrize('kind', _KINDS)
def test_numbers_that_are_ids_are_refused(tmp_path, config, kind):
  ids = [4000180, 4000181, 4000182, 4000183, 4000184, 4000185]
  text = _refused(tmp_path, config, kind, ids)
  assert '6 classes among 4,000,186 numbers; is it an id?' in text


@pytest.mark.parametrize('kind', _KINDS)
def test_some_numbers_may_be_unused(tmp_path, config, kind):
  labels, names = _labels(tmp_path, config, kind, [0, 9999])
  assert labels == [0, 9999] and len(names) == 10_000


@pytest.mark.parametrize('text', [b'\x03\0\0\0', b'a\x1b[31m', b'a\nb', b'\n'])
def test_a_binary_class_is_refused(tmp_path, config, text):
  assert '0.cls' in _refused(tmp_path, config, 'tar', [text, b'1'])


@pytest.mark.parametrize('kind', ['folder', 'list', 'hf'])
def test_a_control_character_is_refused(tmp_path, config, kind):
  text = _refused(tmp_path / 'set', config, kind, ['cat', 'd\x1b[31mog'])
  assert 'control character' in text and '\x1b' not in text


# Folders.


def _tree(folder, names):
  return builders.write_tree(folder, {name: prepared.photo(0) for name in names})


def _folder(config, root):
  image_folder.warn_once.cache_clear()
  return opening.source(config, 'folder', root)


def test_folders_of_programs_are_no_classes(tmp_path, config):
  foreign = ('__MACOSX', '@eaDir', 'lost+found', '.ipynb_checkpoints')
  root = _tree(
    tmp_path / 'tree',
    [f'train/{c}/1.jpg' for c in ('cat', 'dog', *foreign)] + ['train/cat/@eaDir/1.jpg/thumb.jpg'],
  )
  source = _folder(config, root)
  assert source.vocabulary.names == ('cat', 'dog') and len(source) == 2


@pytest.mark.parametrize('splits', [('train', 'validation'), ('.',)])
def test_folders_without_an_image_are_left_out_by_name(tmp_path, config, caplog, splits):
  """A class may still have images in one split alone."""
  names = [
    f'{s}/{c}/{i}.jpg' for s in splits for i in range(20) for c in ('old_cat', 'old_dog', 'new_dog')
  ]
  root = _tree(tmp_path / 'tree', names)
  for split in splits:
    (root / split / 'tmp').mkdir()
    builders.write_tree(root / split / 'docs' / 'deep', {'a.md': 'text'})
  if 'validation' in splits:
    _tree(root, ['validation/new_cat/1.jpg'])
    (root / 'train' / 'new_cat').mkdir()
  source = _folder(config, root)
  assert source.vocabulary.is_anp
  assert source.vocabulary.names == tuple(
    sorted({'old_cat', 'old_dog', 'new_dog'} | ({'new_cat'} if 'validation' in splits else set()))
  )
  evaluation = sources.open_source(config, False)
  assert evaluation.vocabulary == source.vocabulary
  assert caplog.text.count('are no classes: docs, tmp') == 1


@pytest.mark.parametrize('kind', ['folder', 'list', 'tar', 'hf'])
def test_one_name_that_is_no_pair_among_pairs_is_named(tmp_path, config, kind):
  text = _refused(tmp_path / 'set', config, kind, ['old_cat', 'old_dog', 'new_dog', 'hat'])
  assert "'hat' is not an adjective_noun pair" in text
  assert '3 of 4' in text and 'config.data.pairs=no' in text
  config.data.pairs = 'no'
  assert len(sources.open_source(config, True).vocabulary) == 4


def test_names_that_look_alike_are_named(tmp_path, config, caplog):
  composed = 'caf\xe9'
  names = ['Cat', 'cat', composed, unicodedata.normalize('NFD', composed)]
  root = _tree(tmp_path / 'tree', [f'train/{n}/1.jpg' for n in names])
  assert len(_folder(config, root).vocabulary) == 4
  assert "'Cat' and 'cat' differ by case" in caplog.text
  assert r"'cafe\u0301' and 'caf\xe9' differ" in caplog.text
  # A list that has one form only.
  other = _tree(tmp_path / 'other', [f'train/{names[3]}/1.jpg'])
  (tmp_path / 'list.txt').write_text(f'{composed}\nhat\n')
  config.data.lists = str(tmp_path / 'list.txt')
  opening.refused([r"'cafe\u0301' and 'caf\xe9' differ"], config, 'folder', other)


def test_an_unreadable_folder_is_one_line(tmp_path, config, monkeypatch):
  root = _tree(tmp_path, ['train/a/1.jpg', 'train/b/1.jpg'])
  scan = os.scandir

  def scandir(path):  # root may read anything
    if str(path).endswith('/b'):
      raise PermissionError(13, 'Permission denied', path)
    return scan(path)

  monkeypatch.setattr(os, 'scandir', scandir)
  opening.refused(['train/b: Permission denied'], config, 'folder', root)


def test_a_test_folder_is_not_proposed_for_training(tmp_path, config):
  names = ('training_set/cat/1.jpg', 'test_set/cat/1.jpg')
  root = _tree(tmp_path / 'sets', names)
  config.data.eval_split = 'test'
  assert len(_folder(config, root)) == 1
  other = _tree(tmp_path / 'other', ['a_train_part/cat/1.jpg', 'a_test_part/cat/1.jpg'])
  builders.assert_refused([f'config.data.path={other}/a_train_part meant'], _folder, config, other)
  alone = _tree(tmp_path / 'alone', ['final_test/cat/1.jpg'])
  assert 'meant?' not in builders.refusal(_folder, config, alone)


def test_an_example_without_a_label_is_neither_trained_nor_scored(tmp_path, config):
  _write(tmp_path, config, 'hf', [0, 1, None])
  source = sources.open_source(config, True)
  stream = stream_lib.Stream(config, jax.sharding.SingleDeviceSharding(jax.devices()[0]))
  for feed in (stream.evaluation(source), stream.train(source, 3, 0)):
    with contextlib.closing(feed):
      builders.assert_refused('2.* has no label; expected a split', next, feed)
