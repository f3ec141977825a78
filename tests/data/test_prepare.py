"""Tests of prepare: folders with every fault, killed, shared and repeated."""

import collections
import io
import json
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
from PIL import Image
import pytest
import tensorflow_datasets as tfds

from anp_jax.data import sources
from anp_jax.data.prepare import __main__ as prepare
from anp_jax.data.prepare import plan as plan_lib
from anp_jax.data.prepare import report
from anp_jax.system import cores
from tests import prepared

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_CLOTHING = _ROOT.parent / 'shared' / 'data' / 'clothing'


@pytest.fixture(autouse=True)
def one_core(monkeypatch):
  """Starting workers is most of the time; where many matter, they are named."""
  monkeypatch.setattr(cores, 'count', lambda: 1)


def _pixels(height, width, seed=0):
  return np.random.default_rng(seed).integers(
    0, 256, (height, width, 3), np.uint8
  )


def _file(image, kind='PNG', **options):
  if isinstance(image, np.ndarray):
    image = Image.fromarray(image)
  data = io.BytesIO()
  image.save(data, kind, **options)
  return data.getvalue()


def _photo(seed, kind='JPEG', **options):
  return _file(_pixels(12, 10, seed), kind, **options)


def _tree(root, files):
  for name, data in files.items():
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
  return root


def _run(capsys, *arguments):
  """The exit status, the lines printed, the lines on standard error."""
  status = prepare.main(['prepare', *map(str, arguments)])
  out, err = capsys.readouterr()
  return status, out, err


def _error(capsys, *arguments):
  """The one error line of a command that has to fail."""
  status, out, err = _run(capsys, *arguments)
  assert (status, out) == (2, '')
  (line,) = [x for x in err.splitlines() if not re.match(r'\w+: [\d,]+/', x)]
  assert line.startswith('error: ')
  return line


def _damaged(folder):
  """{(split, file): line} of damaged.jsonl."""
  lines = (folder / 'damaged.jsonl').read_text().splitlines()
  return {(x['split'], x['file']): x for x in map(json.loads, lines)}


# A set with a file of every kind.


def _faulty():
  blank = Image.new('RGB', (500, 374), (240, 240, 240))
  exif = b'Exif\0\0MM\0*\0\0\0\x08\0\1\1\x12\0\3\0\0\0\1\0\6\0\0\0\0\0\0'
  alpha = Image.fromarray(_pixels(12, 10, 7)).convert('RGBA')
  alpha.putalpha(100)
  return {
    'train/big_cat/0.jpg': _photo(0),
    'train/big_cat/alpha.png': _file(alpha),
    'train/big_cat/cmyk.jpg': _file(
      Image.fromarray(_pixels(12, 10, 1)).convert('CMYK'), 'JPEG'
    ),
    'train/big_cat/corrupt.jpg': b'<html>',
    'train/big_cat/empty.jpg': b'',
    'train/big_cat/leak.jpg': _photo(100),
    'train/big_cat/rotated.jpg': _photo(2, exif=exif),
    'train/old_dog/again.jpg': _photo(0),
    'train/old_dog/gone.jpg': _file(blank),
    'train/old_dog/grey.jpg': _file(
      Image.fromarray(_pixels(12, 10, 3)).convert('L'), 'JPEG'
    ),
    'train/old_dog/named.png': _photo(4),
    'train/old_dog/new.jpg': _photo(5, 'WEBP'),
    'train/old_dog/short.jpg': _photo(6)[:-20],
    'train/old_dog/tiny.png': _file(_pixels(4, 9)),
    'train/red_car/one.jpg': _photo(8),
    'validation/big_cat/v.jpg': _photo(100),
    'validation/old_dog/w.jpg': _photo(101),
    'validation/old_dog/x.jpg': _photo(101),
  }


_KINDS = {
  'corrupt': 'corrupt.jpg', 'truncated': 'short.jpg', 'rotated': 'rotated.jpg',
  'suffix': 'gone.jpg', 'duplicate': 'again.jpg', 'leak': 'leak.jpg',
}  # fmt: skip


@pytest.fixture(scope='module')
def faulty(tmp_path_factory):
  return _tree(tmp_path_factory.mktemp('faulty'), _faulty())


@pytest.fixture(scope='module')
def as_usual(faulty, tmp_path_factory):
  """The faulty tree, prepared with the default policies."""
  data_dir = tmp_path_factory.mktemp('usual')
  out, err = prepared.done(
    prepared.command(
      f'--from={faulty}', '--name=usual', f'--data_dir={data_dir}'
    )
  )
  return data_dir, out, err


