"""The reference of a ring's models: each trained by itself."""

import math

import jax
import numpy as np

from anp_jax import config as config_lib
from anp_jax.data import sources
from anp_jax.data.input import stream as stream_lib
from anp_jax.parallel import mesh as mesh_lib
from anp_jax.runtimes.model_ring import (
  candidates as candidates_lib,
  leaderboard as leaderboard_lib,
  ring as ring_lib,
  schedule as schedule_lib,
)
from anp_jax.training import build, objective as objective_lib, run_spec
from tests import builders, launching

EXAMPLES, BATCH, LAPS = 70, 4, 3
MODELS = (
  'seed=1',
  'seed=2; optimizer.learning_rate=0.1; optimizer.momentum=0.5',
  # Batch norm and dropout.
  'model.name=tests.user_network:SmallNet; ema=0.9',
  'optimizer.name=adam; optimizer.learning_rate=1e-3; data.mixup=0.2',
)


def config(models=MODELS, **overrides):
  """Returns the config of a ring of tiny models on synthetic images."""
  result = builders.config(
    {
      'batch_size': BATCH,
      'duration': f'{LAPS} epochs',
      'model.name': 'tests.user_network:PlainNet',
      'model.norm_group': 2,
      'data.source': 'synthetic',
      'data.image_size': 8,
      'data.resize': 8,
      'data.synthetic_examples': EXAMPLES,
      'data.synthetic_classes': 12,
      'eval.batch_size': 32,
      'log.every': '5 steps',
      'log.tensorboard': False,
      'strategy.name': 'model_ring',
      'strategy.models': models,
      **overrides,
    }
  )
  return result


def leaderboard(workdir, config, laps):
  """Returns the leaderboard of a workdir, with a score after every lap."""
  return leaderboard_lib.Leaderboard(
    str(workdir),
    candidates_lib.create(config, 1),
    ring_lib.Laps(laps, 1),
    config.checkpoint.best_metric,
  )


_ALONE = {}  # results of `alone`, which several tests of a module need


def alone(config, index, sizes, laps, devices):
  """Returns the leaves of a model trained by itself, shard after shard.

  Written without the ring's own bookkeeping: which batches it sees follows from
  the sizes of the shards alone.
  """
  model_config = candidates_lib.create(config, 1)[index].config
  key = config_lib.to_json(model_config), tuple(sizes), laps, devices
  if key not in _ALONE:
    _ALONE[key] = _alone(config, model_config, *key[1:])
  return _ALONE[key]


def _alone(config, model_config, sizes, laps, devices):
  source = sources.open_source(config, training=True)
  shards = schedule_lib.data_shards(source, sizes)
  assert [len(shard) for shard in shards] == list(sizes)
  total = sum(math.ceil(laps * n / model_config.batch_size) for n in sizes)
  build_config = config_lib.replaced(model_config, {'duration': f'{total} steps'})
  mesh = mesh_lib.create(config, jax.devices()[:devices])
  objective = objective_lib.create(source.vocabulary, model_config)
  program = build.create(
    run_spec.RunSpec(build_config, mesh, objective, model_config.batch_size, len(source))
  )
  state = program.new_state()
  feeds = []
  for number, shard in enumerate(shards):
    seed = schedule_lib.stream_seed(model_config.seed, number)
    stream_config = config_lib.replaced(model_config, {'seed': seed})
    stream = stream_lib.Stream(stream_config, mesh_lib.batch_sharding(mesh))
    feeds.append(stream.train(shard, model_config.batch_size, 0))
  steps = [0] * len(sizes)
  for lap in range(1, laps + 1):
    for number, size in enumerate(sizes):
      whole_batches = lap * size / model_config.batch_size
      until = math.ceil(whole_batches) if lap == laps else int(whole_batches)
      while steps[number] < until:
        state, _ = program.train_step(state, next(feeds[number]))
        steps[number] += 1
  for feed in feeds:
    feed.close()
  assert int(state.step) == total
  return jax.device_get(jax.tree.leaves(state))


def ended(workdir, index):
  """Returns a model's leaves in its last checkpoint, by name."""
  leaves = launching.weights(workdir / 'models' / f'{index:03}')
  return {'/'.join(k.split('/')[1:]): v for k, v in leaves.items()}


def assert_same(workdir, config, sizes, indices, laps=LAPS, devices=1):
  """Compares every leaf of models' last checkpoints, bit for bit."""
  for index in indices:
    leaves = list(ended(workdir, index).values())
    expected = alone(config, index, sizes, laps, devices)
    assert len(leaves) == len(expected) > 10
    for pair in zip(by_content(leaves), by_content(expected)):
      np.testing.assert_array_equal(*pair)


def by_content(leaves):
  """Sorts leaves, which readers walk in different orders."""
  leaves = [np.asarray(x) for x in leaves]
  return sorted(leaves, key=lambda x: (x.shape, str(x.dtype), x.tobytes()))
