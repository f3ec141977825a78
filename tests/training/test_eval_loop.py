"""Evaluation against a recount in NumPy, on any number of devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from anp_jax.config import strategy as strategy_lib
from anp_jax.parallel import mesh as mesh_lib, state as state_lib
from anp_jax.training import eval_loop, eval_step
from tests import builders, layer_references as references, programs, user_network

SIDE = 8
EXAMPLES = 37  # two batches of 16 and five rows of a third
BATCH = 16
NAMES = programs.NAMES
ADJECTIVE_IDS = np.arange(12) // 4
NOUN_IDS = np.arange(12) % 4


@pytest.fixture
def small(config):
  config.data.image_size = SIDE
  config.label_smoothing = 0.3  # a matter of training only
  return config


def _network():
  return user_network.SmallNet(len(NAMES), axis_name=mesh_lib.DATA)


def _variables(seed):
  """Parameters and statistics."""
  variables = references.random_variables(references.shapes(_network(), SIDE), seed=seed)
  return variables.pop('params'), variables


def _examples():
  random = np.random.default_rng(5)
  images = random.integers(0, 256, (EXAMPLES, SIDE, SIDE, 3), np.uint8)
  return images, random.integers(0, len(NAMES), EXAMPLES, np.int32)


def _batches(mesh, padding=0):
  """All examples in order; rows past them have weight 0 and any content."""
  images, labels = _examples()
  for start in range(0, EXAMPLES, BATCH):
    rows = np.arange(start, start + BATCH)
    batch = {
      'image': np.full((BATCH, SIDE, SIDE, 3), padding, np.uint8),
      'label': np.full(BATCH, padding % len(NAMES), np.int32),
      'row': np.arange(BATCH, dtype=np.int32),
      'weight': np.float32(rows < EXAMPLES),
      'vote': np.zeros(BATCH, np.int32),
    }
    rows = rows[rows < EXAMPLES]
    batch['image'][: len(rows)] = images[rows]
    batch['label'][: len(rows)] = labels[rows]
    yield programs.put(batch, mesh)


def _rows(config, variables=None):
  """The scores of each example, one at a time, in float64."""
  params, stats = variables or _variables(0)
  images, labels = _examples()
  pixels = (np.float64(images) - config.data.mean) / np.float64(config.data.std)
  logits = _network().apply({'params': params, **stats}, np.float32(pixels), False)
  result = []
  for scores, label in zip(np.float64(logits), labels):
    e = np.exp(scores - scores.max())
    softmax = e / e.sum()
    order = np.argsort(-scores)
    adjective = [softmax[ADJECTIVE_IDS == i].sum() for i in range(3)]
    noun = [softmax[NOUN_IDS == i].sum() for i in range(4)]
    result.append(
      {
        'label': label,
        'weight': 1,
        'logits': scores,
        'adjective': np.log(adjective),
        'noun': np.log(noun),
        'rank': order.tolist().index(label) + 1,
        'loss': -np.log(softmax[label]),
      }
    )
  return {name: np.stack([row[name] for row in result]) for name in result[0]}


def _recount(config, variables):
  """Each metric's mean in float64."""
  rows = _rows(config, variables=variables)
  means = {'loss': rows['loss']} | {f'anp_top{k}': rows['rank'] <= k for k in (1, 5, 10)}
  for name, ids in (('adjective', ADJECTIVE_IDS), ('noun', NOUN_IDS)):
    means[f'{name}_top1'] = rows[name].argmax(1) == ids[rows['label']]
  return {name: values.mean() for name, values in means.items()}


def _evaluator(config, devices, average=None, model=None, by_example=False):
  """The eval step and a state of `_variables(0)`, with averages if given."""
  mesh = mesh_lib.create(config, jax.devices()[:devices])
  params, stats = _variables(0)
  state = state_lib.TrainState(
    step=np.zeros((), np.int32),
    params=params,
    stats=stats,
    opt_state=(),
    average=dict(zip(('params', 'stats'), average)) if average else {},
  )
  specs = mesh_lib.param_specs(config.sharding, params, mesh)
  where = mesh_lib.shardings(mesh_lib.state_specs(state, specs), mesh)
  state = jax.device_put(state, where)
  steps = eval_step.EvalStep(
    config=config,
    mesh=mesh,
    model=model or _network(),
    objective=programs.objective(config),
    strategy_step=strategy_lib.find(config).build(config, specs),
    abstract_replica=builders.abstract(state),
  )
  jitted = steps.examples() if by_example else steps.sums()
  return jitted, state, mesh


