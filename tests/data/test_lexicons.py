"""Tests of lexicons: sentiment and emotions of pairs, whole and broken."""

import csv
import math
import re

import numpy as np
import pytest

from anp_jax.data import lexicons
from tests import builders, launching, mutations

_ANP = launching.ROOT.parent / 'shared' / 'data' / 'anp'
_NEEDS_ANP = pytest.mark.skipif(not _ANP.is_dir(), reason='the published lexicons are not here')

_HEADER = 'The sentiment value of each ANP is ... \n\n\n'
_VSO = (
  '1. beautiful [sentiment: 1.00] [#images: 18,487,527]\n'
  '\tbeautiful_sky [sentiment: 2.00] [#imgs: 703,000]\n'
  '\tbeautiful_day [sentiment: 1.5] [#imgs: 12]\n'
  '2. sad [sentiment: -0.75] [#images: 9]\n'
  '\tsad_9/11 [sentiment: -2.00] [#imgs: 127]'
)
_VSO_PAIRS = {'beautiful_sky': 2.0, 'beautiful_day': 1.5, 'sad_9/11': -2.0}
_MVSO = 'tiny_dog,0.125\nbad_times,-0.714\namazing_grace,2.16\nold_books,.5\n'
_MVSO_PAIRS = {'tiny_dog': 0.125, 'bad_times': -0.714, 'amazing_grace': 2.16, 'old_books': 0.5}
_WHEEL = [f'emotion{chr(97 + i)}' for i in range(24)]
# 0.25 + 0.5 + 21 * 0.01 + 0.04 = 1
_HAPPY = [0.25, 0.5] + [0.01] * 22
_HAPPY[-1] = 0.04
_EMOTIONS = (
  ','.join(['ANP', *_WHEEL])
  + '\n'
  + ','.join(['happy_dog', *map(str, _HAPPY)])
  + '\n'
  + 'old_fear,1'
  + ',0' * 23
  + '\n'
)


def _file(folder, text):
  path = folder / 'table'
  path.write_bytes(text if isinstance(text, bytes) else text.encode())
  return str(path)


def _refused(words, folder, text, read=lexicons.sentiments):
  """The table is refused in a line that names the file and has the words."""
  path = _file(folder, text)
  builders.assert_refused([path, *words], read, path)


@pytest.mark.parametrize('header', ['', _HEADER, 'one line\n'])
@pytest.mark.parametrize('end', ['\n', '\r\n'])
def test_vso(tmp_path, header, end):
  path = _file(tmp_path, (header + _VSO + '\n').replace('\n', end))
  scores = lexicons.sentiments(path)
  assert scores == _VSO_PAIRS
  assert list(scores) == list(_VSO_PAIRS)


@pytest.mark.parametrize(
  'header', ['', 'anp,score\n', 'ANP, sentiment score\r\n', 'name,mean_score\n']
)
def test_mvso(tmp_path, header):
  path = _file(tmp_path, header + _MVSO)
  scores = lexicons.sentiments(path)
  assert scores == _MVSO_PAIRS
  assert list(scores) == list(_MVSO_PAIRS)


@pytest.mark.parametrize(
  'line, words',
  [
    ('tiny_dog,nan', ['is not a number']),
    ('tiny_dog,', ['is not a number']),
    ('tiny_dog,1_0', ['is not a number']),
    ('tiny_dog,\u0661', ['is not a number']),
    ('tiny_dog,1e999', ['outside [-3, 3]']),
    ('tiny_dog,3.001', ["'3.001' is outside [-3, 3]"]),
    ('tiny_dog', ['1 fields', 'expected 2']),
    ('tiny_dog,1,2', ['3 fields', 'expected 2']),
    ('tinydog,1', ["'tinydog' is not an adjective_noun pair"]),
    ('tiny_big_dog,1', ['is not an adjective_noun pair']),
    ('_dog,1', ['is not an adjective_noun pair']),
    ('tiny_d\0g,1', ['is not an adjective_noun pair']),
    ('', ['1 fields']),
  ],
)
def test_rows_of_mvso_that_are_refused(tmp_path, line, words):
  # Alike on the first line, where a header could stand, and below.
  for text, number in ((f'{line}\n{_MVSO}', 1), (f'a_b,1\n{line}\n{_MVSO}', 2)):
    _refused([f'table:{number}: ', *words], tmp_path, text)


