"""Tests of vocabulary: classes, adjectives, nouns, and files that list them."""

import hashlib
import os
import pathlib

import numpy as np
import pytest

from anp_jax.data import vocabulary
from tests import builders, mutations

_PAIRS = b'red_car\nold_dog\nred_dog\nnew_car\n'
_ADJECTIVES = b'red\nblue\nold\nnew\n'
_NOUNS = b'dog\nzoo\ncar\n'


def _files(folder, anps, adjectives=None, nouns=None):
  """Paths of list files with the given bytes; '' where there are none."""
  paths = []
  for name, data in (('anps', anps), ('adj', adjectives), ('nouns', nouns)):
    paths.append('' if data is None else f'{folder}/{name}.txt')
    if data is not None:
      pathlib.Path(paths[-1]).write_bytes(data)
  return paths


def _refused(words, *paths, **named):
  builders.assert_refused(words, vocabulary.from_lists, *paths, **named)


def test_pairs_are_taken_apart():
  v = vocabulary.Vocabulary(('red_car', 'old_car', 'red_apple', 'old_zoo'))
  assert len(v) == 4
  assert v.is_anp
  assert v.adjectives == ('old', 'red')
  assert v.nouns == ('apple', 'car', 'zoo')
  assert v.adjective_ids().dtype == v.noun_ids().dtype == np.int32
  assert v.adjective_ids().tolist() == [1, 0, 1, 0]
  assert v.noun_ids().tolist() == [1, 1, 0, 2]


@pytest.mark.parametrize('odd', ['car', 'very_old_car', '_car', 'red_', 'red__car', '_', ''])
def test_one_name_that_is_no_pair_makes_plain_classes(odd):
  v = vocabulary.Vocabulary(('red_car', odd))
  assert not v.is_anp
  assert v.adjectives == v.nouns == ()
  assert v.adjective_ids().shape == v.noun_ids().shape == (0,)
  assert v.adjective_ids().dtype == np.int32


def test_one_order_may_be_given():
  v = vocabulary.Vocabulary(('red_car', 'old_car', 'old_zoo'), nouns=('zoo', 'car'))
  assert v.adjectives == ('old', 'red')
  assert v.adjective_ids().tolist() == [1, 0, 0]
  assert v.noun_ids().tolist() == [1, 1, 0]


def test_digest_tells_orders_apart():
  names = ('red_car', 'old_zoo')
  plain = hashlib.sha256(b'red_car\nold_zoo').hexdigest()

  def digest(*orders):
    return vocabulary.Vocabulary(names, *orders).digest()

  assert digest() == plain
  # The order that is derived, spelt out, changes nothing.
  assert digest(('old', 'red'), ('car', 'zoo')) == plain
  variants = {
    digest(('red', 'old')),
    digest(None, ('zoo', 'car')),
    digest(('red', 'old'), ('zoo', 'car')),
    digest(('old', 'red', 'sad')),
    digest(None, ('car', 'sad', 'zoo')),
  }
  assert len(variants | {plain}) == 6
  # Published in fingerprints of checkpoints: it must not move.
  text = b'[["red_car", "old_zoo"], ["red", "old"], ["car", "zoo"]]'
  assert digest(('red', 'old')) == hashlib.sha256(text).hexdigest()


_TWO = ('red_car', 'old_zoo')


@pytest.mark.parametrize(
  'names, orders, words',
  [
    (_TWO, [('red', 'odd')], ['class 1', "adjective 'old' of 'old_zoo'", "you mean 'odd'?"]),
    (_TWO, [None, ('zoo', 'dog')], ['class 0', "noun 'car'"]),
    (_TWO, [None, ('zoo', 'car', 'dog', 'car')], ["nouns 3: 'car' repeats nouns 1"]),
    (('red_car', 'b', 'red_car'), [], ["class 2: 'red_car' repeats class 0"]),
    (('red_car', 'hat'), [('red',)], ["class 1: 'hat'", 'given']),
    (('red_car', 'hat'), [None, ('car',)], ["class 1: 'hat'", 'given']),
    (('a\x1b[31m', 'b'), [], [r"'a\x1b[31m' holds a control character"]),
    (('a', '\x9b2J'), [], [r"'\x9b2J' holds a control character"]),
    (_TWO, [('red', 'old', 'x\r')], [r"'x\r' holds a control character"]),
    (_TWO, [None, ('car', 'zoo', '\x7f')], [r"'\x7f' holds a control character"]),
  ],
)
def test_names_that_are_refused(names, orders, words):
  builders.assert_refused(words, vocabulary.Vocabulary, names, *orders)


