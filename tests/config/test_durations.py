"""Durations in steps, against exact fractions."""

import fractions
import math

import pytest

from anp_jax.config import durations


@pytest.mark.parametrize('batch_size, examples', [(1, 100), (8, 300), (3, 10)])
@pytest.mark.parametrize('number', ['0', '0.01', '0.07', '0.1', '0.29', '0.58', '1.5', '7'])
@pytest.mark.parametrize('unit', ['step', 'epochs', 'examples'])
def test_rounded_up_from_the_exact_number(number, unit, batch_size, examples):
  """0.07 x 100 is 7.000000000000001 in floats, and 7 steps."""
  images = {'step': batch_size, 'epochs': examples, 'examples': 1}[unit]
  exact = fractions.Fraction(number) * images / batch_size
  got = durations.steps(f'{number} {unit}', batch_size, examples)
  assert got == math.ceil(exact)


def test_seven_hundredths_of_a_hundred():
  assert durations.steps('0.07 epochs', 1, 100) == 7
