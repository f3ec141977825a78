"""Tests of prepare: other trees, files that change, finished sets."""

import os
import re
from unittest import mock

import pytest

from anp_jax.data.prepare import actions, report
from tests import builders, prepared

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
  splits = ['--train_split=fit.txt', '--eval_split=held out.txt', f'--lists={lists}']
  out = prepared.make(capsys, root, tmp_path, *splits)
  stored = prepared.examples(tmp_path)
  assert [(n, label) for n, _, label in stored] == [('big_cat/3.jpg', 1), ('old_dog/0.jpg', 0)]
  assert prepared.names(tmp_path, 'validation') == ['old_dog/1.jpg']
  line = prepared.damaged(tmp_path)['train', 'big_cat/9.jpg']
  assert (line['kinds'], line['done']) == (['missing'], 'skip')
  assert 'train_split' not in out  # the prepared splits have the usual names


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
  out = prepared.make(capsys, root, tmp_path, '--eval_split=', '--pairs=no')
  assert '--config.data.pairs=no' in out  # training would look for them again
  assert prepared.names(tmp_path) == [os.fsdecode(b'a/\xff.jpg'), 'b/1.jpg']
  kinds = {f: x['kinds'] for (_, f), x in prepared.damaged(tmp_path).items()}
  assert kinds == {
    'a/folder.jpg': ['corrupt'],
    'a/pipe.jpg': ['corrupt'],
    'b/loop.jpg': ['corrupt'],
    'a/link.jpg': ['missing'],
    'a/x|y\n.jpg': ['corrupt'],
  }
  table = (prepared.folder(tmp_path) / 'report.md').read_text()
  assert 'x\\|y .jpg' in table


def test_changed_files_are_not_stored_as_examined(tmp_path, capsys, monkeypatch):
  """What was examined is what is stored, or nothing is."""
  before, after = prepared.photo(3, 'BMP'), prepared.photo(4, 'BMP')  # of one size
  files = {'train/a/1.jpg': prepared.photo(1), 'train/b/3.bmp': before}
  root = builders.write_tree(tmp_path / 'tree', files)
  arguments = prepared.flags(root, tmp_path, '--eval_split=')
  path = root / 'train/b/3.bmp'
  when = path.stat().st_mtime_ns
  divide = actions.shards

  def change(*arguments):
    path.write_bytes(after)
    os.utime(path, ns=(when, when))  # only the bytes tell
    return divide(*arguments)

  with monkeypatch.context() as patch:  # after all was examined
    patch.setattr(actions, 'shards', change)
    line = prepared.error(capsys, *arguments)
  assert f'{path} has changed since it was examined: run the command again' in line
  assert prepared.run(capsys, *arguments)[0] == 0
  assert prepared.examples(tmp_path)[1][1] == after


def test_a_second_command_for_the_same_set_is_refused(tmp_path, capsys, monkeypatch):
  """While the first one is at work."""
  root = builders.write_tree(tmp_path / 'tree', {'train/a/1.jpg': prepared.photo(1)})
  arguments = prepared.flags(root, tmp_path, '--eval_split=')
  divide, lines = actions.shards, []

  def at_work(*parts):
    lines.append(prepared.error(capsys, *arguments))
    return divide(*parts)

  monkeypatch.setattr(actions, 'shards', at_work)
  prepared.make(capsys, root, tmp_path, '--eval_split=')
  assert len(lines) == 1 and 'by another process' in lines[0]


def test_another_limit_of_large_files_makes_another_set(tmp_path, capsys):
  small, large = (builders.encode_image(builders.random_pixels(40 + i, 30 + i)) for i in (0, 1))
  root = builders.write_tree(tmp_path / 'tree', {'a/1.png': small, 'b/2.png': large})
  arguments = prepared.flags(root, tmp_path, '--eval_split=')
  line = prepared.error(capsys, *arguments, '--max_megapixels=0.00125', '--policy=large=fail')
  assert 'the policy forbids 1 large files, first ' in line
  assert 'b/2.png (large: 31 x 41 pixels, above max_megapixels=0.00125' in line
  status, out, _ = prepared.run(capsys, *arguments, '--max_megapixels=0.00125')
  assert status == 0 and re.search(r'large +1 +50.00 % +skip', out)
  assert prepared.names(tmp_path) == ['a/1.png']
  line = prepared.error(capsys, *arguments, '--max_megapixels=180')
  assert '--max_megapixels=180: expected a number above 0, at most 178.9' in line
  arguments.append('--overwrite')
  prepared.error(capsys, *arguments, '--max_megapixels=0.0001', words=['none of the 2 files'])
  status, out, _ = prepared.run(capsys, *arguments)
  assert status == 0 and 'no file is damaged or unusual' in out
  assert len(prepared.examples(tmp_path)) == 2