def test_every_kind_is_found(as_usual):
  lines = _damaged(prepared.folder(as_usual[0], 'usual'))
  kinds = {os.path.basename(f): x['kinds'] for (_, f), x in lines.items()}
  assert kinds == {
    'alpha.png': ['alpha'], 'cmyk.jpg': ['cmyk'], 'corrupt.jpg': ['corrupt'],
    'empty.jpg': ['corrupt'], 'leak.jpg': ['leak'], 'rotated.jpg': ['rotated'],
    'again.jpg': ['duplicate'], 'gone.jpg': ['placeholder', 'suffix'],
    'grey.jpg': ['grey'], 'named.png': ['suffix'],
    'new.jpg': ['format', 'suffix'], 'short.jpg': ['truncated'],
    'x.jpg': ['duplicate'],
  }  # fmt: skip


def test_files_that_a_tree_leaves_out_are_taken_in(tmp_path, capsys):
  root = _tree(tmp_path / 'tree', {
    'train/a/1.webp': _photo(1, 'WEBP', lossless=True),
    'train/b/2.TIFF': _photo(2, 'TIFF'), 'train/b/3.svg': b'<svg/>',
  })  # fmt: skip
  status, out, _ = _run(
    capsys, f'--from={root}', '--name=n', f'--data_dir={tmp_path}',
    '--eval_split=',
  )  # fmt: skip
  assert status == 0
  stored = prepared.stored(tmp_path, 'n', 'train')
  assert [name for name, _, _ in stored] == ['a/1.webp', 'b/2.TIFF']
  line = f'{root}/train: left out 1 .svg (first b/3.svg)'
  report = prepared.folder(tmp_path, 'n') / 'report.md'
  assert line in out.splitlines() and line in report.read_text().splitlines()
  for seed, (_, data, _) in enumerate(stored, 1):
    image = Image.open(io.BytesIO(data))
    assert image.format == 'PNG'
    assert (np.asarray(image) == _pixels(12, 10, seed)).all()


def test_lines_of_damaged_files(as_usual):
  lines = _damaged(prepared.folder(as_usual[0], 'usual'))
  files = _faulty()
  for (split, file), line in lines.items():
    assert line['bytes'] == len(files[f'{split}/{file}'])
    assert line['class'] == file.split('/')[0]
  done = {os.path.basename(f): x['done'] for (_, f), x in lines.items()}
  assert {n for n, d in done.items() if d == 'skip'} == {
    'corrupt.jpg', 'empty.jpg', 'leak.jpg', 'gone.jpg', 'short.jpg',
  }  # fmt: skip
  assert {n for n, d in done.items() if d == 'convert'} == {
    'cmyk.jpg', 'rotated.jpg', 'new.jpg',
  }  # fmt: skip
  again = lines['train', 'old_dog/again.jpg']
  assert again['equals'] == {'split': 'train', 'file': 'big_cat/0.jpg'}
  leak = lines['train', 'big_cat/leak.jpg']
  assert leak['equals'] == {'split': 'validation', 'file': 'big_cat/v.jpg'}
  gone = lines['train', 'old_dog/gone.jpg']
  assert (gone['height'], gone['width'], gone['format']) == (374, 500, 'PNG')
  assert 'empty' in lines['train', 'big_cat/empty.jpg']['reason']


def test_examples_are_the_files_in_order(as_usual):
  data_dir = as_usual[0]
  files = _faulty()
  stored = prepared.stored(data_dir, 'usual', 'train')
  assert [name for name, _, _ in stored] == [
    'big_cat/0.jpg', 'big_cat/alpha.png', 'big_cat/cmyk.jpg',
    'big_cat/rotated.jpg', 'old_dog/again.jpg', 'old_dog/grey.jpg',
    'old_dog/named.png', 'old_dog/new.jpg', 'old_dog/tiny.png',
    'red_car/one.jpg',
  ]  # fmt: skip
  assert [label for _, _, label in stored] == [0, 0, 0, 0, 1, 1, 1, 1, 1, 2]
  for name, data, _ in stored:
    original = files[f'train/{name}']
    if os.path.basename(name) not in ('cmyk.jpg', 'rotated.jpg', 'new.jpg'):
      assert data == original, name
    else:
      image, before = (Image.open(io.BytesIO(x)) for x in (data, original))
      assert image.mode == 'RGB' and not image.getexif()
      turned = name == 'big_cat/rotated.jpg'
      assert image.size == (before.size[::-1] if turned else before.size)
  held = prepared.stored(data_dir, 'usual', 'validation')
  assert [(name, label) for name, _, label in held] == [
    ('big_cat/v.jpg', 0), ('old_dog/w.jpg', 1), ('old_dog/x.jpg', 1),
  ]  # fmt: skip


