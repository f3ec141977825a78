"""Tests of prepare: every kind of file, and what the policies do about it."""

import io
import json
import os
import pathlib
import re

import hypothesis
from hypothesis import strategies
import numpy as np
from PIL import Image
import pytest

from anp_jax.data import vocabulary
from anp_jax.data.prepare import actions as actions_lib, examine
from anp_jax.data.sources import image_folder, stored_images
from tests import builders, prepared

# A set with a file of every kind.


@pytest.fixture(scope='module')
def default_set(faulty, tmp_path_factory):
  """The faulty tree, prepared with the default policies, and what was said."""
  data_dir = tmp_path_factory.mktemp('usual')
  out, err = prepared.finish(prepared.start(*prepared.flags(faulty, data_dir, '--workers=1')))
  return data_dir, out, err


def test_every_kind_is_found_and_has_its_action(default_set):
  lines = prepared.damaged(default_set[0])
  assert {os.path.basename(f): (*x['kinds'], x['done']) for (_, f), x in lines.items()} == {
    'alpha.png': ('alpha', 'keep'),
    'cmyk.jpg': ('cmyk', 'convert'),
    'corrupt.jpg': ('corrupt', 'skip'),
    'empty.jpg': ('corrupt', 'skip'),
    'leak.jpg': ('leak', 'skip'),
    'rotated.jpg': ('rotated', 'convert'),
    '0.jpg': ('conflict', 'keep'),
    'again.jpg': ('duplicate', 'conflict', 'keep'),
    'gone.jpg': ('placeholder', 'suffix', 'skip'),
    'grey.jpg': ('grey', 'keep'),
    'named.png': ('suffix', 'keep'),
    'new.jpg': ('format', 'suffix', 'convert'),
    'short.jpg': ('truncated', 'skip'),
    'x.jpg': ('duplicate', 'keep'),
  }
  files = prepared.files_of_every_kind()
  for (split, file), line in lines.items():
    assert line['bytes'] == len(files[f'{split}/{file}'])
    assert line['class'] == file.split('/')[0]
  again = lines['train', 'old_dog/again.jpg']
  assert again['equals'] == {'split': 'train', 'file': 'big_cat/0.jpg'}
  leak = lines['train', 'big_cat/leak.jpg']
  assert leak['equals'] == {'split': 'validation', 'file': 'big_cat/v.jpg'}
  gone = lines['train', 'old_dog/gone.jpg']
  assert (gone['height'], gone['width'], gone['format']) == (374, 500, 'PNG')
  assert 'empty' in lines['train', 'big_cat/empty.jpg']['reason']


def test_files_of_formats_that_training_leaves_out_are_converted(tmp_path, capsys):
  root = builders.write_tree(
    tmp_path / 'tree',
    {
      'train/a/1.webp': prepared.photo(1, 'WEBP', lossless=True),
      'train/b/2.TIFF': prepared.photo(2, 'TIFF'),
      'train/b/3.svg': b'<svg/>',
    },
  )
  out = prepared.make(capsys, root, tmp_path, '--eval_split=')
  assert prepared.names(tmp_path) == ['a/1.webp', 'b/2.TIFF']
  line = f'{root}/train: left out 1 .svg (first b/3.svg)'
  report = prepared.folder(tmp_path) / 'report.md'
  assert line in out.splitlines() and line in report.read_text().splitlines()
  assert all(data.startswith(b'\x89PNG') for _, data, _ in prepared.examples(tmp_path))


def test_examples_are_the_files_in_order(default_set):
  data_dir = default_set[0]
  files = prepared.files_of_every_kind()
  lines = prepared.damaged(data_dir)
  for split in ('train', 'validation'):
    names = [file.removeprefix(f'{split}/') for file in files if file.startswith(split)]
    done = {name: lines.get((split, name), {}).get('done') for name in names}
    stored = prepared.examples(data_dir, split)
    assert [name for name, _, _ in stored] == [n for n in names if done[n] != 'skip']
    for name, data, label in stored:
      assert name.startswith(('big_cat', 'old_dog', 'red_car')[label])
      original = files[f'{split}/{name}']
      if done[name] != 'convert':
        assert data == original, name
        continue
      image, before = (Image.open(io.BytesIO(x)) for x in (data, original))
      assert image.mode == 'RGB' and not image.getexif()
      turned = name == 'big_cat/rotated.jpg'
      assert image.size == (before.size[::-1] if turned else before.size)


