"""Tests of prepare: other trees, files that change, finished sets."""

import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest
import tensorflow_datasets as tfds

from anp_jax.data import sources
from anp_jax.data.prepare import actions, report
from tests import builders, prepared

_ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(scope='module')
def faulty(tmp_path_factory):
  root = tmp_path_factory.mktemp('faulty')
  return builders.write_tree(root, prepared.files_of_every_kind())


# Other trees, other names.


def test_split_files_say_what_is_stored(tmp_path, capsys):
  root = builders.write_tree(
    tmp_path / 'tree',
    {
      f'{c}/{i}.jpg': prepared.photo(i + 10 * j)
      for j, c in enumerate(('old_dog', 'big_cat'))
      for i in range(4)
    },
  )
  (root / 'fit.txt').write_text('big_cat/3.jpg 1 0 0\nold_dog/0.jpg 0 1 1\nbig_cat/9.jpg 1 0 0\n')
  (root / 'held out.txt').write_text('old_dog/1.jpg 0 1 1\n')
  (tmp_path / 'anps.txt').write_text('old_dog\nbig_cat\n')
  (tmp_path / 'adjectives.txt').write_text('big\nold\n')
  (tmp_path / 'nouns.txt').write_text('cat\ndog\n')
  lists = ','.join(str(tmp_path / f'{n}.txt') for n in ('anps', 'adjectives', 'nouns'))
  status, out, err = prepared.run(
    capsys,
    f'--from={root}',
    '--name=x',
    f'--data_dir={tmp_path}',
    '--train_split=fit.txt',
    '--eval_split=held out.txt',
    f'--lists={lists}',
  )
  assert status == 0, err
  stored = prepared.examples(tmp_path, 'x', 'train')
  assert [(n, label) for n, _, label in stored] == [('big_cat/3.jpg', 1), ('old_dog/0.jpg', 0)]
  assert [n for n, _, _ in prepared.examples(tmp_path, 'x', 'validation')] == ['old_dog/1.jpg']
  line = prepared.damaged(prepared.folder(tmp_path, 'x'))['train', 'big_cat/9.jpg']
  assert (line['kinds'], line['done']) == (['missing'], 'skip')
  assert 'train_split' not in out  # the prepared splits have the usual names


def test_a_tree_without_splits_and_a_tree_of_one(tmp_path, capsys, config):
  files = {f'{c}/{i}.png': prepared.photo(ord(c) * 99 + i, 'PNG') for c in 'ab' for i in range(20)}
  root = builders.write_tree(tmp_path / 'tree', files)
  for name, arguments in (('both', []), ('one', ['--eval_split='])):
    status, out, err = prepared.run(
      capsys, f'--from={root}', f'--name={name}', f'--data_dir={tmp_path}', *arguments
    )
    assert status == 0, err
  parts = [
    {n for n, _, _ in prepared.examples(tmp_path, 'both', split)}
    for split in ('train', 'validation')
  ]
  assert all(parts) and not parts[0] & parts[1]
  assert parts[0] | parts[1] == set(files)
  assert sorted(tfds.builder('anp_folder/one', data_dir=tmp_path).info.splits) == ['train']
  assert {n for n, _, _ in prepared.examples(tmp_path, 'one', 'train')} == set(files)
  assert re.search(r'^no evaluation split: .*\n.* --config.data.eval_split=train$', out, re.M)
  # The same examples by the same indices as the tree itself.
  config.data.source, config.data.path = 'folder', str(root)
  tree = sources.open_source(config, training=False)
  config.data.source, config.data.dir = 'tfds:anp_folder/both', str(tmp_path)
  copy = sources.open_source(config, training=False)
  indices = np.arange(len(tree))[::-1]
  (a, a_labels), (b, b_labels) = tree.read(indices), copy.read(indices)
  assert [bytes(x) for x in a] == [bytes(x) for x in b]
  assert a_labels.tolist() == b_labels.tolist()


def test_names_that_are_no_text_and_things_that_are_no_files(tmp_path, capsys):
  root = builders.write_tree(
    tmp_path / 'tree',
    {
      os.fsdecode(b'train/a/\xff.jpg'): prepared.photo(1),
      'train/a/x|y\n.jpg': b'',
      'train/b/1.jpg': prepared.photo(2),
    },
  )
  (root / 'train/a/folder.jpg').mkdir()
  os.mkfifo(root / 'train/a/pipe.jpg')
  (root / 'train/a/link.jpg').symlink_to(root / 'nowhere')
  (root / 'train/b/loop.jpg').symlink_to(root / 'train/b/loop.jpg')
  status, out, err = prepared.run(
    capsys, f'--from={root}', '--name=x', f'--data_dir={tmp_path}', '--eval_split='
  )
  assert status == 0, err
  stored = prepared.examples(tmp_path, 'x', 'train')
  assert [n for n, _, _ in stored] == [os.fsdecode(b'a/\xff.jpg'), 'b/1.jpg']
  kinds = {f: x['kinds'] for (_, f), x in prepared.damaged(prepared.folder(tmp_path, 'x')).items()}
  assert kinds == {
    'a/folder.jpg': ['corrupt'],
    'a/pipe.jpg': ['corrupt'],
    'b/loop.jpg': ['corrupt'],
    'a/link.jpg': ['missing'],
    'a/x|y\n.jpg': ['corrupt'],
  }
  table = (prepared.folder(tmp_path, 'x') / 'report.md').read_text()
  assert 'x\\|y .jpg' in table