def test_training_reads_the_set(as_usual, config):
  config.data.source = 'tfds:anp_folder/usual'
  config.data.dir = str(as_usual[0])
  source = sources.open_source(config, training=True)
  assert source.vocabulary.names == ('big_cat', 'old_dog', 'red_car')
  images, labels = source.read(np.array([9, 0]))
  files = _faulty()
  assert bytes(images[0]) == files['train/red_car/one.jpg']
  assert bytes(images[1]) == files['train/big_cat/0.jpg']
  assert labels.tolist() == [2, 0]


def test_report_and_summary(as_usual):
  data_dir, out, err = as_usual
  folder = prepared.folder(data_dir, 'usual')
  report = (folder / 'report.md').read_text()
  assert re.search(
    r'\| train \| .* \| 15 \| 10 \| 3 \| 1 \(red_car\) \|', report
  )
  # 2 of 18 files; the reader sees which.
  assert re.search(
    r'\| corrupt \|.*\| 2 \| 11.11 % \| skip \| train: big_cat/corrupt.jpg, '
    r'train: big_cat/empty.jpg \|', report)  # fmt: skip
  assert re.search(r'\| duplicate \|.*\| 2 \| 11.11 % \| keep', report)
  assert 'missing' not in report
  for words in (
    '^3 classes$',
    rf'{re.escape(str(folder))}: made in [\d.]+ s',
    r'train +15 +10 +3 +1 \(red_car\)',
    r'validation +3 +3 +0 +0 \(red_car\)',
    r'corrupt +2 +11.11 % +skip',
    rf'python main.py .*--config.data.source=tfds:anp_folder/usual '
    rf'--config.data.dir={re.escape(str(data_dir))}$',
  ):  # fmt: skip
    assert re.search(words, out, re.MULTILINE), words
  assert 'examining: 18/18 files' in err and '3 damaged' in err
  metadata = json.loads((folder / 'metadata.json').read_text())
  assert metadata['files']['train']['corrupt'] == 2
  assert metadata['files']['train']['stored'] == 10
  assert metadata['policy']['leak'] == 'skip'
  assert os.listdir(folder.parents[1]) == ['usual']  # no work is left


@pytest.mark.parametrize('kind', _KINDS)
def test_a_kind_can_forbid_the_set(kind, faulty, tmp_path, capsys):
  line = _error(
    capsys, f'--from={faulty}', '--name=x', f'--data_dir={tmp_path}',
    f'--policy={kind}=fail',
  )  # fmt: skip
  file = _KINDS[kind]
  assert re.search(rf'forbids \d {kind} files, first \S*/{file} \({kind}', line)
  assert not prepared.folder(tmp_path, 'x').exists()
  report = pathlib.Path(line.rpartition('report: ')[2])
  assert f'| {kind} |' in report.read_text()
  assert (report.parent / 'damaged.jsonl').is_file()


@pytest.mark.parametrize('policy, missing', [
  ('alpha=skip', {'alpha.png'}),
  ('cmyk=skip,rotated=skip', {'cmyk.jpg', 'rotated.jpg'}),
  ('duplicate=skip', {'again.jpg'}),
  ('suffix=skip', {'named.png', 'new.jpg'}),
  ('small=skip', {'tiny.png'}),
  ('rare=skip', {'one.jpg'}),
  ('placeholder=keep', {'-gone.jpg'}),
  ('truncated=convert', {'-short.jpg'}),
  ('leak=keep', {'-leak.jpg'}),
])  # fmt: skip
def test_policies(policy, missing, faulty, as_usual, tmp_path, capsys):
  """Against the set of the defaults; '-' for what comes in addition."""
  status, _, err = _run(
    capsys, f'--from={faulty}', '--name=x', f'--data_dir={tmp_path}',
    f'--policy={policy}', '--min_size=5', '--min_count=2',
  )  # fmt: skip
  assert status == 0, err

  def names(data_dir, name):
    stored = prepared.stored(data_dir, name, 'train')
    return {os.path.basename(file) for file, _, _ in stored}

  usual, here = names(as_usual[0], 'usual'), names(tmp_path, 'x')
  assert {*(usual - here), *(f'-{n}' for n in here - usual)} == missing
  lines = _damaged(prepared.folder(tmp_path, 'x'))
  assert 'small' in lines['train', 'old_dog/tiny.png']['kinds']
  assert 'rare' in lines['train', 'red_car/one.jpg']['kinds']


def test_what_is_converted_by_choice(faulty, tmp_path, capsys):
  status, _, _ = _run(
    capsys, f'--from={faulty}', '--name=x', f'--data_dir={tmp_path}',
    '--policy=grey=convert,alpha=convert,cmyk=keep,rotated=keep,small=fail',
    '--min_size=4',  # tiny.png has 4 pixels
  )  # fmt: skip
  assert status == 0
  stored = {n: d for n, d, _ in prepared.stored(tmp_path, 'x', 'train')}
  files = _faulty()
  for name in ('big_cat/cmyk.jpg', 'big_cat/rotated.jpg'):
    assert stored[name] == files[f'train/{name}']
  for name in ('old_dog/grey.jpg', 'big_cat/alpha.png'):
    assert Image.open(io.BytesIO(stored[name])).mode == 'RGB'


