"""After which steps groups of `local_sgd` exchange, against a loop that counts."""

import jax
import jax.numpy as jnp
import pytest

from anp_jax import config as config_lib
from anp_jax.parallel.local_sgd import exchanges
from tests import builders

BATCH = 16


def _config(**keys):
  return builders.config(
    {'strategy.name': 'local_sgd', 'duration': '90 steps'}
    | {f'strategy.{key}': value for key, value in keys.items()}
  )


def _due_steps(count, period, changes):
  """Steps of exchanges: at each change of the period, and each period after."""
  due, left = [], period
  for step in range(1, count + 1):
    left -= 1
    if step in changes:
      period, left = changes[step], 0
    if not left:
      due.append(step)
      left = period
  return due


_PERIODS = [
  ('8', 8, {}),
  ('1,8@20 steps', 1, {20: 8}),
  ('2,3@7 steps,1@0.5 epochs,16@640 examples', 2, {7: 3, 20: 1, 40: 16}),
]


@pytest.mark.parametrize('text, first, changes', _PERIODS)
def test_periods_change_where_they_should(text, first, changes):
  config = _config(period=text)
  config = exchanges.in_steps(config, BATCH, 640)
  due = _due_steps(90, first, changes)
  assert [step for step in range(1, 91) if exchanges.is_due(config, step)] == due
  in_program = jax.jit(lambda step: exchanges.is_due(config, step))
  assert [s for s in range(1, 91) if in_program(jnp.int32(s))] == due
  # Of the last period a part may be left.
  share = exchanges.share(config, BATCH, 640)
  assert abs(share * 90 - len(due)) <= 1 + len(changes)


def test_a_period_that_starts_too_early_is_refused():
  config = _config(period='1,8@50 steps,32@1 epochs')
  with pytest.raises(
    config_lib.ConfigError,
    match="period='1,8@50 steps,32@1 epochs': a period starts at step 40, exp",
  ):
    exchanges.in_steps(config, BATCH, 640)


def test_a_whole_number_is_a_period_as_it_was():
  config = _config(period=5)
  assert config.strategy.period == '5'
  saved = config_lib.flat(config) | {'strategy.period': 5}
  assert config_lib.difference(saved, config) == ''
  assert config_lib.from_flat(saved).strategy.period == '5'
