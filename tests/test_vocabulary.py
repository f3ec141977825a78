"""Tests of vocabulary: classes, adjectives, nouns."""

import hashlib

import numpy as np
import pytest

from anp_jax.data import vocabulary


def test_pairs_are_taken_apart():
  v = vocabulary.Vocabulary(('red_car', 'old_car', 'red_apple', 'old_zoo'))
  assert len(v) == 4
  assert v.is_anp
  assert v.adjectives == ('old', 'red')
  assert v.nouns == ('apple', 'car', 'zoo')
  assert v.adjective_ids().dtype == v.noun_ids().dtype == np.int32
  assert v.adjective_ids().tolist() == [1, 0, 1, 0]
  assert v.noun_ids().tolist() == [1, 1, 0, 2]


@pytest.mark.parametrize(
  'odd', ['car', 'very_old_car', '_car', 'red_', 'red__car', '_', '']
)
def test_one_name_that_is_no_pair_makes_plain_classes(odd):
  v = vocabulary.Vocabulary(('red_car', odd))
  assert not v.is_anp
  assert v.adjectives == v.nouns == ()
  assert v.adjective_ids().shape == v.noun_ids().shape == (0,)
  assert v.adjective_ids().dtype == np.int32


def test_digest_is_of_the_names_in_order():
  v = vocabulary.Vocabulary(('b', 'a', 'é'))
  assert v.digest() == hashlib.sha256('b\na\né'.encode()).hexdigest()
  assert v.digest() != vocabulary.Vocabulary(('a', 'b', 'é')).digest()
  assert v.digest() != vocabulary.Vocabulary(('b', 'aé')).digest()