def _assert_scores(got, want):
  assert set(got) == {*want, 'examples'}
  assert got['examples'] == EXAMPLES and isinstance(got['examples'], int)
  for name, value in want.items():
    # Counts are exact; the loss is a mean of float32 logits of order ten.
    np.testing.assert_allclose(got[name], value, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize('devices', [1, 8])
def test_every_example_once_on_any_number_of_devices(small, devices):
  want = _recount(small, _variables(0))
  # Nothing here is won or lost by all.
  assert all(0 < value < 1 for name, value in want.items() if name != 'loss')
  eval_step, state, mesh = _evaluator(small, devices)
  _assert_scores(eval_loop.run(eval_step, state, _batches(mesh)), want)
  # Whatever the padding holds.
  got = eval_loop.run(eval_step, state, _batches(mesh, padding=201))
  _assert_scores(got, want)


@pytest.mark.parametrize('devices', [1, 4])
def test_rows_of_each_example_on_any_number_of_devices(small, devices):
  step, state, mesh = _evaluator(small, devices, by_example=True)
  scores, rows = eval_loop.examples(step, state, _batches(mesh, 201), EXAMPLES)
  _assert_scores(scores, _recount(small, _variables(0)))
  assert sorted(rows) == ['adjective', 'label', 'logits', 'noun', 'weight']
  for name, values in rows.items():
    # Logits of order ten in float32, and logarithms of their softmax; labels are exact.
    np.testing.assert_allclose(values, _rows(small)[name], rtol=2e-5, atol=2e-5, err_msg=name)


def test_an_example_that_cannot_be_read_has_weight_0(small):
  """In any batch, also a full one; the others are scored without it."""
  step, state, mesh = _evaluator(small, 4, by_example=True)
  weights = np.ones(EXAMPLES, np.float32)
  weights[[2, 17, 18, EXAMPLES - 1]] = 0
  batches = []
  for start, batch in zip(range(0, EXAMPLES, BATCH), _batches(mesh)):
    part = np.zeros(BATCH, np.float32)
    part[: EXAMPLES - start] = weights[start : start + BATCH]
    batches.append(batch | {'weight': jax.device_put(part, batch['weight'].sharding)})
  scores, rows = eval_loop.examples(step, state, batches, EXAMPLES)
  np.testing.assert_array_equal(rows['weight'], weights)
  assert scores['examples'] == weights.sum()
  loss = _rows(small)['loss'][weights > 0].mean()
  np.testing.assert_allclose(scores['loss'], loss, rtol=1e-6)


def test_logical_shards_are_scored_with_the_same_bits_on_all_devices(small):
  small.strategy.name, small.strategy.logical_shards = 'invariant', 4
  results = []
  for devices in (1, 4):
    step, state, mesh = _evaluator(small, devices, by_example=True)
    results.append(eval_loop.examples(step, state, _batches(mesh), EXAMPLES))
    eval_step, state, mesh = _evaluator(small, devices)
    got = eval_loop.run(eval_step, state, _batches(mesh))
    assert got == results[-1][0]
  (scores, rows), (other_scores, other_rows) = results
  _assert_scores(scores, _recount(small, _variables(0)))
  assert scores == other_scores
  for name, values in rows.items():
    # As above.
    np.testing.assert_allclose(values, _rows(small)[name], 2e-5, 2e-5, err_msg=name)
  assert rows.keys() == other_rows.keys()
  for name in rows:
    np.testing.assert_array_equal(rows[name], other_rows[name], err_msg=name)


def test_an_example_that_cannot_be_scored_is_never_right(small):
  step, state, mesh = _evaluator(small, 2, model=_NanOnBlank(), by_example=True)
  batches = list(_batches(mesh))
  batches[0] = dict(batches[0], image=jnp.zeros_like(batches[0]['image']))
  scores, rows = eval_loop.examples(step, state, batches, EXAMPLES)
  assert np.isnan(rows['logits'][:BATCH]).all()
  assert np.isfinite(rows['logits'][BATCH:]).all()
  assert scores['anp_top10'] == (_rows(small)['rank'][BATCH:] <= 10).sum() / EXAMPLES


def test_averaged_weights_and_statistics_are_what_is_scored(small):
  want = _recount(small, _variables(1))
  assert want != _recount(small, _variables(0))
  eval_step, state, mesh = _evaluator(small, 2, average=_variables(1))
  _assert_scores(eval_loop.run(eval_step, state, _batches(mesh)), want)


def test_divided_parameters_are_scored_whole(small):
  small.sharding = (('.*', 'fsdp'),)
  eval_step, state, mesh = _evaluator(small, 4)
  assert not state.params['head']['kernel'].is_fully_replicated
  _assert_scores(eval_loop.run(eval_step, state, _batches(mesh)), _recount(small, _variables(0)))


class _NanOnBlank:
  """The network, but NaN on images of a single color."""

  def apply(self, variables, images, train):
    logits = _network().apply(variables, images, train)
    blank = (images == images[:, :1, :1]).all((1, 2, 3))
    return jnp.where(blank[:, None], jnp.nan, logits)


def test_padding_that_is_not_finite_counts_for_nothing(small):
  eval_step, state, mesh = _evaluator(small, 2, model=_NanOnBlank())
  _assert_scores(eval_loop.run(eval_step, state, _batches(mesh)), _recount(small, _variables(0)))


def test_sums_over_batches_are_exact():
  """A float32 total would stop counting at 2^24."""
  batches_seen = []

  def eval_step(params, stats, batch):
    batches_seen.append((params, stats, batch))
    return {'anp_top1': jnp.float32(batch), 'weight': jnp.float32(2**23)}

  state = state_lib.TrainState(0, 'params', 'stats', (), {})
  hits = [2**23, 2**23 - 1, 2**23 - 2, 1]
  got = eval_loop.run(eval_step, state, iter(hits))
  assert got == {'anp_top1': sum(hits) / 2**25, 'examples': 2**25}
  assert batches_seen == [('params', 'stats', h) for h in hits]


def test_an_empty_set_scores_nothing():
  assert eval_loop.run(None, state_lib.TrainState(0, {}, {}, (), {}), []) == {'examples': 0}
