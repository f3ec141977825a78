"""Tests of prepare: lists, tar shards and sets of Hugging Face."""

import os
import re

import numpy as np
import pytest

from anp_jax.data import sources
from tests import listed_sets, prepared


@pytest.mark.parametrize('kind', ['tar', 'hf'])
def test_a_set_is_examined_repaired_and_stored(kind, tmp_path, capsys, config):
  photos = [prepared.photo(i) for i in range(6)]
  # Damaged, of a format that training does not read, and a leak.
  photos += [b'<html>', prepared.photo(7, 'WEBP'), prepared.photo(50)]
  labels = ['old_dog', 'old_cat'] * 3 + ['old_cat', 'old_dog', 'old_cat']
  source = listed_sets.write(tmp_path / 'in', kind, labels, photos=photos)
  listed_sets.write(tmp_path / 'in', kind, ['old_cat'], 'validation', [prepared.photo(50)])
  out = prepared.make(capsys, source, tmp_path)
  assert '2 classes of 1 adjective and 2 nouns' in out
  for kind in ('corrupt', 'format', 'leak'):
    assert re.search(rf'^{kind} +1 ', out, re.M), out
  stored = prepared.examples(tmp_path)
  assert [data for _, data, _ in stored[:6]] == [prepared.photo(i) for i in range(6)]
  assert [label for _, _, label in stored] == [1, 0, 1, 0, 1, 0, 1]
  assert stored[6][1].startswith(b'\xff\xd8\xff')  # the WebP, converted
  ((_, data, label),) = prepared.examples(tmp_path, 'validation')
  assert (data, label) == (prepared.photo(50), 0)
  # Made already; the images of both sources have the same indices.
  assert 'already' in prepared.make(capsys, source, tmp_path)
  config.data.source, config.data.dir = source, str(tmp_path)
  config.data.path = ''
  direct = sources.open_source(config, training=True)
  config.data.source = 'tfds:anp_folder/x'
  copy = sources.open_source(config, training=True)
  images = [s.read(np.arange(6))[0] for s in (direct, copy)]
  assert [*map(bytes, images[0])] == [*map(bytes, images[1])]
  assert direct.vocabulary == copy.vocabulary


@pytest.mark.parametrize('kind', ['folder', 'list', 'tar'])
def test_all_of_a_set_without_splits(kind, tmp_path, capsys):
  labels = ['a'] * 10 + ['b'] * 10
  source = listed_sets.write(tmp_path / 'in', kind, labels, split='')
  all_photos = {prepared.photo(i) for i in range(20)}
  out = prepared.make(capsys, source, tmp_path, '--eval_split=')
  assert re.search(r'^no evaluation split: .*\n.* --config.data.eval_split=train$', out, re.M)
  assert {data for _, data, _ in prepared.examples(tmp_path)} == all_photos
  prepared.make(capsys, source, tmp_path / 'halves')
  train, validation = (
    {data for _, data, _ in prepared.examples(tmp_path / 'halves', split)}
    for split in ('train', 'validation')
  )
  assert train and validation and not train & validation
  assert train | validation == all_photos
  # Files that changed are another set.
  photos = [prepared.photo(i) for i in range(1, 21)]
  listed_sets.write(tmp_path / 'in', kind, labels, '', photos)
  prepared.error(capsys, *prepared.flags(source, tmp_path, '--eval_split='), words=['--overwrite'])


@pytest.mark.parametrize(
  'arguments, words',
  [
    (['--from=tar:nowhere-*.tar'], ['nowhere-*.tar', 'tar shards']),
    (['--from=hf:nowhere'], ['nowhere', 'save_to_disk']),
    (['--from=list:nowhere.csv'], ['nowhere.csv']),
    (['--from=.', '--path=x'], ['--path', 'list:']),
    (['--from=tar:a.tar', '--train_split=tarin'], ["'tarin'", '--train_split']),
    (['--from=list:a.csv'], ['no file', '--path']),
  ],
)
def test_a_bad_command_is_one_line(arguments, words, tmp_path, capsys, monkeypatch):
  monkeypatch.chdir(tmp_path)
  listed_sets.write_tar(tmp_path / 'a.tar', listed_sets.samples(range(2), ('a', 'b')))
  (tmp_path / 'a.csv').write_text('path,label\nx.jpg,a\ny.jpg,b\n')
  prepared.error(capsys, *arguments, '--name=x', f'--data_dir={tmp_path}/data', words=words)


def test_an_image_without_a_class_is_refused(tmp_path, capsys):
  part = listed_sets.hf_set({'image': listed_sets.photos(range(2)), 'label': [0, -1]})
  listed_sets.save_to_disk(tmp_path / 'set', {'train': part}, shards=1)
  flags = prepared.flags(f'hf:{tmp_path}/set', tmp_path, '--eval_split=')
  capsys.readouterr()  # a progress bar, where this is the first set that is written
  prepared.error(capsys, *flags, words=[f'{tmp_path}/set/train/1-1.jpg has no class'])
  assert not os.path.exists(tmp_path / 'anp_folder' / 'x')