def test_report_and_summary_count_every_kind(default_set):
  data_dir, out, err = default_set
  folder = prepared.folder(data_dir)
  report = (folder / 'report.md').read_text()
  assert re.search(r'\| train \| .* \| 15 \| 10 \| 3 \| 1 \(red_car\) \|', report)
  # 2 of 18 files; the reader sees which.
  assert re.search(
    r'\| corrupt \|.*\| 2 \| 11.11 % \| skip \| train: big_cat/corrupt.jpg, '
    r'train: big_cat/empty.jpg \|',
    report,
  )
  assert re.search(r'\| duplicate \|.*\| 2 \| 11.11 % \| keep', report)
  assert 'missing' not in report
  for words in (
    '^3 classes$',
    rf'{re.escape(str(folder))}: made in [\d.]+ s',
    r'train +15 +10 +3 +1 \(red_car\)',
    r'validation +3 +3 +0 +0 \(red_car\)',
    r'corrupt +2 +11.11 % +skip',
    rf'python main.py .*--config.data.source=tfds:anp_folder/x '
    rf'--config.data.dir={re.escape(str(data_dir))}$',
  ):
    assert re.search(words, out, re.MULTILINE), words
  assert 'examining: 18/18 files' in err and '3 damaged' in err
  metadata = json.loads((folder / 'metadata.json').read_text())
  assert metadata['files']['train']['corrupt'] == 2
  assert metadata['files']['train']['stored'] == 10
  assert metadata['policy']['leak'] == 'skip'
  assert os.listdir(folder.parents[1]) == ['x']  # no work is left


def test_a_class_with_a_space_at_an_end_is_refused(tmp_path, capsys):
  names = ('cat', 'cat ')  # one name to tfds
  contents = {f'train/{name}/{i}.jpg': prepared.photo(i) for i, name in enumerate(names)}
  root = builders.write_tree(tmp_path / 'tree', contents)
  line = prepared.error(capsys, *prepared.flags(root, tmp_path, '--eval_split='))
  assert "class 'cat ' has a name that cannot be stored" in line


@pytest.mark.parametrize('kind', ['corrupt', 'leak'])
def test_a_kind_can_forbid_the_set(kind, faulty, tmp_path, capsys):
  line = prepared.error(capsys, *prepared.flags(faulty, tmp_path, f'--policy={kind}=fail'))
  assert re.search(rf'forbids \d {kind} files, first \S*/{kind}.jpg \({kind}', line)
  assert not prepared.folder(tmp_path).exists()
  report = pathlib.Path(line.rpartition('report: ')[2])
  assert f'| {kind} |' in report.read_text()
  assert (report.parent / 'damaged.jsonl').is_file()


@pytest.mark.parametrize(
  'policy, missing',
  [
    (
      'alpha=skip,cmyk=skip,rotated=skip,duplicate=skip',
      {'alpha.png', 'cmyk.jpg', 'rotated.jpg', 'again.jpg'},
    ),
    ('suffix=skip,small=skip,rare=skip', {'named.png', 'new.jpg', 'tiny.png', 'one.jpg'}),
    ('placeholder=keep,truncated=convert,leak=keep', {'-gone.jpg', '-short.jpg', '-leak.jpg'}),
  ],
)
def test_a_policy_decides_which_files_are_stored(
  policy, missing, faulty, default_set, tmp_path, capsys
):
  """Against the set of the defaults; '-' for what comes in addition."""
  prepared.make(capsys, faulty, tmp_path, f'--policy={policy}', '--min_size=5', '--min_count=2')
  usual, here = (
    {os.path.basename(file) for file in prepared.names(folder)}
    for folder in (default_set[0], tmp_path)
  )
  assert {*(usual - here), *(f'-{n}' for n in here - usual)} == missing
  lines = prepared.damaged(tmp_path)
  assert 'small' in lines['train', 'old_dog/tiny.png']['kinds']
  assert 'rare' in lines['train', 'red_car/one.jpg']['kinds']


def test_files_are_converted_by_choice(faulty, tmp_path, capsys):
  policy = '--policy=grey=convert,alpha=convert,cmyk=keep,rotated=keep,small=fail'
  prepared.make(capsys, faulty, tmp_path, policy, '--min_size=4')  # tiny.png has 4 pixels
  stored = {n: d for n, d, _ in prepared.examples(tmp_path)}
  files = prepared.files_of_every_kind()
  for name in ('big_cat/cmyk.jpg', 'big_cat/rotated.jpg'):
    assert stored[name] == files[f'train/{name}']
  for name in ('old_dog/grey.jpg', 'big_cat/alpha.png'):
    assert Image.open(io.BytesIO(stored[name])).mode == 'RGB'


def test_rare_classes_are_counted_without_damaged_files(tmp_path, capsys):
  """A class whose training files are all damaged is rare in the other split."""
  root = builders.write_tree(
    tmp_path / 'tree',
    {
      'train/a/1.jpg': prepared.photo(1),
      'train/b/1.jpg': b'x',
      'train/b/2.jpg': b'y',
      'train/a/5.jpg': prepared.photo(5),
      'train/c/6.jpg': prepared.photo(6),
      'train/c/7.jpg': prepared.photo(6),
      'validation/a/3.jpg': prepared.photo(3),
      'validation/b/4.jpg': prepared.photo(4),
    },
  )
  prepared.make(capsys, root, tmp_path, '--policy=rare=skip,duplicate=skip', '--min_count=2')
  assert prepared.names(tmp_path) == ['a/1.jpg', 'a/5.jpg']
  assert prepared.names(tmp_path, 'validation') == ['a/3.jpg']
  assert prepared.damaged(tmp_path)['validation', 'b/4.jpg']['kinds'] == ['rare']