def test_mvso_as_a_whole(tmp_path):
  _refused(['table:5: '], tmp_path, _MVSO + 'anp,score\n')  # a header, too late
  for again in ('0.125', '0.25'):
    _refused(['table:5: ', "'tiny_dog'", 'line 1'], tmp_path, f'{_MVSO}tiny_dog,{again}\n')
  for text in ('anp,score\n', _VSO.split('\n')[0]):
    _refused(['no adjective_noun pairs'], tmp_path, text)
  path = _file(tmp_path, 'a_b,3\n c_d ,\t-3.0 \ne_f,+1E-1\n')
  assert lexicons.sentiments(path) == {'a_b': 3.0, 'c_d': -3.0, 'e_f': 0.1}
  _refused(['empty'], tmp_path, '\n')
  _refused(['table:2: byte 0xff'], tmp_path, b'a_b,1\nc\xff_d,2\n')
  builders.assert_refused(['No such file'], lexicons.sentiments, str(tmp_path / 'none'))


@pytest.mark.parametrize(
  'old, new, number, words',
  [
    ('2.00]', '2.01]', 5, ["'2.01' is outside [-2, 2]"]),
    ('1.5]', 'nan]', 6, ["'nan' is not a number"]),
    ('sad_9/11', 'sad', 8, ['is not a line of VSO']),
    ('\tsad_9', 'sad_9', 8, ['is not a line of VSO']),
    ('[#imgs: 12]', '[#imgs: x]', 6, ['is not a line of VSO']),
    ('beautiful_day', 'beautiful_sky', 6, ["'beautiful_sky' is on line 5"]),
    ('\tbeautiful_day', '\n\tbeautiful_day', 6, ["'' is not a line of VSO"]),
  ],
)
def test_lines_of_vso_that_are_refused(tmp_path, old, new, number, words):
  _refused([f'table:{number}: ', *words], tmp_path, _HEADER + _VSO.replace(old, new, 1))


def test_emotions(tmp_path):
  for end in ('\n', '\r\n'):
    path = _file(tmp_path, _EMOTIONS.replace('\n', end))
    names, rows = lexicons.emotions(path)
    assert names == tuple(_WHEEL)
    assert list(rows) == ['happy_dog', 'old_fear']
    for row in rows.values():
      assert row.shape == (24,) and row.dtype == np.float32
    # Exact: the float32 nearest to each decimal.
    assert rows['happy_dog'].tolist() == np.float32(_HAPPY).tolist()
    assert rows['old_fear'].tolist() == [1.0] + [0.0] * 23


def test_emotions_add_up_within_rounding(tmp_path):
  # 24 equal shares, rounded to three digits: 24 * 0.042 = 1.008.
  row = 'sad_cat' + ',0.042' * 24
  rows = lexicons.emotions(_file(tmp_path, f'{_EMOTIONS}{row}\n'))[1]
  assert rows['sad_cat'].tolist() == [np.float32(0.042)] * 24
  for value in (0.0412, 0.0422, 0.0):  # 0.9888, 1.0128, 0
    text, total = f'{_EMOTIONS}sad_cat' + f',{value}' * 24, f'{24 * value:.6g}'
    _refused(['table:4: ', "'sad_cat'", total], tmp_path, text, lexicons.emotions)