def test_rare_counts_what_is_left(tmp_path, capsys):
  """A class whose training files are all damaged is rare in the other split."""
  root = _tree(tmp_path / 'tree', {
    'train/a/1.jpg': _photo(1), 'train/b/1.jpg': b'x', 'train/b/2.jpg': b'y',
    'train/a/5.jpg': _photo(5), 'train/c/6.jpg': _photo(6),
    'train/c/7.jpg': _photo(6), 'validation/a/3.jpg': _photo(3),
    'validation/b/4.jpg': _photo(4),
  })  # fmt: skip
  status, _, _ = _run(
    capsys, f'--from={root}', '--name=x', f'--data_dir={tmp_path}',
    '--policy=rare=skip,duplicate=skip', '--min_count=2',
  )  # fmt: skip
  assert status == 0
  assert [n for n, _, _ in prepared.stored(tmp_path, 'x', 'train')] == [
    'a/1.jpg', 'a/5.jpg'
  ]  # fmt: skip
  assert [n for n, _, _ in prepared.stored(tmp_path, 'x', 'validation')] == [
    'a/3.jpg'
  ]
  assert _damaged(prepared.folder(tmp_path, 'x'))['validation', 'b/4.jpg'][
    'kinds'
  ] == ['rare']


def _split(sizes):
  n = len(sizes)
  return plan_lib.Split(
    'train', None, np.array(sizes, np.int64), np.ones((n, 2), np.int32),
    np.zeros(n, np.uint32), [b''] * n, [''] * n, {}, np.zeros(n, np.uint8),
  )  # fmt: skip


@pytest.mark.parametrize('sizes, size, lengths', [
  # 1,000 bytes in four parts; a file belongs where its middle is.
  ([100] * 10, 250, [2, 3, 2, 3]),
  ([100] * 10, 10**6, [10]),
  ([100] * 3, 1, [1, 1, 1]),
  # Four of ten parts would be empty.
  ([1, 1, 1000, 1, 1], 100, [2, 1, 2]),
])  # fmt: skip
def test_division_into_shards(sizes, size, lengths):
  shards = plan_lib.shards(_split(sizes), size)
  assert [len(shard) for shard in shards] == lengths
  assert np.concatenate(shards).tolist() == list(range(len(sizes)))


# Other sources, other names.


def test_split_files(tmp_path, capsys):
  root = _tree(tmp_path / 'tree', {
    f'{c}/{i}.jpg': _photo(i + 10 * j)
    for j, c in enumerate(('old_dog', 'big_cat')) for i in range(4)
  })  # fmt: skip
  (root / 'fit.txt').write_text(
    'big_cat/3.jpg 1 0 0\nold_dog/0.jpg 0 1 1\nbig_cat/9.jpg 1 0 0\n'
  )
  (root / 'held out.txt').write_text('old_dog/1.jpg 0 1 1\n')
  (tmp_path / 'anps.txt').write_text('old_dog\nbig_cat\n')
  (tmp_path / 'adjectives.txt').write_text('big\nold\n')
  (tmp_path / 'nouns.txt').write_text('cat\ndog\n')
  lists = ','.join(
    str(tmp_path / f'{n}.txt') for n in ('anps', 'adjectives', 'nouns')
  )
  status, out, err = _run(
    capsys, f'--from={root}', '--name=x', f'--data_dir={tmp_path}',
    '--train_split=fit.txt', '--eval_split=held out.txt', f'--lists={lists}',
  )  # fmt: skip
  assert status == 0, err
  stored = prepared.stored(tmp_path, 'x', 'train')
  assert [(n, label) for n, _, label in stored] == [
    ('big_cat/3.jpg', 1), ('old_dog/0.jpg', 0)
  ]  # fmt: skip
  assert [n for n, _, _ in prepared.stored(tmp_path, 'x', 'validation')] == [
    'old_dog/1.jpg'
  ]
  line = _damaged(prepared.folder(tmp_path, 'x'))['train', 'big_cat/9.jpg']
  assert (line['kinds'], line['done']) == (['missing'], 'skip')
  assert 'train_split' not in out  # the prepared splits have the usual names