def _bitmap(seed):
  """A file that has the same size for all seeds."""
  return prepared.photo(seed, 'BMP')


def test_changed_files_are_not_stored_as_examined(tmp_path, capsys, monkeypatch):
  """What was examined is what is stored, or nothing is."""
  root = builders.write_tree(
    tmp_path / 'tree', {'train/a/1.jpg': prepared.photo(1), 'train/b/3.bmp': _bitmap(3)}
  )
  arguments = [f'--from={root}', '--name=x', f'--data_dir={tmp_path}', '--eval_split=']
  path = root / 'train/b/3.bmp'
  when = path.stat().st_mtime_ns
  divide = actions.shards

  def change(*arguments):
    path.write_bytes(_bitmap(4))
    os.utime(path, ns=(when, when))  # only the bytes tell
    return divide(*arguments)

  with monkeypatch.context() as patch:  # after all was examined
    patch.setattr(actions, 'shards', change)
    line = prepared.error(capsys, *arguments)
  assert f'{path} has changed since it was examined: run the command again' in line
  assert prepared.run(capsys, *arguments)[0] == 0
  assert prepared.examples(tmp_path, 'x', 'train')[1][1] == _bitmap(4)


def test_another_limit_of_large_files_makes_another_set(tmp_path, capsys):
  root = builders.write_tree(
    tmp_path / 'tree',
    {
      'a/1.png': builders.encode_image(builders.random_pixels(40, 30), 'PNG'),
      'b/2.png': builders.encode_image(builders.random_pixels(41, 31), 'PNG'),
    },
  )
  arguments = [f'--from={root}', '--name=n', f'--data_dir={tmp_path}', '--eval_split=']
  line = prepared.error(capsys, *arguments, '--max_megapixels=0.00125', '--policy=large=fail')
  assert 'the policy forbids 1 large files, first ' in line
  assert 'b/2.png (large: 31 x 41 pixels, above max_megapixels=0.00125' in line
  status, out, _ = prepared.run(capsys, *arguments, '--max_megapixels=0.00125')
  assert status == 0 and re.search(r'large +1 +50.00 % +skip', out)
  names = [name for name, _, _ in prepared.examples(tmp_path, 'n', 'train')]
  assert names == ['a/1.png']
  line = prepared.error(capsys, *arguments, '--max_megapixels=180')
  assert '--max_megapixels=180: expected a number above 0, at most 178.9' in line
  arguments.append('--overwrite')
  line = prepared.error(capsys, *arguments, '--max_megapixels=0.0001')
  assert 'none of the 2 files' in line
  status, out, _ = prepared.run(capsys, *arguments)
  assert status == 0 and 'no file is damaged or unusual' in out
  assert len(prepared.examples(tmp_path, 'n', 'train')) == 2


def test_shards_of_files_that_changed_are_written_again(tmp_path, capsys, monkeypatch):
  root = builders.write_tree(
    tmp_path / 'tree', {f'train/a/{i}.jpg': prepared.photo(i) for i in range(4)}
  )
  arguments = [f'--from={root}', '--name=x', f'--data_dir={tmp_path}', '--eval_split=']

  def full(*_):
    raise OSError('No space left on device')

  with monkeypatch.context() as patch:  # in the last step
    patch.setattr(report, 'write', full)
    assert 'No space' in prepared.error(capsys, *arguments)
  assert [*tmp_path.glob('anp_folder/.x/*/*array_record*')]
  (root / 'train/a/2.jpg').write_bytes(prepared.photo(22))
  assert prepared.run(capsys, *arguments)[0] == 0
  assert [data for _, data, _ in prepared.examples(tmp_path, 'x', 'train')] == [
    prepared.photo(i) for i in (0, 1, 22, 3)
  ]


# Finished sets.


