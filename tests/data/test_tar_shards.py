"""Tests of tar shards: WebDataset's layout by index, whole and broken."""

import gzip
import os
import pathlib
import tarfile
import threading

import numpy as np
import pytest

from anp_jax.data.sources import stored_images, table_cache, tar_index, tar_shards
from tests import builders, coordinating, listed_sets, opening, prepared


def _open(config, pattern, training=True):
  return opening.source(config, f'tar:{pattern}', training=training)


def _refused(words, config, pattern):
  opening.refused(words, config, f'tar:{pattern}')


def _shards(folder, split='train', counts=(3, 4), classes=('b', 'a')):
  start = 0
  for i, count in enumerate(counts):
    members = listed_sets.samples(range(start, start + count), classes)
    listed_sets.write_tar(folder / f'{split}-{i:03}.tar', members)
    start += count
  return folder


def test_samples_of_several_shards_by_index(tmp_path, config):
  _shards(tmp_path)
  _shards(tmp_path, 'val', (2,), ('b', 'c'))
  source = _open(config, f'{tmp_path}/{{split}}-*.tar')
  assert source.kind == 'encoded' and len(source) == 7
  # The other split's classes count too.
  assert source.vocabulary.names == ('a', 'b', 'c')
  opening.assert_read(source, (6, 0, 3, 6), (6, 0, 3, 6), [1, 1, 0, 1])
  assert source.labels().tolist() == [1, 0, 1, 0, 1, 0, 1]
  assert source.example_name(4) == f'{tmp_path}/train-001.tar/0004.jpg'
  # Also called validation.
  validation = _open(config, f'{tmp_path}/{{split}}-*.tar', training=False)
  assert validation.labels().tolist() == [1, 2]
  assert validation.read(np.array([1]))[0] == [prepared.photo(1)]


