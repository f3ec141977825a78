"""Tests of show: the examples and sheets of sets made by hand."""

import pathlib

import numpy as np
from PIL import Image
import pytest

from anp_jax.data.show import __main__ as show, draw
from tests import builders, image_sources, launching, opening, showing

_RED = (204, 0, 0)


def _box(image, color):
  """(top, left, height, width) of all pixels of a colour, a full rectangle."""
  rows, columns = np.nonzero((image == color).all(-1))
  assert len(rows), color
  top, left = rows.min(), columns.min()
  height, width = rows.max() - top + 1, columns.max() - left + 1
  assert len(rows) == height * width
  return int(top), int(left), int(height), int(width)


# Which examples.


@pytest.mark.parametrize('kind', ['encoded', 'pixels'])
def test_training_examples_are_those_of_the_steps(tmp_path, config, kind):
  builders.photographs(tmp_path, 21)
  config.data.cache = 'mapped' if kind == 'pixels' else 'none'
  config.batch_size = 8
  source = opening.source(config, 'folder', tmp_path)
  assert source.kind == kind
  steps = image_sources.batches(config, source, 3, start=2)
  for count in (3, 8, 20):  # part of a step, one, and more than two
    batch = show.examples(config, source, True, count, 2)
    for name in ('image', 'label', 'weight'):
      expected = np.concatenate([step[name] for step in steps])[:count]
      np.testing.assert_array_equal(batch[name], expected, name)
  assert batch['image'].shape == (20, 32, 32, 3)


def test_balanced_classes_are_shown_equally_often(tmp_path, config):
  showing.save_arrays(tmp_path / 'set.npz', [0] * 57 + [1] * 2 + [2])
  config.data.balance = 'sample'
  source = opening.source(config, 'arrays', tmp_path / 'set.npz')
  labels = show.examples(config, source, True, 60)['label']
  assert np.bincount(labels).tolist() == [20, 20, 20]


def test_a_sheet_says_how_its_examples_are_augmented(tmp_path, monkeypatch):
  flags = showing.save_arrays(tmp_path / 'set.npz', [0] * 20)
  titles, sheets = [], []

  def sheet(path, images, names, replaced, title):
    titles.append(title)
    sheets.append(images)

  monkeypatch.setattr(draw, 'sheet', sheet)
  for cut in ('crop', 'strong_crop'):
    arguments = [*flags, f'--config.data.augment={cut}', '--count=4']
    assert show.main(['show', *arguments, f'--output={tmp_path}']) == 0
  plain, _, strong, evaluation = titles
  assert strong[-1] == 'RandAugment: 2 operations, magnitude 9; erase=0.25'
  assert 'augment=strong_crop' in strong[1] and len(plain) == len(strong) - 1
  assert not any('RandAugment' in line for line in evaluation)
  assert (sheets[0] != sheets[2]).any() and (sheets[1] == sheets[3]).all()