@pytest.mark.parametrize(
  'row, words',
  [
    ('a_b,1' + ',0' * 22, ['24 fields', 'expected 25']),
    ('ab,1' + ',0' * 23, ["'ab' is not an adjective_noun pair"]),
    ('a_b,nan' + ',0' * 23, ["'nan' is not a number"]),
    ('a_b,-0.5,1.01,0.49' + ',0' * 21, ["'-0.5' is outside [0, 1.01]"]),
    ('happy_dog,1' + ',0' * 23, ["'happy_dog'", 'line 2']),
    ('', ['1 fields']),
  ],
)
def test_rows_of_emotions_that_are_refused(tmp_path, row, words):
  text = f'{_EMOTIONS}{row}\nold_sea,1' + ',0' * 23
  _refused(['table:4: ', *words], tmp_path, text, lexicons.emotions)


def test_emotions_may_repeat_a_row_as_it_was(tmp_path):
  _refused(['no rows'], tmp_path, _EMOTIONS.split('\n')[0], lexicons.emotions)
  text = f'{_EMOTIONS}old_fear,1.000' + ',0.0' * 23 + '\n'
  rows = lexicons.emotions(_file(tmp_path, text))[1]
  assert list(rows) == ['happy_dog', 'old_fear']
  other = f'{text}old_fear,0,1' + ',0' * 22
  _refused(['table:5: ', 'line 3'], tmp_path, other, lexicons.emotions)


@pytest.mark.parametrize(
  'old, new, words',
  [
    (',emotionx', '', ['24 fields', 'expected 25']),
    ('emotionx', 'emotiona', ["'emotiona'"]),
    ('emotionx', '', ["''"]),
    ('emotionx', '0.5', ["'0.5'"]),
    # A table without its header.
    (_EMOTIONS.split('\n')[0] + '\n', '', ["'0.25'", 'header']),
  ],
)
def test_headers_of_emotions_that_are_refused(tmp_path, old, new, words):
  _refused(['table:1: ', *words], tmp_path, _EMOTIONS.replace(old, new, 1), lexicons.emotions)


@_NEEDS_ANP
def test_published_vso(tmp_path):
  path = _ANP / 'vso_3244ANPs.txt'
  scores = lexicons.sentiments(str(path))
  assert len(scores) == 3244
  text = path.read_text()
  matches = re.findall(r'\t(\S+) .sentiment: (\S+)\]', text)
  assert scores == {name: float(score) for name, score in matches}
  assert scores['beautiful_flower'] == 1.77
  names = (_ANP / 'mtvso553_anplabels.txt').read_text().split()
  assert len(names) == 553 and scores.keys() >= set(names)
  # The same file as other copies have it.
  lines = text.split('\n')
  assert lines[3].startswith('1. beautiful')
  for other in ('\n'.join(lines[3:]), '\r\n'.join(lines), '\n'.join(lines)):
    assert lexicons.sentiments(_file(tmp_path, other)) == scores


@_NEEDS_ANP
def test_published_mvso():
  path = _ANP / 'mvso_sentiment_english.csv'
  scores = lexicons.sentiments(str(path))
  assert len(scores) == 4421
  with path.open(newline='') as f:
    assert scores == {name: float(score) for name, score in csv.reader(f)}
  assert (min(scores.values()), max(scores.values())) == (-2.363, 2.16)
  names = (_ANP / 'mvso1200_anp_list.txt').read_text().split()
  assert len(names) == 1200 and scores.keys() >= set(names)


def _is_pair(name):
  return len(name.split('_')) == 2 and all(name.split('_'))


@pytest.mark.parametrize('table', [_HEADER + _VSO, _MVSO, _EMOTIONS])
def test_damaged_tables_load_or_are_refused_in_one_line(tmp_path, table):
  def check(result):
    if table == _EMOTIONS:
      names, result = result
      assert len(set(names)) == 24
      for row in result.values():
        assert row.shape == (24,) and row.min() >= 0
        # A hundredth, and what rounding to float32 adds.
        assert abs(row.sum(dtype=np.float64) - 1) < 0.010001
    else:
      assert all(math.isfinite(s) and abs(s) <= 3 for s in result.values())
    assert result and all(map(_is_pair, result))

  read = lexicons.emotions if table == _EMOTIONS else lexicons.sentiments
  mutations.check_reader(tmp_path / 'table', table.encode(), read, check)
