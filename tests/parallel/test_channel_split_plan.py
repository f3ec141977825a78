"""The plan of a channel split, and the cost model that it comes from."""

import dataclasses
import itertools

import numpy as np
import pytest

from anp_jax.parallel.channel_split import split as split_lib
from anp_jax.runtimes.calibration import costs as costs_lib, planner, similar
from tests import builders, splitting

CollectiveCost = costs_lib.CollectiveCost
_LINK = CollectiveCost((0.5, 1e-3), (0.25, 2e-3))

# The cost model, in closed form.


def test_a_step_is_the_sum_of_layers_collectives_and_rest():
  layers = {
    'first': splitting.layer(4, 2, output=600, kernel=240),
    'second': splitting.layer(8, 4, output=1200, input=600, kernel=480, reads='first'),
  }
  costs = splitting.costs(layers, rest=3.0, link=_LINK, other_bytes=100)
  plan = {'first': (16, 8), 'second': (12, 12)}

  def seconds(path):
    return costs.layer_seconds(path, plan[path], plan)

  # Both take 4 s; the part of 16 features takes longest, as 32 of 24 would.
  first = 4 + (0.5 + 600 * 32 / 24 * 1e-3)
  # The slower one counts; of the operand's gradient each gets its channels.
  second = 12 / 4 + (0.5 + 1.2) + (0.5 + 600 * 32 / 24 * 1e-3)
  gradients = 0.25 + 100 * 2e-3
  assert seconds('first') == pytest.approx(first)
  assert seconds('second') == pytest.approx(second)
  assert costs.step_seconds(plan) == pytest.approx(3 + first + second + gradients)
  # Not split, its gradient is summed with the others; the slower counts.
  del plan['first']
  # All of the operand's gradient on every device.
  second = 12 / 4 + (0.5 + 1.2) + (0.25 + 600 * 2e-3)
  assert seconds('second') == pytest.approx(second)
  expected = 3 + 24 / 2 + second + gradients + 240 * 2e-3
  assert costs.step_seconds(plan) == pytest.approx(expected)
  plan = {'first': (16, 8)}
  expected = 3 + first + 24 / 4 + gradients + 480 * 2e-3
  assert costs.step_seconds(plan) == pytest.approx(expected)
  # Nothing split: all do the same, and sum all gradients.
  gradients = 0.25 + (100 + 240 + 480) * 2e-3
  assert costs.step_seconds({}) == pytest.approx(3 + 24 / 2 + 24 / 4 + gradients)
  assert costs.baseline == 0 and costs.alone == pytest.approx(3 + 6 + 3)


def test_a_step_waits_for_the_slowest_of_each_layer():
  """One is slower on the first layer, the other on the second."""
  layers = {'first': splitting.layer(4, 2), 'second': splitting.layer(2, 4)}
  costs = splitting.costs(layers, rest=3.0)
  plan = {'first': (12, 12), 'second': (12, 12)}
  assert costs.step_seconds(plan) == pytest.approx(3 + 6 + 6)


def test_devices_wait_only_where_a_layer_is_split():
  """What one is slower at, the other is at the next layer."""
  layers = {
    'first': splitting.layer(4, 2),
    'second': splitting.layer(2, 4),
    'third': splitting.layer(2, 4),
  }
  costs = splitting.costs(layers, rest=3.0)
  # 6 + 12 and 12 + 6 s before the third, which takes 6 and 3 s.
  assert costs.step_seconds({'third': (12, 12)}) == pytest.approx(3 + 24)
  # In other parts, what one has more of is made up for.
  assert costs.step_seconds({'third': (8, 16)}) == pytest.approx(3 + 22)
  assert list(costs.behind({}, 'third')) == pytest.approx([18 + 3, 18 + 3])


def test_a_device_that_is_behind_gets_less():
  """It takes twice as long for what is not split."""
  layers = {'conv': splitting.layer(4, 4)}
  costs = dataclasses.replace(splitting.costs(layers), unsplit=(9.0, 12.0))
  # The rest of 3 and 6 s, and 24 features at 4 a second: 18 and 6 take 7.5 s.
  assert planner.best_plan(costs) == {'conv': (18, 6)}
  assert costs.step_seconds({'conv': (18, 6)}) == pytest.approx(7.5)