def test_a_tree_without_splits_and_a_tree_of_one(tmp_path, capsys, config):
  files = {f'{c}/{i}.png': _photo(ord(c) * 99 + i, 'PNG')
           for c in 'ab' for i in range(20)}  # fmt: skip
  root = _tree(tmp_path / 'tree', files)
  for name, arguments in (('both', []), ('one', ['--eval_split='])):
    status, out, err = _run(
      capsys, f'--from={root}', f'--name={name}', f'--data_dir={tmp_path}',
      *arguments,
    )  # fmt: skip
    assert status == 0, err
  parts = [{n for n, _, _ in prepared.stored(tmp_path, 'both', split)}
           for split in ('train', 'validation')]  # fmt: skip
  assert all(parts) and not parts[0] & parts[1]
  assert parts[0] | parts[1] == set(files)
  assert sorted(tfds.builder('anp_folder/one', data_dir=tmp_path).info.splits
                ) == ['train']  # fmt: skip
  assert {n for n, _, _ in prepared.stored(tmp_path, 'one', 'train')} == set(
    files
  )
  assert re.search(
    r'^no evaluation split: .*\n.* --config.data.eval_split=train$', out, re.M
  )
  # The same examples by the same indices as the tree itself.
  config.data.source, config.data.path = 'folder', str(root)
  tree = sources.open_source(config, training=False)
  config.data.source, config.data.dir = 'tfds:anp_folder/both', str(tmp_path)
  made = sources.open_source(config, training=False)
  indices = np.arange(len(tree))[::-1]
  (a, a_labels), (b, b_labels) = tree.read(indices), made.read(indices)
  assert [bytes(x) for x in a] == [bytes(x) for x in b]
  assert a_labels.tolist() == b_labels.tolist()


def test_names_that_are_no_text_and_things_that_are_no_files(tmp_path, capsys):
  root = _tree(tmp_path / 'tree', {
    os.fsdecode(b'train/a/\xff.jpg'): _photo(1), 'train/a/x|y\n.jpg': b'',
    'train/b/1.jpg': _photo(2),
  })  # fmt: skip
  (root / 'train/a/folder.jpg').mkdir()
  os.mkfifo(root / 'train/a/pipe.jpg')
  (root / 'train/a/link.jpg').symlink_to(root / 'nowhere')
  status, out, err = _run(
    capsys, f'--from={root}', '--name=x', f'--data_dir={tmp_path}',
    '--eval_split=',
  )  # fmt: skip
  assert status == 0, err
  stored = prepared.stored(tmp_path, 'x', 'train')
  assert [n for n, _, _ in stored] == [os.fsdecode(b'a/\xff.jpg'), 'b/1.jpg']
  kinds = {
    f: x['kinds']
    for (_, f), x in _damaged(prepared.folder(tmp_path, 'x')).items()
  }
  assert kinds == {
    'a/folder.jpg': ['corrupt'], 'a/pipe.jpg': ['corrupt'],
    'a/link.jpg': ['missing'], 'a/x|y\n.jpg': ['corrupt'],
  }  # fmt: skip
  table = (prepared.folder(tmp_path, 'x') / 'report.md').read_text()
  assert 'x\\|y .jpg' in table


def _bitmap(seed):
  """Of one size for all seeds."""
  return _photo(seed, 'BMP')


def test_changed_files_are_not_stored_as_examined(tmp_path, capsys):
  """What was examined is what is stored, or nothing is."""
  root = _tree(tmp_path / 'tree', {
    'train/a/1.jpg': _photo(1), 'train/a/2.jpg': b'',
    'train/b/3.bmp': _bitmap(3),
  })  # fmt: skip
  arguments = [
    f'--from={root}', '--name=x', f'--data_dir={tmp_path}', '--eval_split=',
  ]  # fmt: skip
  _error(capsys, *arguments, '--policy=corrupt=fail')
  path = root / 'train/b/3.bmp'
  when = path.stat().st_mtime_ns
  path.write_bytes(_bitmap(4))
  os.utime(path, ns=(when, when))  # only the bytes tell
  line = _error(capsys, *arguments)
  assert str(path) in line and 'changed' in line
  folder = re.search(r'delete (\S+) before', line)[1]
  assert os.path.isdir(os.path.join(folder, 'examined'))
  subprocess.run(['rm', '-r', folder], check=True)
  assert _run(capsys, *arguments)[0] == 0
  assert prepared.stored(tmp_path, 'x', 'train')[1][1] == _bitmap(4)