def test_shards_of_files_that_changed_are_written_again(tmp_path, capsys, monkeypatch):
  files = {f'train/a/{i}.jpg': prepared.photo(i) for i in range(4)}
  root = builders.write_tree(tmp_path / 'tree', files)
  arguments = prepared.flags(root, tmp_path, '--eval_split=')
  full = OSError('No space left on device')
  with monkeypatch.context() as patch:  # in the last step
    patch.setattr(report, 'write', mock.Mock(side_effect=full))
    assert 'No space' in prepared.error(capsys, *arguments)
  assert [*tmp_path.glob('anp_folder/.x/*/*array_record*')]
  (root / 'train/a/2.jpg').write_bytes(prepared.photo(22))
  assert prepared.run(capsys, *arguments)[0] == 0
  stored = [data for _, data, _ in prepared.examples(tmp_path)]
  assert stored == [prepared.photo(i) for i in (0, 1, 22, 3)]


# Finished sets.


def test_a_finished_set_is_kept(faulty, tmp_path, capsys):
  prepared.make(capsys, faulty, tmp_path)
  folder = prepared.folder(tmp_path)
  before = prepared.digests(folder)
  assert 'already' in prepared.make(capsys, faulty, tmp_path)
  line = prepared.error(capsys, *prepared.flags(faulty, tmp_path, '--min_size=2'))
  assert '--overwrite' in line and str(folder) in line
  assert prepared.digests(folder) == before
  prepared.make(capsys, faulty, tmp_path, '--min_size=5', '--policy=small=skip', '--overwrite')
  assert 'old_dog/tiny.png' not in prepared.names(tmp_path)
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
  arguments = prepared.flags(root, tmp_path)
  prepared.make(capsys, root, tmp_path)
  (root / 'train/b/2.jpg').write_bytes(prepared.photo(2))
  prepared.error(capsys, *arguments, words=[f'(first {root}/train/b/2.jpg)', '--overwrite'])
  assert len(prepared.examples(tmp_path)) == 1
  for _ in range(2):  # the second time it is made already
    out = prepared.make(capsys, root, tmp_path, '--overwrite')
    stored = prepared.examples(tmp_path)
    assert [data for _, data, _ in stored] == [prepared.photo(1), prepared.photo(2)]
  assert 'already' in out
  (root / 'validation/a/4.jpg').unlink()
  (root / 'validation/a/4.jpg').symlink_to(root / 'nowhere')
  assert 'validation/a/4.jpg' in prepared.error(capsys, *arguments)


def test_nothing_that_stands_in_the_way_is_touched(faulty, tmp_path, capsys, monkeypatch):
  """It stands in the folder that the environment names."""
  path = prepared.folder(tmp_path) / 'mine.txt'
  path.parent.mkdir(parents=True)
  path.write_text('mine')
  monkeypatch.setenv('ANP_DATA', str(tmp_path))
  assert str(path.parent) in prepared.error(capsys, f'--from={faulty}', '--name=x')
  assert path.read_text() == 'mine'


# Bad commands.


@pytest.mark.parametrize(
  'arguments, words',
  [
    ('', ['--from']),
    ('--from=TREE', ['--name']),
    ('--from=TREE --name=x --policy=corupt=skip', ["'corupt'", "'corrupt'"]),
    ('--from=TREE --name=x --policy=corrupt=keep', ['corrupt=keep', 'corrupt=skip or fail']),
    ('--from=TREE --name=x --policy=grey', ['grey=keep or convert']),
    ('--from=TREE --name=x --min_size=0', ['--min_size=0', '1']),
    ('--from=TREE --name=a/b', ["'a/b'"]),
    ('--from=TREE --name=1.0.0', ["'1.0.0'"]),
    ('--from=TREE --name=.x', ["'.x'"]),
    ('--from=TREE --name=x --train_split=tarin', ["'tarin'", 'train']),
    ('--from=TREE --name=x --eval_split=train', ['both', "'train'"]),
    ('--from=NONE --name=x', ['NONE']),
    ('--from=TREE --name=x --shorter_side=-1', ['--shorter_side=-1: expected 0 or more']),
    ('--from=TREE --name=x --quality=0', ['--quality=0: expected 1 or more']),
    ('--from=TREE --name=x --quality=101', ['--quality=101: expected 1 to 100']),
  ],
)
def test_a_bad_command_is_one_clear_line(arguments, words, faulty, tmp_path, capsys):
  arguments = arguments.replace('TREE', str(faulty)).split()
  prepared.error(capsys, *arguments, f'--data_dir={tmp_path}', words=words)
  assert os.listdir(tmp_path) == []