def test_devices_of_similar_speed_get_the_mean_of_their_times():
  layers = {'a': splitting.layer(4.0, 3.8, 1.0)}
  costs = splitting.costs(layers, rest=1.0)
  averaged = costs.mapped(similar.averaging(costs.unsplit))
  mean = (24 / 4 + 24 / 3.8) / 2
  assert averaged.layers['a'].alone == pytest.approx((mean, mean, 24))
  assert averaged.unsplit == pytest.approx((1 + mean, 1 + mean, 25))
  assert averaged.layers['a'].seconds[0] == averaged.layers['a'].seconds[1]
  assert averaged.layers['a'].seconds[2] == list(layers['a'].seconds[2])


@pytest.mark.parametrize('devices', [1, 2, 3, 8])
def test_ideal_of_equal_devices(devices):
  costs = splitting.costs(
    {'a': splitting.layer(*[2] * devices), 'b': splitting.layer(*[6] * devices)}, 4.0
  )
  f = 16 / 20
  expected = 1 / ((1 - f) + f / devices)
  assert costs.alone / costs.ideal_seconds() == pytest.approx(expected)


def test_times_between_and_below_what_was_measured():
  layer = costs_lib.Layer(16, (9.0,), (4, 8, 16), ((2.0, 3.0, 9.0),), 0, 0, 0)
  counts = [0, 2, 4, 6, 8, 12, 16]
  # On lines; below, on the first line.
  expected = [0, 1.5, 2, 2.5, 3, 6, 9]
  np.testing.assert_allclose(layer.seconds_for(0, counts), expected)
  steep = costs_lib.Layer(16, (9.0,), (4, 8, 16), ((2.0, 6.0, 9.0),), 0, 0, 0)
  # Not less than in proportion, where the line would cross zero.
  assert steep.seconds_for(0, 2) == pytest.approx(1.0)


# The plan, compared with all divisions.


@pytest.mark.parametrize(
  'rates, bandwidth',
  [
    *(((4, 4), bandwidth) for bandwidth in (1e2, 1e4)),
    *(((4, 2), bandwidth) for bandwidth in (1e2, 1e3, 1e6)),
    builders.slow((6, 3, 1), 1e3),
    *(builders.soak((6, 3, 1), n) for n in (1e2, 1e4, 1e6)),
  ],
)
def test_no_plan_is_much_better(rates, bandwidth):
  """Every division of every layer is tried with every other.

  Of these cases one misses, by 6 %, that smaller parts of a layer's map also
  save the next layer's time.
  """
  link = splitting.ring(len(rates), bandwidth, 1e-3)
  layers = {
    'wide': splitting.layer(*rates, features=6, output=900, kernel=500),
    'deep': splitting.layer(*rates, features=5, output=100, input=900, kernel=9000, reads='wide'),
    'small': splitting.layer(*[50 * r for r in rates], features=4, output=90, input=90),
  }
  costs = splitting.costs(layers, rest=0.5, link=link, other_bytes=50)
  divisions = [
    [None, *(n for n in itertools.product(range(count + 1), repeat=len(rates)) if sum(n) == count)]
    for count in (6, 5, 4)
  ]
  best = min(
    costs.step_seconds({p: n for p, n in zip(layers, plan, strict=True) if n})
    for plan in itertools.product(*divisions)
  )
  worst = 1.07 if (rates, bandwidth) == ((6, 3, 1), 1e3) else 1 + 1e-9
  assert costs.step_seconds(planner.best_plan(costs)) <= worst * best


def test_slower_links_split_less_and_finally_nothing():
  layers = {
    'map': splitting.layer(4, 4, output=9_000_000, kernel=100),
    'deep': splitting.layer(1, 1, output=1_000_000, input=500_000, kernel=100),
  }
  split = {}
  for bandwidth in (1e9, 2e5 * 2, 1e4):
    link = splitting.ring(2, bandwidth, 1e-4)
    costs = splitting.costs(layers, link=link, other_bytes=1000)
    plan = planner.best_plan(costs)
    split[bandwidth] = set(plan)
    assert costs.step_seconds(plan) <= costs.step_seconds({})
  assert list(split.values()) == [{'map', 'deep'}, {'deep'}, set()]