def test_names_of_any_script():
  # A folder's name that is not UTF-8 comes with a lone surrogate.
  broken = os.fsdecode(b'red_caf\xe9')
  names = ('süß_кот', '赤い_猫', 'red_\U0001f600', broken)
  v = vocabulary.Vocabulary(names)
  assert v.is_anp
  ids = zip(v.adjective_ids(), v.noun_ids())
  assert tuple(f'{v.adjectives[a]}_{v.nouns[n]}' for a, n in ids) == names
  assert v.digest() != vocabulary.Vocabulary(names, nouns=v.nouns[::-1]).digest()


def test_pairs_are_names_whose_parts_recur():
  for names, pairs in (
    (('red_car', 'old_car'), True),
    (('red_car', 'red_zoo'), True),
    (('tennis_ball', 'sports_car', 'school_bus'), False),
    (('tennis_ball', 'golf_ball', 'hat'), False),
    (('red_car',), False),
    (('class_1', 'class_2', 'class_10'), False),  # numbered
    (('class_1', 'class_two'), True),
    ((), False),
  ):
    assert vocabulary.Vocabulary(names).is_anp == pairs


def test_what_is_asked_for_counts_more_than_the_names():
  v = vocabulary.Vocabulary(('red_car', 'old_zoo'))
  pairs = v.with_pairs('yes')
  assert pairs.adjectives == ('old', 'red') and pairs.nouns == ('car', 'zoo')
  assert pairs.adjective_ids().tolist() == [1, 0]
  assert pairs == vocabulary.Vocabulary(v.names, pairs.adjectives, pairs.nouns)
  # What a run was begun with stays, whatever its names look like.
  for result in (v, pairs):
    assert vocabulary.from_json(result.to_json()) == result.with_pairs('auto')
  assert pairs.with_pairs('no') == v == v.with_pairs('no') != pairs
  ordered = vocabulary.Vocabulary(v.names, ('red', 'old', 'odd'))
  assert ordered.with_pairs('yes') == ordered
  plain = vocabulary.Vocabulary(('red_car', 'hat'))
  builders.assert_refused(["class 1: 'hat'", 'config.data.pairs=yes'], plain.with_pairs, 'yes')


# Files.


def test_lists_give_line_numbers(tmp_path, monkeypatch):
  monkeypatch.setenv('HOME', str(tmp_path))
  anps, adjectives, nouns = _files(tmp_path, _PAIRS, _ADJECTIVES, _NOUNS)
  v = vocabulary.from_spec('~/anps.txt, ~/adj.txt ,~/nouns.txt')
  assert v.names == ('red_car', 'old_dog', 'red_dog', 'new_car')
  assert v.adjectives == ('red', 'blue', 'old', 'new')  # blue is of no class
  assert v.nouns == ('dog', 'zoo', 'car')
  assert v.adjective_ids().tolist() == [0, 2, 0, 3]
  assert v.noun_ids().tolist() == [2, 0, 0, 2]
  alone = vocabulary.from_spec(f' {anps} ')
  assert alone.adjectives == ('new', 'old', 'red') and alone.nouns == ('car', 'dog')
  assert vocabulary.from_lists(anps, adjectives).nouns == ('car', 'dog')
  assert vocabulary.from_lists(anps, nouns=nouns).nouns == ('dog', 'zoo', 'car')


@pytest.mark.parametrize(
  'data',
  [
    b'red_car\nold_dog',
    b'red_car\r\nold_dog\r\n',
    b'\xef\xbb\xbfred_car\nold_dog\n',
    b' red_car\t\n\told_dog \r\n\n \t\r\n\n',
  ],
)
def test_ways_to_write_a_list(tmp_path, data):
  v = vocabulary.from_lists(*_files(tmp_path, data))
  assert v.names == ('red_car', 'old_dog')


def test_only_line_feeds_end_lines_and_only_ascii_blanks_go(tmp_path):
  text = 'a\u2028b_c\n\u00a0rot_d\nd_e'
  v = vocabulary.from_lists(*_files(tmp_path, text.encode()))
  assert v.names == ('a\u2028b_c', '\u00a0rot_d', 'd_e')


@pytest.mark.parametrize(
  'data',
  [
    b't_shirt\ndress\nhat\n',
    b't_shirt\nhat\n',  # half of them: not more than half
    b'a_b_c\n_d\ne_\n',
    b'cat\ndog\n',
    b'tennis_ball\nsports_car\nhat\n',  # most have the form, no part recurs
  ],
)
def test_lists_of_plain_classes(tmp_path, data):
  v = vocabulary.from_lists(*_files(tmp_path, data))
  assert v.names == tuple(data.decode().split())
  assert not v.is_anp


