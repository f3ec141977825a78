"""Tests of predict's parts: files that are found, read and written about."""

import io
import json
import os
import time
import tracemalloc

import numpy as np
from PIL import Image
import pytest

from anp_jax.data import vocabulary
from anp_jax.data.sources import skipped_files
from anp_jax.predict import (
  file_batches,
  network as network_lib,
  predict_progress,
  predict_rows,
  sheet,
)
from tests import builders


def test_find(tmp_path):
  names = (
    'b/2.JPG b/1.png b/note.txt b/c/4 b/.hid.jpg b/c/0.webp b/.thumbs/9.jpg b/.hid.svg a.jpg plain'
  )
  builders.write_tree(tmp_path, dict.fromkeys(names.split(), b''))
  (tmp_path / 'empty').mkdir()
  strange = os.path.join(os.fsencode(tmp_path), b'\xff.jpg')
  lines = [f'{tmp_path}/plain\n'.encode(), b'\n', strange + b'\r\n']
  paths = [f'{tmp_path}/{p}' for p in ('a.jpg', 'b', 'empty', 'gone', 'a.jpg')]
  counts = skipped_files.SkippedFiles()
  matches = file_batches.find([paths[0], '-', *paths[1:]], lines, counts)
  assert [(p.removeprefix(f'{tmp_path}/'), bool(f)) for p, f in matches] == [
    ('a.jpg', False),
    ('plain', False),
    ('\udcff.jpg', False),
    ('b/1.png', False),
    ('b/2.JPG', False),
    ('b/c/0.webp', False),
    ('empty', True),
    ('gone', False),
    ('a.jpg', False),
  ]
  assert counts.text({}) == (
    f'1 .txt (first {tmp_path}/b/note.txt), 1 without a suffix (first {tmp_path}/b/c/4)'
  )


def test_batches_keep_the_order_and_read_ahead_within_bounds(tmp_path):
  """Slow files, faulty files, and far more files than may wait."""
  for i in range(60):
    (tmp_path / f'{i:02}').write_bytes(bytes([i]))
  requests, most = [], 0

  def paths():
    for i in range(60):
      requests.append(i)
      yield str(tmp_path / f'{i:02}'), 'bad' if i == 20 else ''

  def read(data):
    if data[0] % 7 == 3:
      raise ValueError('odd')
    time.sleep(0.004 * (data[0] % 4 == 0))
    return np.full((2, 2, 3), data[0], np.uint8)

  numbers_read, bad = [], []
  for batch in file_batches.batches(paths(), read, 8, 2, threads=3):
    assert batch.images.shape == (8, 2, 2, 3)
    numbers = batch.images[: len(batch.files), 0, 0, 0].tolist()
    assert [os.path.basename(f) for f in batch.files] == [f'{n:02}' for n in numbers]
    assert not batch.images[len(batch.files) :].any()
    numbers_read += numbers
    bad += [(int(os.path.basename(f)), why) for f, why in batch.unreadable]
    most = max(most, len(requests) - len(numbers_read) - len(bad))
  wrong = [i for i in range(60) if i % 7 == 3]
  assert numbers_read == [i for i in range(60) if i not in (*wrong, 20)]
  assert bad == sorted([(i, 'odd') for i in wrong] + [(20, 'bad')])
  assert most <= 2 * 8 + 3


def test_memory_does_not_grow_with_the_files(tmp_path):
  """Python and NumPy allocate the same for 300 files and for 6,000."""
  (tmp_path / 'one').write_bytes(b'x')

  def held(count):
    paths = ((str(tmp_path / 'one'), '') for _ in range(count))
    read = lambda data: np.zeros((32, 32, 3), np.uint8)  # noqa: E731
    tracemalloc.start()
    for _ in file_batches.batches(paths, read, 8, 32, threads=2):
      pass
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return most

  held(300)
  few, many = held(300), held(6000)
  # Were all 6,000 requested at once, 12 MB would be held. What other
  # threads of the process allocate meanwhile was once 0.1 MB.
  assert many < few + 2e6
  assert few < 2e6


def _vocabulary():
  return vocabulary.Vocabulary(('big_cat', 'old_dog')).with_pairs('yes')


def _names():
  words = network_lib.Words(np.array([[1, 0]]), np.array([[0.8, 0.2]]), np.log([[0.8, 0.2]]))
  return network_lib.Names(
    np.array([[1, 0]]), np.array([[0.75, 0.25]]), {'adjective': words, 'noun': words}
  )