def test_shares_follow_rates_in_whole_multiples():
  costs = splitting.costs({'a': splitting.layer(3, 1, features=100)}, multiple=8)
  assert planner.balanced_counts(costs, 'a', (0, 1), 100, (0, 0)) == (76, 24)
  assert planner.balanced_counts(costs, 'a', (0,), 100, (0, 0)) == (100, 0)


def test_a_layer_is_split_for_what_it_saves_the_next():
  """Alone it would gain 0.5 s of work, and lose 0.6 s to its gather."""
  link = CollectiveCost((0.0, 1e-3), (0.0, 2e-3))
  layers = {
    'first': splitting.layer(24, 24, output=600),
    'second': splitting.layer(2, 2, output=600, input=600, reads='first'),
  }
  costs = splitting.costs(layers, rest=1.0, link=link)
  plan = planner.best_plan(costs)
  assert plan == {'first': (12, 12), 'second': (12, 12)}
  # The operand's gradient: 0.6 s in place of 1.2 s.
  assert costs.step_seconds(plan) == pytest.approx(1 + 1.1 + 6 + 0.6 + 0.6)
  assert costs.step_seconds({'second': (12, 12)}) == pytest.approx(1 + 1 + 6 + 0.6 + 1.2)


def test_equal_parts_need_no_whole_multiples():
  """In eights, one of two devices would have 12 of 20 features."""
  layers = {'conv': splitting.layer(4, 4, features=20)}
  costs = splitting.costs(layers, rest=1.0, multiple=8)
  assert planner.best_plan(costs) == {'conv': (10, 10)}


def test_a_slow_device_may_be_left_out():
  link = splitting.ring(2, 1e4, 1e-3)
  layers = {'a': splitting.layer(100, 0.1, output=10, input=10, kernel=10)}
  costs = splitting.costs(layers, link=link)
  assert planner.best_plan(costs) == {'a': (24, 0)}
  assert any(
    'computed by device 0' in line for line in planner.messages(costs, planner.best_plan(costs))
  )


def test_each_use_of_a_layer_starts_collectives():
  once = splitting.costs({'a': splitting.layer(4, 4, output=600, input=60)}, link=_LINK)
  layer = dataclasses.replace(once.layers['a'], uses=4)
  often = dataclasses.replace(once, layers={'a': layer})
  plan = {'a': (12, 12)}
  assert often.step_seconds(plan) - once.step_seconds(plan) == pytest.approx(3 * (0.5 + 0.25))


def test_the_messages_say_where_a_plan_is_slower_than_one_device():
  link = splitting.ring(2, 1e6, 1e-4)
  layers = {'a': splitting.layer(100, 0.1, output=10, input=10, kernel=10)}
  # The rest is slow on the second device, too.
  costs = dataclasses.replace(splitting.costs(layers, link=link), unsplit=(1.24, 340.0))
  plan = planner.best_plan(costs)
  assert plan and costs.step_seconds(plan) > costs.alone / 0.95
  assert planner.messages(costs, plan)[-1] == ('plan     device 0 alone would be faster')


def test_the_messages_say_that_nothing_is_split():
  link = splitting.ring(2, 1.0, 1.0)
  costs = splitting.costs({'a': splitting.layer(4, 2, output=900)}, link=link)
  lines = planner.messages(costs, planner.best_plan(costs))
  assert 'nothing is split' in lines[-2]
  assert lines[-1] == 'plan     device 0 alone would be faster'


# A plan's text.


def test_a_plan_is_read_as_it_is_written():
  text = 'conv1=250,250; stage1_block1/conv2=3,0'
  plan = split_lib.parse(text)
  assert str(plan) == text
  assert plan.counts('conv1', 500, 2) == (250, 250)
  assert plan.counts('conv9', 500, 2) is None
  assert plan.layers == ('conv1', 'stage1_block1/conv2')
  assert str(split_lib.parse('nothing')) == 'nothing'
  assert split_lib.parse('nothing').layers == ()


@pytest.mark.parametrize(
  'text', ['conv1', 'conv1=1,2;', 'a=1,-2', 'a=x', '=', 'a=batch', 'a=1,2; a=2,1']
)
def test_a_text_that_is_no_plan_is_refused(text):
  builders.assert_refused(['expected a text such as'], split_lib.parse, text)


def test_counts_of_another_network_are_refused():
  builders.assert_refused(['expected 2 numbers, 7 in'], split_lib.parse('a=3,3').counts, 'a', 7, 2)