def test_evaluation_examples_come_from_all_classes(tmp_path, config):
  # The files of each class one after another, as a tree has them.
  showing.save_arrays(tmp_path / 'set.npz', [0], np.repeat(np.arange(10), 20))
  source = opening.source(config, 'arrays', tmp_path / 'set.npz', training=False)
  batch = show.examples(config, source, False, 10)
  assert batch['label'].tolist() == list(range(10))
  # An image's value is its index.
  assert (batch['image'][:, 16, 16, 0] // 20).tolist() == list(range(10))
  assert (batch['weight'] == 1).all()
  config.seed = 1
  other = show.examples(config, source, False, 10)
  assert other['label'].tolist() == list(range(10))
  assert (other['image'] != batch['image']).any()
  every = show.examples(config, source, False, 1000)
  assert every['image'][:, 0, 0, 0].tolist() == list(range(200))


@pytest.mark.parametrize('size, count', [(7, 7), (7, 3), (1000, 36), (1, 1)])
def test_spread_takes_one_of_each_stretch(size, count):
  indices = show.spread(0, count, size)
  edges = [size * i // count for i in range(count + 1)]
  assert len(indices) == count
  for i, index in enumerate(indices):
    assert edges[i] <= index < edges[i + 1]
  # Classes that take turns do not catch it.
  assert len(set((show.spread(0, 36, 3600) % 10).tolist())) >= 8


# Sheets.


def test_sheets_show_every_file_of_the_tree(tree, tmp_path, capsys):
  output = tmp_path / 'a' / 'b'
  flags = [*tree, f'--output={output}', '--count=9']
  assert showing.printed(flags, capsys) == [
    str(output / f'{name}.png') for name in ('training', 'evaluation')
  ]
  for split, name in enumerate(('training', 'evaluation')):
    sheet = showing.pixels(output / f'{name}.png')
    boxes = []
    for pair, counts in sorted(showing.PAIRS.items()):
      for i in range(counts[split]):
        boxes.append(_box(sheet, showing.color(split, pair, i)))
    # 32 pixels a side: drawn four times as large.
    assert all(box[2:] == (128, 128) for box in boxes)
    assert len({box[:2] for box in boxes}) == len(boxes) == (9, 6)[split]
    # Evaluation is in the order of the files, row by row.
    assert split == 0 or boxes == sorted(boxes)
    assert len({left for _, left, _, _ in boxes}) == 3
    assert not (sheet == _RED).all(-1).any()


@pytest.mark.parametrize('side, times', [(8, 16), (95, 2), (96, 1), (224, 1)])
def test_small_images_are_enlarged_pixel_by_pixel(tmp_path, side, times):
  rng = np.random.default_rng(0)
  image = rng.integers(1, 200, (side, side, 3), np.uint8)
  image[..., 0] = 0  # no shade of the text
  path = str(tmp_path / 'sheet.png')
  draw.sheet(path, image[None], ['name'], np.array([False]), ['title'])
  sheet = showing.pixels(path)
  rows, columns = np.nonzero((sheet[..., 0] == 0) & (sheet[..., 1] > 0))
  top, left = rows.min(), columns.min()
  part = sheet[top : top + side * times, left : left + side * times]
  enlarged = image.repeat(times, 0).repeat(times, 1)
  np.testing.assert_array_equal(part, enlarged)


def test_images_are_shown_unmixed(tree, tmp_path):
  sheets = []
  for i, mixup in enumerate((0.0, 0.2)):
    flags = [
      f'--output={tmp_path / str(i)}',
      f'--config.data.mixup={mixup}',
      '--config.data.cache=mapped',
      f'--config.data.dir={tmp_path}',
    ]
    assert show.main(['show', *tree, *flags, '--count=4']) == 0
    sheets.append(showing.pixels(tmp_path / str(i) / 'training.png'))
  line = len(sheets[1]) - len(sheets[0])
  assert 10 < line < 30  # the title says so
  np.testing.assert_array_equal(sheets[0][-150:], sheets[1][-150:])


@pytest.mark.parametrize('cache', ['none', 'mapped'])
def test_a_damaged_file_is_shown_in_red(tree, tmp_path, capsys, cache):
  damaged = tmp_path / 'tree/validation/old_car/1.png'
  damaged.write_bytes(b'no image')
  flags = [*tree, f'--output={tmp_path}', f'--config.data.cache={cache}']
  flags.append(f'--config.data.dir={tmp_path / "sets"}')
  assert show.main(['show', *flags]) == 0
  sheet = showing.pixels(tmp_path / 'evaluation.png')
  # As in evaluation, the next file stands in its place.
  is_next = (sheet == showing.color(1, 'old_car', 2)).all(-1)
  assert is_next.sum() == 2 * 128**2
  # One frame of 4 pixels, and letters.
  frame = 136**2 - 128**2
  assert frame <= (sheet == _RED).all(-1).sum() < 2 * frame
  assert not (sheet == showing.color(1, 'old_car', 1)).all(-1).any()
  capsys.readouterr()
  lines = showing.printed([*tree, '--stats'], capsys)
  assert ['old_car', '1', '3'] in [line.split() for line in lines]


# The command.


@pytest.mark.parametrize(
  'flags, words',
  [
    (['--stats'], ['--config=FILE', 'missing', 'configs/']),
    ([showing.CONFIG + 'y'], ["'tinyy'", "did you mean 'tiny'"]),
    ([showing.CONFIG], ['synthetic', 'holds no images']),
    ([showing.CONFIG, '--stats'], ['synthetic', 'holds no images']),
    ([showing.CONFIG, '--count=0'], ['--count=0', '1 to 1000']),
    ([showing.CONFIG, '--count=1001'], ['--count=1001', '1 to 1000']),
    ([showing.CONFIG, '--step=-1'], ['--step=-1', '0 or more']),
    ([showing.CONFIG, '--stats', '--count=9'], ['--count', 'not for --stats']),
    ([showing.CONFIG, '--stats', '--output=x'], ['--output', 'not for --stats']),
    ([showing.CONFIG, '--stats', '--step=1'], ['--step', 'not for --stats']),
    ([showing.CONFIG, '--cuont=3'], ["unknown argument '--cuont=3'; did you mean '--count'?"]),
  ],
)
def test_bad_input_is_one_clear_line(flags, words, capsys):
  assert show.main(['show', *flags]) == 2
  builders.error_line(capsys, *words)


def test_missing_files_are_refused(tree, tmp_path, capsys):
  file = tmp_path / 'file'
  file.write_text('')
  assert show.main(['show', *tree, f'--output={file}']) == 2
  builders.error_line(capsys, file)
  assert show.main(['show', *tree, f'--output={tree[-1].partition("path=")[2]}/happy_dog']) == 2
  builders.error_line(capsys, '--output=', 'is inside config.data.path')
  output = tmp_path / 'never'
  flags = [f'--config.data.path={tmp_path / "no"}', f'--output={output}']
  assert show.main(['show', *tree, *flags]) == 2
  builders.error_line(capsys, tmp_path / 'no')
  assert not output.exists()


def test_splits_of_different_classes_are_refused(tmp_path, capsys):
  for split, pair in (('train', 'big_cat'), ('held', 'big_dog')):
    (tmp_path / split / pair).mkdir(parents=True)
    Image.new('RGB', (8, 8)).save(tmp_path / split / pair / '1.png')
  for split in ('train', 'held'):
    (tmp_path / f'{split}.txt').write_text('')
  (tmp_path / 'train.txt').write_text('train/big_cat/1.png 0\n')
  flags = [
    showing.CONFIG,
    '--config.data.source=folder',
    f'--config.data.path={tmp_path}',
    '--config.data.train_split=train.txt',
    '--config.data.eval_split=held',
  ]
  assert show.main(['show', *flags]) == 2
  text = "train.txt: class 0 is 'big_dog', there it is 'big_cat'"
  builders.error_line(capsys, 'held has other classes than ', text)


def test_the_command_imports_no_heavy_library(tmp_path):
  """With modules that fail to import in jax's and TensorFlow's places."""
  names = ('jax', 'flax', 'tensorflow', 'tensorflow_datasets')
  modules = {f'{name}.py': b'raise SystemExit("heavy")' for name in names}
  heavy = builders.write_tree(tmp_path / 'heavy', modules)
  flags = showing.save_arrays(tmp_path / 'set.npz', [0, 1, 1], [1, 0])
  flags.append(f'--output={tmp_path / "out"}')
  done = launching.python('-m', 'anp_jax.data.show', *flags, PYTHONPATH=str(heavy))
  assert (done.returncode, done.stderr) == (0, '')
  paths = [pathlib.Path(line) for line in done.stdout.splitlines()]
  assert paths == [tmp_path / 'out' / f'{name}.png' for name in ('training', 'evaluation')]
  assert showing.pixels(paths[0]).size