@pytest.mark.parametrize('kind', [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names_folders_and_other_members(tmp_path, config, kind):
  long = 'x/' + 'y' * 150 + '/' + 'z' * 120
  listed_sets.write_tar(
    tmp_path / 'a.tar',
    {
      f'{long}.JPG': prepared.photo(1),
      f'{long}.cls': b'happy_dog\n',
      'x/é.png': prepared.photo(2, 'PNG'),
      'x/é.cls': b'sad_dog',
      'y/é.seg.json': b'{}',
      '__meta__.json': b'{}',
      'readme': b'',
      # A class before its image; a suffix with a dot.
      'y/é.cls': b'sad_cat',
      'y/é.image.jpeg': prepared.photo(3),
    },
    kind,
  )
  config.data.pairs = 'yes'
  listing = tar_shards.find(
    _place(config, tmp_path / 'a.tar'), '', '', config.data.dir, ('.jpg', '.png', '.jpeg')
  )
  assert listing.files == (f'a.tar/{long}.JPG', 'a.tar/x/é.png', 'a.tar/y/é.image.jpeg')
  names = [listing.vocabulary.names[i] for i in listing.labels]
  assert names == ['happy_dog', 'sad_dog', 'sad_cat']
  assert [listing.storage.read(i) for i in range(3)] == [
    prepared.photo(1),
    prepared.photo(2, 'PNG'),
    prepared.photo(3),
  ]


def _place(config, pattern):
  config.data.source, config.data.path = f'tar:{pattern}', ''
  return config.data


@pytest.mark.parametrize(
  'text, name',
  [
    ('{"label": "old_dog", "caption": "x"}', 'old_dog'),
    ('{"adjective": "old", "noun": "dog"}', 'old_dog'),
    ('{"anp": "old_dog", "id": 3}', 'old_dog'),
    ('{"class": 1}', 'class1'),
    ('{"label": null, "adjective": "old", "noun": "dog"}', 'old_dog'),
  ],
)
def test_classes_of_json(tmp_path, config, text, name):
  listed_sets.write_tar(
    tmp_path / 'train.tar',
    {'1.jpg': prepared.photo(1), '1.json': text.encode(), '1.txt': b'not it'},
  )
  source = _open(config, f'{tmp_path}/{{split}}.tar')
  assert source.vocabulary.names[source.labels()[0]] == name


def test_a_number_above_those_of_the_list_of_classes(tmp_path, config):
  _shards(tmp_path, classes=('2', '0'))
  (tmp_path / 'classes.txt').write_text('x\ny\n')
  words = [f'{tmp_path}/train-000.tar: 0000.jpg: class 2, expected 0 to 1']
  _refused(words, config, f'{tmp_path}/{{split}}-{{000..001}}.tar')


def test_processes_that_start_at_once_build_one_index(tmp_path, config, monkeypatch):
  _shards(tmp_path)
  builds, build = [], tar_index._batch

  def slowly(path, number):
    builds.append(path)
    threading.Event().wait(0.05)
    return build(path, number)

  monkeypatch.setattr(tar_index, '_batch', slowly)
  tables = builders.write_tree(tmp_path / 'data' / 'tables', {'x': b''})
  draft = builders.leave_draft(tables / 'tar-2-0.arrow')
  place, lengths = _place(config, f'{tmp_path}/{{split}}-*.tar'), []

  def find():
    suffixes = ('.jpg',)
    listing = tar_shards.find(place, 'train', '', config.data.dir, suffixes)
    lengths.append(len(listing.files))

  # flock is of open files, so threads wait for each other as processes do.
  coordinating.at_once([find] * 3)
  assert lengths == [7, 7, 7] and len(builds) == 2 and not draft.exists()


# Bad input.


@pytest.mark.parametrize(
  'pattern, words',
  [
    ('{split}-{000..002}.tar', ['no file', 'train-002.tar', "mean 'train-00"]),
    ('trian-*.tar', ['trian-*.tar', "mean 'train-00"]),
    ('{split}-{0..x}.tar', ['no file', 'train-{0..x}.tar']),
    ('{split}-{5..3}.tar', ['no file', 'train-{5..3}.tar']),
    ('{split}-{0..9999999}.tar', ['no file', 'train-{0..9999999}.tar']),
  ],
)
def test_a_bad_pattern_is_one_line(tmp_path, config, pattern, words):
  _shards(tmp_path)
  _refused(words, config, tmp_path / pattern)


def test_two_names_of_a_split(tmp_path, config):
  for split in ('train', 'val', 'valid'):
    _shards(tmp_path, split, (1,))
  builders.assert_refused(
    'valid.*config.data.eval', _open, config, f'{tmp_path}/{{split}}-000.tar', training=False
  )


_IMAGE = {'1.jpg': prepared.photo(1)}


@pytest.mark.parametrize(
  'members, words',
  [
    ({**_IMAGE}, ["sample '1' has no .cls, .json or .txt", 'jpg']),
    ({'1.cls': b'a'}, ["sample '1' has 0 images", 'cls']),
    ({**_IMAGE, '1.png': b'', '1.cls': b'a'}, ['2 images', 'jpg, png, cls']),
    ({**_IMAGE, '1.cls': b' \n'}, ['1.cls is', 'name or the number']),
    ({**_IMAGE, '1.cls': b'\xff'}, ["b'\\xff'", 'name or the number']),
    ({**_IMAGE, '1.json': b'{"lable": 3}'}, ['1.json', 'label, class, cls, anp, labels']),
    ({**_IMAGE, '1.json': b'[1]'}, ['1.json', 'an object']),
    ({**_IMAGE, '1.json': b'[' * 200_000}, ['1.json', 'an object']),
    ({**_IMAGE, '1.json': b'{"label": "\\ud800"}'}, ['1.json', 'an object']),
    ({**_IMAGE, '1.txt': b'two\nlines'}, ['1.txt', 'a line']),
  ],
)
def test_a_bad_sample_is_one_line(tmp_path, config, members, words):
  listed_sets.write_tar(tmp_path / 'train.tar', members)
  _refused([f'{tmp_path}/train.tar', *words], config, f'{tmp_path}/{{split}}.tar')
  # A failed build leaves nothing.
  folder = pathlib.Path(config.data.dir, table_cache.FOLDER)
  assert os.listdir(folder) == ['.lock']


def test_damaged_shards(tmp_path, config):
  pattern = f'{tmp_path}/{{split}}-*.tar'
  _shards(tmp_path, counts=(4, 4))
  path = tmp_path / 'train-001.tar'
  content = path.read_bytes()
  with tarfile.open(path) as tar:
    start = tar.getmembers()[2].offset
  for damaged, words in (
    (content[:1300], ['no whole tar file']),
    (b'\0' * 2000, []),
    (b'x' * 2000, ['no whole tar file']),
    (b'', ['no whole tar file']),
    (gzip.compress(content), ['or a compressed one']),
    # A damaged header in the middle, which tarfile takes for the end.
    (content[:start] + b'x' * 512 + content[start + 512 :], [f'header at byte {start:,}']),
  ):
    path.write_bytes(damaged)
    if words:
      _refused([path, *words], config, pattern)
    else:
      assert len(_open(config, pattern)) == 4


def test_a_member_whose_last_byte_is_cut_off(tmp_path):
  path = tmp_path / 'a.tar'
  path.write_bytes(bytes(range(200)))
  places = np.array([[0, 0, 50], [0, 100, 100]])
  members = stored_images.FileRanges((str(path),), places)
  assert members.read(1) == bytes(range(100, 200))
  for size in (199, 101, 100, 99):
    os.truncate(path, size)
    with pytest.raises(Exception, match='a.tar ends before byte 200'):
      members.read(1)
  assert members.read(0) == bytes(range(50))


def test_images_that_training_cannot_read_are_left_out(tmp_path, config, caplog):
  members = listed_sets.samples(range(2), ('a',))
  members |= {'w.webp': prepared.photo(9, 'WEBP'), 'w.cls': b'a'}
  listed_sets.write_tar(tmp_path / 'train.tar', members)
  assert len(_open(config, f'{tmp_path}/{{split}}.tar')) == 2
  assert '1 .webp (first w.webp; prepare converts them)' in caplog.text