def test_repaired_files_are_examined_again(tmp_path, capsys):
  root = _tree(tmp_path / 'tree', {
    'train/a/1.jpg': _photo(1), 'train/a/2.jpg': b'', 'train/b/3.jpg': b'x',
    'train/b/4.jpg': _photo(4), 'validation/a/5.jpg': _photo(5),
  })  # fmt: skip
  (root / 'train/a/6.jpg').symlink_to(root / 'later.jpg')
  arguments = [
    f'--from={root}', '--name=x', f'--data_dir={tmp_path}',
    '--policy=corrupt=fail',
  ]  # fmt: skip
  assert '2 corrupt files, first' in _error(capsys, *arguments)
  (root / 'train/a/2.jpg').write_bytes(_photo(2))
  line = _error(capsys, *arguments)
  assert '1 corrupt files, first' in line and 'b/3.jpg' in line
  report = pathlib.Path(line.rpartition('report: ')[2]).read_text()
  assert 'b/3.jpg' in report and 'a/2.jpg' not in report
  (root / 'train/b/3.jpg').write_bytes(_photo(3))
  (root / 'train/b/4.jpg').write_bytes(_photo(44))
  (root / 'later.jpg').write_bytes(_photo(6))
  status, _, err = _run(capsys, *arguments)
  assert status == 0, err
  assert [data for _, data, _ in prepared.stored(tmp_path, 'x', 'train')] == [
    _photo(i) for i in (1, 2, 6, 3, 44)
  ]
  assert os.listdir(tmp_path / 'anp_folder') == ['x']


def test_the_limit_of_large_files(tmp_path, capsys):
  """Files are looked at again where another limit says otherwise."""
  root = _tree(tmp_path / 'tree', {
    'a/1.png': _file(_pixels(40, 30), 'PNG'),
    'b/2.png': _file(_pixels(41, 31), 'PNG'),
  })  # fmt: skip
  arguments = [f'--from={root}', '--name=n', f'--data_dir={tmp_path}',
               '--eval_split=']  # fmt: skip
  line = _error(
    capsys, *arguments, '--max_megapixels=0.00125', '--policy=large=fail'
  )
  assert 'the policy forbids 1 large files, first ' in line
  assert 'b/2.png (large: 31 x 41 pixels, above max_megapixels=0.00125' in line
  status, out, _ = _run(capsys, *arguments, '--max_megapixels=0.00125')
  assert status == 0 and re.search(r'large +1 +50.00 % +skip', out)
  names = [name for name, _, _ in prepared.stored(tmp_path, 'n', 'train')]
  assert names == ['a/1.png']
  line = _error(capsys, *arguments, '--max_megapixels=180')
  assert '--max_megapixels=180: expected above 0, at most 178.9' in line
  _error(capsys, *arguments, '--max_megapixels=0.0001')  # another set
  arguments.append('--overwrite')
  line = _error(capsys, *arguments, '--max_megapixels=0.0001')
  assert 'none of the 2 files' in line  # their findings stay
  status, out, _ = _run(capsys, *arguments)
  assert status == 0 and 'no file is damaged or unusual' in out
  assert len(prepared.stored(tmp_path, 'n', 'train')) == 2


def test_shards_of_files_that_changed_are_written_again(
  tmp_path, capsys, monkeypatch
):
  root = _tree(tmp_path / 'tree', {
    f'train/a/{i}.jpg': _photo(i) for i in range(4)
  })  # fmt: skip
  arguments = [
    f'--from={root}', '--name=x', f'--data_dir={tmp_path}', '--eval_split=',
  ]  # fmt: skip

  def full(*_):
    raise OSError('No space left on device')

  with monkeypatch.context() as patch:  # in the last step
    patch.setattr(report, 'write', full)
    assert 'No space' in _error(capsys, *arguments)
  assert [*tmp_path.glob('anp_folder/.x.*/*/set/*array_record*')]
  (root / 'train/a/2.jpg').write_bytes(_photo(22))
  assert _run(capsys, *arguments)[0] == 0
  assert [data for _, data, _ in prepared.stored(tmp_path, 'x', 'train')] == [
    _photo(i) for i in (0, 1, 22, 3)
  ]


# Finished sets.


def test_a_finished_set_is_kept(faulty, tmp_path, capsys):
  arguments = [f'--from={faulty}', '--name=x', f'--data_dir={tmp_path}']
  assert _run(capsys, *arguments)[0] == 0
  before = prepared.digests(prepared.folder(tmp_path, 'x'))
  status, out, err = _run(capsys, *arguments)
  assert (status, err) == (0, '') and 'already' in out
  line = _error(capsys, *arguments, '--min_size=2')
  assert '--overwrite' in line and str(prepared.folder(tmp_path, 'x')) in line
  assert prepared.digests(prepared.folder(tmp_path, 'x')) == before
  assert _run(capsys, *arguments, '--min_size=5', '--policy=small=skip',
              '--overwrite')[0] == 0  # fmt: skip
  names = [n for n, _, _ in prepared.stored(tmp_path, 'x', 'train')]
  assert 'old_dog/tiny.png' not in names
  assert os.listdir(tmp_path / 'anp_folder') == ['x']


