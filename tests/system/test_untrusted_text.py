"""Tests of untrusted_text: what a data set's names may do to their readers."""

import csv
import io
import os
import unicodedata

from hypothesis import given, strategies
import numpy as np
import pytest

from anp_jax import config as config_lib
from anp_jax.data import sources
from anp_jax.data.sources import skipped_files
from anp_jax.predict import predict_progress, predict_rows
from anp_jax.system import untrusted_text
from tests import builders

_DIRECTIONS = 'LRE RLE LRO RLO PDF LRI RLI FSI PDI'.split()
_NAME = 'a\x1b[31m\nWARNING: forged\u202egpj.jpg'


@pytest.mark.parametrize(
  'text, want',
  [
    ('café/犬.jpg', 'café/犬.jpg'),
    ('a\x1b[31m', r'a\x1b[31m'),
    ('a\nb\tc\r', r'a\nb\tc\r'),
    ('\x9b31m\x7f', r'\x9b31m\x7f'),
    ('a\u2028b\u202e', r'a\u2028b\u202e'),
    ('\udcff.jpg', r'\udcff.jpg'),
    ('e\u0301', 'e\u0301'),
    ('a\u200e\u200f\u061c\u2066b', r'a\u200e\u200f\u061c\u2066b'),  # marks of direction
    ('8.15.03\u202fPM.png', '8.15.03\u202fPM.png'),  # as macOS names a screenshot
    ('\xa0\u3000', '\xa0\u3000'),
    ('\u06cc\u200c\u062e', '\u06cc\u200c\u062e'),  # a joiner of Persian
  ],
)
def test_printable(text, want):
  assert config_lib.printable(text) == want


@given(strategies.text())
def test_nothing_printable_is_obeyed(text):
  result = config_lib.printable(text)
  assert len(f'x{result}x'.splitlines()) == 1
  assert not any(ord(c) < 32 or 127 <= ord(c) < 160 for c in result)
  assert not any(unicodedata.bidirectional(c) in _DIRECTIONS for c in result)


@pytest.mark.parametrize(
  'value, want',
  [
    ('=1+1', "'=1+1"),
    ('+cmd', "'+cmd"),
    ('-a.jpg', "'-a.jpg"),
    ('@x', "'@x"),
    ('\t=1', "'\t=1"),
    ('-1.5', '-1.5'),
    (-1.5, -1.5),
    (None, None),
    ('a=b', 'a=b'),
    ('', ''),
  ],
)
def test_csv_cell(value, want):
  assert untrusted_text.csv_cell(value) == want


def test_names_of_files_are_one_line(tmp_path, config):
  photo = builders.encode_image(builders.random_pixels(9, 9), 'JPEG')
  root = builders.write_tree(tmp_path, {'train/cat/0.jpg': photo})
  (root / 'train' / 'cat' / _NAME).write_bytes(photo)
  config.data.source, config.data.path = 'folder', str(root)
  source = sources.open_split(config, 'train', 'train')
  names = [source.example_name(i) for i in range(2)]
  escaped = r'a\x1b[31m\nWARNING: forged\u202egpj.jpg'
  assert names == [f'{root}/train/cat/{n}' for n in ('0.jpg', escaped)]
  assert source.read(np.array([1]))[0] == [photo]
  skipped = skipped_files.SkippedFiles()
  skipped.add(os.path.join('x', _NAME), 'odd')
  assert skipped.text({}) == f'1 odd (first x/{escaped})'


def test_what_predict_writes_and_prints():
  stream = io.BytesIO()
  write = predict_rows.writer('csv', stream.write, ['file', 'rank', 'class'])
  write([{'file': '=HYPERLINK("x").jpg', 'rank': 1, 'class': '@cat'}])
  text = stream.getvalue().decode()
  assert list(csv.reader(io.StringIO(text)))[1] == ['\'=HYPERLINK("x").jpg', '1', "'@cat"]
  stream = io.StringIO()
  predict_progress.NamingProgress(stream).add_batch(0, [(_NAME, 'not an image')])
  lines = [x for x in stream.getvalue().splitlines() if 'unreadable: ' in x]
  assert len(lines) == 1 and '\x1b[31m' not in stream.getvalue()