def _split(sizes, texts=None, labels=None):
  """A split of files of these sizes, whose bytes are these texts."""
  findings = [
    examine.Finding('JPEG', 1, 1, (), '', size, text.encode())
    for size, text in zip(sizes, texts or [''] * len(sizes))
  ]
  labels = np.array(labels or [0] * len(sizes), np.int32)
  classes = vocabulary.Vocabulary(('a', 'b'))
  listing = image_folder.Listing('', (), labels, classes, 'split', stored_images.DiskFiles('', ()))
  return actions_lib.Split('train', listing, findings)


@hypothesis.given(
  strategies.lists(strategies.integers(1, 1000), min_size=1), strategies.integers(1, 3000)
)
def test_shards_hold_all_files_in_order(sizes, size):
  shards = actions_lib.shards(_split(sizes), size)
  assert all(map(len, shards)) and np.concatenate(shards).tolist() == list(range(len(sizes)))
  assert len(shards) <= max(1, round(sum(sizes) / size))


@hypothesis.given(*[strategies.lists(strategies.sampled_from('abcde'), min_size=1)] * 2)
def test_files_with_equal_bytes_are_marked(train, evaluation):
  """Against a search through all pairs."""
  splits = [_split([1] * len(texts), texts) for texts in (train, evaluation)]
  policy = actions_lib.policy('duplicate=keep,leak=keep')
  actions_lib.decide(splits, policy, min_size=1, min_count=1)
  for split, texts in zip(splits, (train, evaluation)):
    expected = [text in texts[:i] for i, text in enumerate(texts)]
    assert split.kinds['duplicate'].tolist() == expected
  assert splits[0].kinds['leak'].tolist() == [text in evaluation for text in train]
  for i, (other, j) in splits[0].equals.items():
    assert (train if other is splits[0] else evaluation).index(train[i]) == j


def test_files_of_the_same_bytes_and_other_classes_are_in_conflict():
  train = _split([1] * 5, 'abaca', [0, 0, 1, 1, 0])
  evaluation = _split([1] * 3, 'bcd', [1, 1, 1])
  policy = actions_lib.policy('conflict=skip,leak=keep')
  actions_lib.decide([train, evaluation], policy, min_size=1, min_count=1)
  assert train.kinds['conflict'].tolist() == [True, True, True, False, True]
  assert evaluation.kinds['conflict'].tolist() == [True, False, False]
  assert train.equals[0] == (train, 2) and evaluation.equals == {0: (train, 1)}
  assert train.stored.tolist() == [3] and evaluation.stored.tolist() == [1, 2]


def test_bytes_of_a_set_are_at_least_those_of_its_converted_files():
  split = _split([100, 20, 3])
  split.actions[:] = [actions_lib.ACTIONS.index(action) for action in ('convert', 'keep', 'skip')]
  assert split.stored_bytes() == 120


@pytest.mark.parametrize(
  'sizes, size, lengths',
  [
    # 1,000 bytes in four parts; a file belongs where its middle is.
    ([100] * 10, 250, [2, 3, 2, 3]),
    ([100] * 10, 10**6, [10]),
    ([100] * 3, 1, [1, 1, 1]),
    # Four of ten parts would be empty.
    ([1, 1, 1000, 1, 1], 100, [2, 1, 2]),
  ],
)
def test_a_file_belongs_to_the_shard_of_its_middle(sizes, size, lengths):
  shards = actions_lib.shards(_split(sizes), size)
  assert [len(shard) for shard in shards] == lengths


def test_a_disk_that_is_too_small_is_told_before_anything_is_written(tmp_path, capsys, monkeypatch):
  """What is converted counts with its own bytes, what is not stored with none."""
  contents = {f'train/a/{i}.jpg': prepared.photo(i) for i in range(3)}
  contents['train/b/new.webp'] = prepared.photo(9, 'WEBP')  # is converted
  size = sum(map(len, contents.values()))
  contents['train/b/large.bmp'] = bytes(10 * size)  # no image
  root = builders.write_tree(tmp_path / 'tree', contents)
  builders.use_disk(monkeypatch, size - 1)
  line = prepared.error(capsys, *prepared.flags(root, tmp_path, '--eval_split='))
  assert f'--data_dir={str(tmp_path)!r}' in line
  assert f'{size / 1e6:,.1f} MB are to be written' in line
  builders.use_disk(monkeypatch, size)
  prepared.make(capsys, root, tmp_path, '--eval_split=')