def test_a_finished_set_of_files_that_changed(tmp_path, capsys):
  root = _tree(tmp_path / 'tree', {
    'train/a/1.jpg': _photo(1), 'train/b/2.jpg': b'', 'train/b/3.jpg': b'',
    'validation/a/4.jpg': _photo(4),
  })  # fmt: skip
  arguments = [f'--from={root}', '--name=x', f'--data_dir={tmp_path}']
  assert _run(capsys, *arguments)[0] == 0
  (root / 'train/b/2.jpg').write_bytes(_photo(2))
  line = _error(capsys, *arguments)
  assert f'(first {root}/train/b/2.jpg)' in line and '--overwrite' in line
  assert len(prepared.stored(tmp_path, 'x', 'train')) == 1
  for _ in range(2):  # the second time it is made already
    status, out, _ = _run(capsys, *arguments, '--overwrite')
    assert status == 0
    stored = prepared.stored(tmp_path, 'x', 'train')
    assert [data for _, data, _ in stored] == [_photo(1), _photo(2)]
  assert 'already' in out
  (root / 'validation/a/4.jpg').unlink()
  (root / 'validation/a/4.jpg').symlink_to(root / 'nowhere')
  assert 'validation/a/4.jpg' in _error(capsys, *arguments)


@pytest.mark.slow
def test_processes_wait_for_the_set_that_replaces_one(tmp_path, capsys):
  root = _tree(tmp_path / 'tree', {
    'train/a/1.jpg': b'', 'train/a/2.jpg': _photo(2),
    'validation/a/3.jpg': _photo(3),
  })  # fmt: skip
  arguments = [f'--from={root}', '--name=x', f'--data_dir={tmp_path}']
  assert _run(capsys, *arguments)[0] == 0
  (root / 'train/a/1.jpg').write_bytes(_photo(1))
  arguments += ['--overwrite', '--num_processes=2']
  second = prepared.command(*arguments, '--process_id=1')
  next(x for x in iter(second.stderr.readline, '') if 'waiting' in x)
  prepared.done(prepared.command(*arguments, '--process_id=0'))
  assert 'is finished' in prepared.done(second)[0]
  stored = prepared.stored(tmp_path, 'x', 'train')
  assert [data for _, data, _ in stored] == [_photo(1), _photo(2)]


def test_nothing_that_stands_in_the_way_is_touched(faulty, tmp_path, capsys):
  mine = prepared.folder(tmp_path, 'x') / 'mine.txt'
  mine.parent.mkdir(parents=True)
  mine.write_text('mine')
  _error(capsys, f'--from={faulty}', '--name=x', f'--data_dir={tmp_path}')
  assert mine.read_text() == 'mine'


def test_data_dir_of_the_environment(faulty, tmp_path, capsys, monkeypatch):
  monkeypatch.setenv('ANP_DATA', str(tmp_path))
  assert _run(capsys, f'--from={faulty}', '--name=x')[0] == 0
  assert (prepared.folder(tmp_path, 'x') / 'dataset_info.json').is_file()


# Bad commands.


@pytest.mark.parametrize('arguments, words', [
  ([], ['--from']),
  (['--from=TREE'], ['--name']),
  (['--from=TREE', '--name=x', '--polisy=a'], ['--polisy', '--policy']),
  (['--from=TREE', '--name=x', '--policy=corupt=skip'],
   ["'corupt'", "'corrupt'"]),
  (['--from=TREE', '--name=x', '--policy=corrupt=keep'],
   ['corrupt=keep', 'corrupt=skip or fail']),
  (['--from=TREE', '--name=x', '--policy=grey'], ['grey=keep or convert']),
  (['--from=TREE', '--name=x', '--min_size=0'], ['--min_size=0', '1']),
  (['--from=TREE', '--name=x', '--workers=two'], ['workers', "'two'"]),
  (['--from=TREE', '--name=x', '--process_id=0'], ['--num_processes']),
  (['--from=TREE', '--name=x', '--process_id=2', '--num_processes=2'],
   ['--process_id=2', '0 to 1']),
  (['--from=TREE', '--name=a/b'], ["'a/b'"]),
  (['--from=TREE', '--name=1.0.0'], ["'1.0.0'"]),
  (['--from=TREE', '--name=.x'], ["'.x'"]),
  (['--from=TREE', '--name=x', '--train_split=tarin'], ["'tarin'", 'train']),
  (['--from=TREE', '--name=x', '--eval_split=train'], ['both', "'train'"]),
  (['--from=TREE', '--name=x', '--from_dir=y'], ['--from_dir']),
  (['--from=NONE', '--name=x'], ['NONE']),
  (['--from=tfds:nothing'], ['nothing']),
  (['--from=tfds:nothing', '--policy=grey=skip'], ['--policy', 'tfds:']),
])  # fmt: skip
def test_bad_commands(arguments, words, faulty, tmp_path, capsys):
  places = {'TREE': faulty, 'NONE': tmp_path / 'NONE'}
  arguments = [
    re.sub('TREE|NONE', lambda m: str(places[m[0]]), a) for a in arguments
  ]
  line = _error(capsys, *arguments, f'--data_dir={tmp_path}')
  for word in words:
    assert word in line, line
  assert os.listdir(tmp_path) == []