def test_rows_with_tables(tmp_path):
  (tmp_path / 'mood.csv').write_text('ANP,sentiment\nold_dog,-0.5\n')
  emotions = [f'e{i:02}' for i in range(24)]
  shares = ['0'] * 24
  shares[7], shares[2], shares[9] = '0.5', '0.3', '0.2'
  (tmp_path / 'felt.csv').write_text(f'ANP,{",".join(emotions)}\nold_dog,{",".join(shares)}\n')
  table = predict_rows.Rows(
    _vocabulary(), True, str(tmp_path / 'mood.csv'), str(tmp_path / 'felt.csv')
  )
  assert len(table.notes) == 2 and "'big_cat'" in table.notes[0]
  first, second = table.file_rows('x.jpg', _names(), 0)
  assert list(first) == table.columns
  assert first == {
    'file': 'x.jpg',
    'rank': 1,
    'anp': 'old_dog',
    'adjective': 'old',
    'noun': 'dog',
    'probability': 0.75,
    'sentiment': -0.5,
    'emotion_1': 'e07',
    'emotion_1_share': 0.5,
    'emotion_2': 'e02',
    'emotion_2_share': 0.3,
    'emotion_3': 'e09',
    'emotion_3_share': 0.2,
    'adjective_probability': 0.8,
    'noun_probability': 0.8,
    'best_adjective': 'old',
    'best_adjective_probability': 0.8,
    'best_noun': 'dog',
    'best_noun_probability': 0.8,
  }
  assert (second['anp'], second['best_noun']) == ('big_cat', 'cat')
  assert second['sentiment'] is None and second['emotion_1'] is None


def test_csv_and_json_lines():
  table = predict_rows.Rows(_vocabulary())
  result = table.file_rows('a, "b".jpg', _names(), 0)
  stream = io.BytesIO()
  write = predict_rows.writer('csv', stream.write, table.columns)
  assert stream.getvalue() == b'file,rank,anp,adjective,noun,probability\n'
  write(result)
  assert stream.getvalue().splitlines()[1:] == [
    b'"a, ""b"".jpg",1,old_dog,old,dog,0.75',
    b'"a, ""b"".jpg",2,big_cat,big,cat,0.25',
  ]
  stream = io.BytesIO()
  predict_rows.writer('jsonl', stream.write, table.columns)(result)
  assert [json.loads(line) for line in stream.getvalue().splitlines()] == result
  stream = io.BytesIO()
  predict_rows.writer('jsonl', stream.write, table.columns)([{'file': 'é\udcff', 'rank': 1}])
  assert stream.getvalue() == '{"file": "é\\udcff", "rank": 1}\n'.encode()


def test_plain_classes():
  plain = vocabulary.Vocabulary(('t_shirt', 'dress'))
  table = predict_rows.Rows(plain)
  assert table.columns == ['file', 'rank', 'class', 'probability']
  result = table.file_rows('x', _names(), 0)
  assert result[0] == {'file': 'x', 'rank': 1, 'class': 'dress', 'probability': 0.75}
  assert [bar.name for bar in sheet.bars(result)] == ['dress', 't_shirt']
  with pytest.raises(ValueError, match='--explain.*plain'):
    predict_rows.Rows(plain, True)


def test_bars_are_as_long_as_probabilities(tmp_path):
  lengths = []
  for share in (0.25, 0.5, 1.0):
    bar = sheet.Bar('', share, 'anp')
    sheet.write(str(tmp_path / 's.png'), [np.zeros((8, 8, 3), np.uint8)], ['x'], [[bar]], ['title'])
    image = np.asarray(Image.open(tmp_path / 's.png').convert('RGB'))
    blue = (image == (0x9F, 0xD0, 0xEE)).all(-1)
    lengths.append(blue.any(0).sum())
  assert np.abs(np.array(lengths) / lengths[-1] - [0.25, 0.5, 1]).max() < 0.01


def test_progress(monkeypatch):
  monkeypatch.setenv('TERM', 'xterm')
  monkeypatch.setenv('COLUMNS', '80')
  now = [0.0]
  stream = builders.Terminal()
  naming = predict_progress.NamingProgress(stream, lambda: now[0])
  naming._set_total(range(100))
  now[0] = 10.0  # the first batch compiles: no part of the rate
  naming.add_batch(10, [])
  now[0] = 15.0
  naming.add_batch(20, [('a\udcff.jpg', 'odd')])
  text = stream.getvalue()
  assert 'unreadable: a\\udcff.jpg: odd\n' in text
  assert text.endswith('naming: 31/100 files, 4/s, 1 unreadable, 16.4 s left')
  naming.finish()
  assert '30 named in 15.0 s (2.0 a second, start' in stream.getvalue()
