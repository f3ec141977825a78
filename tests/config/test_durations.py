"""Durations in steps, against exact fractions."""

import fractions
import math

import pytest

from anp_jax import config as config_lib
from tests import builders

_NUMBERS = '0 0.0001 0.01 0.07 0.1 0.29 0.58 0.7 1 1.1 1.5 2.5 7 90 1e3 2e6'.split()


@pytest.mark.parametrize(
  'batch_size, examples', [(1, 100), (8, 300), (3, 10), (64, 1000), (2048, 943017)]
)
@pytest.mark.parametrize('unit', [' step', ' steps', ' epoch', 'epochs ', ' examples'])
def test_rounded_up_from_the_exact_number(unit, batch_size, examples):
  """0.07 x 100 is 7.000000000000001 in floats, and 7 steps."""
  images = {'step': batch_size, 'epoch': examples, 'example': 1}[unit.strip().rstrip('s')]
  for number in _NUMBERS:
    exact = fractions.Fraction(number) * images / batch_size
    assert config_lib.steps(f'{number}{unit}', batch_size, examples) == math.ceil(exact), number


@pytest.mark.parametrize(
  'text, nearest',
  [
    *((text, '') for text in ('', '10', 'epochs', '-1 epochs', '1 s', '5 weeks', '1,5 epochs')),
    *((f'{number} steps', '') for number in ('1 epochs 2', 'nan', 'inf', '1e999')),
    ('3 epoks', 'epochs'),
    ('3 example5', 'examples'),
  ],
)
def test_what_is_no_duration_is_one_line(text, nearest):
  line = builders.refusal(config_lib.steps, text, 64, 1000)
  assert repr(text) in line
  assert "such as '10 epochs', '500 steps' or '1e6 examples'" in line
  assert not nearest or f"did you mean '{nearest}'?" in line