def test_nothing_left(tmp_path, capsys):
  root = _tree(tmp_path / 'tree', {
    'train/a/1.jpg': _photo(1), 'validation/a/2.jpg': b'text',
  })  # fmt: skip
  line = _error(capsys, f'--from={root}', '--name=x', f'--data_dir={tmp_path}')
  assert 'none of the 1 files' in line and '2.jpg (corrupt' in line
  assert not prepared.folder(tmp_path, 'x').exists()


def test_entries_that_cannot_be_opened_are_corrupt(tmp_path, capsys):
  root = _tree(tmp_path / 'tree', {
    'a/1.jpg': _photo(1), 'a/2.jpg': _photo(2), 'plain': b'',
  })  # fmt: skip
  (root / 'a/loop.jpg').symlink_to(root / 'a/loop.jpg')
  long = f'a/{"x" * 300}.jpg'
  names = ['a/1.jpg', 'a/loop.jpg', long, 'a/2.jpg', 'plain/a/3.jpg']
  (root / 'train.txt').write_text(''.join(f'{n} 0\n' for n in names))
  (root / 'a/2.jpg').chmod(0)
  arguments = [
    f'--from={root}', '--name=x', f'--data_dir={tmp_path}', '--eval_split=',
    '--train_split=train.txt',
  ]  # fmt: skip
  line = _error(capsys, *arguments, '--policy=corrupt=fail')
  assert 'a/loop.jpg (corrupt: Too many levels of symbolic links)' in line
  assert _run(capsys, *arguments)[0] == 0
  lines = _damaged(prepared.folder(tmp_path, 'x'))
  reasons = {file: x['reason'] for (_, file), x in lines.items()}
  expected = {
    'a/loop.jpg': 'Too many levels of symbolic links',
    long: 'File name too long',
    'plain/a/3.jpg': 'no such file',
  }
  if os.geteuid():  # root reads everything
    expected['a/2.jpg'] = 'Permission denied'
  assert reasons == expected


def test_help():
  process = prepared.command('--help')
  out, err = prepared.done(process)
  assert err == ''
  for word in ('--from', '--policy', 'Slurm', 'placeholder', 'leak'):
    assert word in out
  assert max(map(len, out.splitlines())) <= 80


def test_the_start_is_light():
  code = (
    'import sys\nfrom anp_jax.data.prepare import __main__ as prepare\n'
    'try: prepare.main(["prepare", "--help"])\n'
    'except SystemExit: pass\n'
    'heavy = ("tensorflow", "tensorflow_datasets", "jax")\n'
    'print([m for m in sys.modules if m in heavy], file=sys.stderr)\n'
  )
  done = subprocess.run(
    [sys.executable, '-c', code], cwd=_ROOT, text=True, capture_output=True
  )
  assert done.stderr == '[]\n'


# Photographs.


@pytest.mark.skipif(
  not _CLOTHING.is_dir(), reason='the photographs of clothing are not here'
)
def test_photographs(tmp_path, capsys, config):
  status, out, err = _run(
    capsys, f'--from={_CLOTHING}', '--name=clothing', '--eval_split=test',
    f'--data_dir={tmp_path}',
  )  # fmt: skip
  assert status == 0, err
  assert '--config.data.eval_split=test' in out
  counts = collections.Counter(
    path.parts[-3] for path in _CLOTHING.glob('*/*/*.jpg')
  )
  builder = tfds.builder('anp_folder/clothing', data_dir=tmp_path)
  assert {
    s: i.num_examples for s, i in builder.info.splits.items()
  } == counts  # fmt: skip
  config.data.source, config.data.path = 'folder', str(_CLOTHING)
  config.data.eval_split = 'test'
  trees = [sources.open_source(config, training=t) for t in (True, False)]
  config.data.source = 'tfds:anp_folder/clothing'
  config.data.dir = str(tmp_path)
  sets = [sources.open_source(config, training=t) for t in (True, False)]
  for tree, made in zip(trees, sets):
    assert tree.vocabulary == made.vocabulary
    indices = np.random.default_rng(0).permutation(len(tree))[:100]
    (a, a_labels), (b, b_labels) = tree.read(indices), made.read(indices)
    assert [bytes(x) for x in a] == [bytes(x) for x in b]
    assert a_labels.tolist() == b_labels.tolist()