@pytest.mark.parametrize('odd', ['hat', '_hat', 'hat_', 'a_b_c', '__'])
def test_most_lines_pairs_means_all_must_be(tmp_path, odd):
  anps = _files(tmp_path, f'red_car\n{odd}\nred_dog\n'.encode())
  _refused(['anps.txt:2: ', repr(odd), '2 of 3', 'config.data.pairs=no'], *anps)
  _refused(['anps.txt:2: ', repr(odd), 'config.data.pairs=yes'], *anps, pairs='yes')
  plain = vocabulary.from_lists(*anps, pairs='no')
  assert plain.names == ('red_car', odd, 'red_dog') and not plain.is_anp


def test_given_parts_mean_that_all_are_pairs(tmp_path):
  anps, adjectives, nouns = _files(tmp_path, b't_shirt\nhat\n', b't\n', b'x\n')
  for parts in ((adjectives,), ('', nouns), (adjectives, nouns)):
    _refused(["anps.txt:2: 'hat'", 'given'], anps, *parts)


@pytest.mark.parametrize(
  'data, words',
  [
    (b'red_car\n\nold_dog\n', ['anps.txt:2: ', 'empty']),
    (b'\nred_car\n', ['anps.txt:1: ', 'empty']),
    (b'', ['anps.txt is empty']),
    (b'\xef\xbb\xbf', ['anps.txt is empty']),
    (b'a_b\nc_d\n a_b \n', ["anps.txt:3: 'a_b' repeats ", 'anps.txt:1']),
    (b'a_b\nc_d\xff\n', ['anps.txt:2: byte 0xff is not UTF-8']),
    (b'a_b\nc_d\ne_\xc3', ['anps.txt:3: byte 0xc3 is not UTF-8']),
    (b'a_b\nbrave_9/11\n', ["anps.txt:2: 'brave_9/11'", 'folder']),
    (b'..\n', ["anps.txt:1: '..'", 'folder']),
    (b'a_\x00b\n', [r"anps.txt:1: 'a_\x00b'", 'control']),
    (b'a_b\rc_d\r', [r"anps.txt:1: 'a_b\rc_d'", 'control']),
    (b'a_b\nc_\xc2\x85d\n', [r"anps.txt:2: 'c_\x85d'", 'control']),
    (b'a_b\n' + 'ä'.encode() * 128, ['anps.txt:2: ', 'folder']),  # 255 bytes is the limit
  ],
)
def test_lines_that_are_refused(tmp_path, data, words):
  text = builders.assert_refused(words, vocabulary.from_lists, *_files(tmp_path, data))
  assert len(text) < 200 + len(str(tmp_path)) * 2


def test_words_that_a_list_misses(tmp_path):
  anps, adjectives, nouns = _files(tmp_path, _PAIRS, b'red\nold\nnow', b'car')
  words = ["anps.txt:4: adjective 'new' of 'new_car'", adjectives, "mean 'now'?"]
  _refused(words, anps, adjectives)
  _refused(["anps.txt:2: noun 'dog' of 'old_dog'", nouns], anps, '', nouns)
  nouns = _files(tmp_path, _PAIRS, None, _NOUNS + b'car\n')[2]
  _refused([f"{nouns}:4: 'car' repeats"], anps, '', nouns)


def test_files_that_cannot_be_read(tmp_path):
  missing = str(tmp_path / 'none.txt')
  anps = _files(tmp_path, _PAIRS)[0]
  _refused([missing, 'No such file'], missing)
  _refused([missing], anps, '', missing)
  _refused([str(tmp_path)], str(tmp_path))
  _refused(['cannot read'], 'a\0b')
  _refused(['cannot read'], '')


@pytest.mark.parametrize('spec', ['', ' ', 'a,b', 'a,,c', 'a,b,c,d', 'a,b,'])
def test_spec_of_another_number_of_paths(spec):
  builders.assert_refused(['config.data.lists', repr(spec)], vocabulary.from_spec, spec)


@pytest.mark.parametrize('count', [1, 3])
def test_damaged_lists_load_or_are_refused_in_one_line(tmp_path, count):
  paths = _files(tmp_path, *[_PAIRS, _ADJECTIVES, _NOUNS][:count])

  def check(v):
    assert len(set(v.names)) == len(v) > 0
    assert len(set(v.adjectives)) == len(v.adjectives)
    assert len(set(v.nouns)) == len(v.nouns)
    if not v.is_anp:
      assert count == 1 and v.adjectives == v.nouns == ()
      return
    ids = list(zip(v.adjective_ids().tolist(), v.noun_ids().tolist()))
    assert min(map(min, ids)) >= 0
    assert tuple(f'{v.adjectives[a]}_{v.nouns[n]}' for a, n in ids) == v.names

  for i, data in enumerate([_PAIRS, _ADJECTIVES, _NOUNS][:count]):
    mutations.check_reader(paths[i], data, lambda _: vocabulary.from_lists(*paths[:count]), check)
    pathlib.Path(paths[i]).write_bytes(data)