def test_a_finished_set_is_kept(faulty, tmp_path, capsys):
  arguments = [f'--from={faulty}', '--name=x', f'--data_dir={tmp_path}']
  assert prepared.run(capsys, *arguments)[0] == 0
  before = prepared.digests(prepared.folder(tmp_path, 'x'))
  status, out, err = prepared.run(capsys, *arguments)
  assert (status, err) == (0, '') and 'already' in out
  line = prepared.error(capsys, *arguments, '--min_size=2')
  assert '--overwrite' in line and str(prepared.folder(tmp_path, 'x')) in line
  assert prepared.digests(prepared.folder(tmp_path, 'x')) == before
  assert (
    prepared.run(capsys, *arguments, '--min_size=5', '--policy=small=skip', '--overwrite')[0] == 0
  )
  names = [n for n, _, _ in prepared.examples(tmp_path, 'x', 'train')]
  assert 'old_dog/tiny.png' not in names
  assert os.listdir(tmp_path / 'anp_folder') == ['x']


def test_a_finished_set_of_files_that_changed(tmp_path, capsys):
  root = builders.write_tree(
    tmp_path / 'tree',
    {
      'train/a/1.jpg': prepared.photo(1),
      'train/b/2.jpg': b'',
      'train/b/3.jpg': b'',
      'validation/a/4.jpg': prepared.photo(4),
    },
  )
  arguments = [f'--from={root}', '--name=x', f'--data_dir={tmp_path}']
  assert prepared.run(capsys, *arguments)[0] == 0
  (root / 'train/b/2.jpg').write_bytes(prepared.photo(2))
  line = prepared.error(capsys, *arguments)
  assert f'(first {root}/train/b/2.jpg)' in line and '--overwrite' in line
  assert len(prepared.examples(tmp_path, 'x', 'train')) == 1
  for _ in range(2):  # the second time it is made already
    status, out, _ = prepared.run(capsys, *arguments, '--overwrite')
    assert status == 0
    stored = prepared.examples(tmp_path, 'x', 'train')
    assert [data for _, data, _ in stored] == [prepared.photo(1), prepared.photo(2)]
  assert 'already' in out
  (root / 'validation/a/4.jpg').unlink()
  (root / 'validation/a/4.jpg').symlink_to(root / 'nowhere')
  assert 'validation/a/4.jpg' in prepared.error(capsys, *arguments)


def test_nothing_that_stands_in_the_way_is_touched(faulty, tmp_path, capsys, monkeypatch):
  """It stands in the folder that the environment names."""
  path = prepared.folder(tmp_path, 'x') / 'mine.txt'
  path.parent.mkdir(parents=True)
  path.write_text('mine')
  monkeypatch.setenv('ANP_DATA', str(tmp_path))
  assert str(path.parent) in prepared.error(capsys, f'--from={faulty}', '--name=x')
  assert path.read_text() == 'mine'


# Bad commands.


@pytest.mark.parametrize(
  'arguments, words',
  [
    ([], ['--from']),
    (['--from=TREE'], ['--name']),
    (['--from=TREE', '--name=x', '--policy=corupt=skip'], ["'corupt'", "'corrupt'"]),
    (
      ['--from=TREE', '--name=x', '--policy=corrupt=keep'],
      ['corrupt=keep', 'corrupt=skip or fail'],
    ),
    (['--from=TREE', '--name=x', '--policy=grey'], ['grey=keep or convert']),
    (['--from=TREE', '--name=x', '--min_size=0'], ['--min_size=0', '1']),
    (['--from=TREE', '--name=a/b'], ["'a/b'"]),
    (['--from=TREE', '--name=1.0.0'], ["'1.0.0'"]),
    (['--from=TREE', '--name=.x'], ["'.x'"]),
    (['--from=TREE', '--name=x', '--train_split=tarin'], ["'tarin'", 'train']),
    (['--from=TREE', '--name=x', '--eval_split=train'], ['both', "'train'"]),
    (['--from=NONE', '--name=x'], ['NONE']),
  ],
)
def test_a_bad_command_is_one_clear_line(arguments, words, faulty, tmp_path, capsys):
  places = {'TREE': faulty, 'NONE': tmp_path / 'NONE'}
  arguments = [re.sub('TREE|NONE', lambda m: str(places[m[0]]), a) for a in arguments]
  line = prepared.error(capsys, *arguments, f'--data_dir={tmp_path}')
  for word in words:
    assert word in line, line
  assert os.listdir(tmp_path) == []


def test_help_fits_a_terminal_and_imports_no_heavy_library():
  code = (
    'import sys\nfrom anp_jax.data.prepare import __main__ as prepare\n'
    'try: prepare.main(["prepare", "--help"])\n'
    'except SystemExit: pass\n'
    'heavy = ("tensorflow", "tensorflow_datasets", "jax")\n'
    'print([m for m in sys.modules if m in heavy], file=sys.stderr)\n'
  )
  done = subprocess.run([sys.executable, '-c', code], cwd=_ROOT, text=True, capture_output=True)
  assert done.stderr == '[]\n'
  for word in ('--from', '--policy', '--workers', 'placeholder', 'leak'):
    assert word in done.stdout
  assert max(map(len, done.stdout.splitlines())) <= 80
