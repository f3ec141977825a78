"""Networks to export, with the outputs that evaluation gives."""

import jax
import numpy as np

from anp_jax import config as config_lib
from anp_jax.checkpoint import trained as trained_lib
from anp_jax.checkpoint.weights import initial, weights_source
from anp_jax.config import command_line
from anp_jax.data import vocabulary as vocabulary_lib
from anp_jax.parallel import state as state_lib
from anp_jax.training import objective as objective_lib
from tests import builders, layer_references as references

SIDE = 32
PAIRS = vocabulary_lib.Vocabulary(
  tuple(f'{a}_{n}' for n in ('car', 'dog') for a in ('old', 'red', 'shy'))
)


def trained(name='resnet18', words=PAIRS, width=4, gain=1.69, scales=(0.3, 0.6), **keys):
  """A network with weights and statistics that no initialisation gives."""
  config = command_line.load('configs/resnet_anp.py:tiny', {})
  settings = {'model__name': name, 'data__image_size': SIDE, 'data__resize': 40}
  if name.startswith('resnet'):
    settings['model__width'] = width
  changes = {k.replace('__', '.'): v for k, v in {**settings, **keys}.items()}
  config = builders.editable(config_lib.replaced(config, changes))
  objective = objective_lib.create(words, config)
  network = trained_lib.Trained('nowhere', config, words, 7, {}, {})
  shapes = jax.eval_shape(lambda: state_lib.variables(network.model('cpu'), config))
  assert objective.head.outputs == shapes['params']['head']['bias'].size
  variables = references.random_variables(shapes, gain, scales)
  params = variables.pop('params')
  return trained_lib.Trained('nowhere', config, words, 7, params, variables)


def images(count, seed=0, side=SIDE):
  random = np.random.default_rng(seed)
  coarse = random.integers(0, 256, (count, 4, 4, 3), np.uint8)
  return coarse.repeat(side // 4, 1).repeat(side // 4, 2)


def normalised(config, images):
  mean, std = np.array(config.data.mean), np.array(config.data.std)
  return ((images - mean) / std).astype(np.float32)


def logits(trained, images):
  """By the network itself, as evaluation applies it."""
  variables = {'params': trained.params, **trained.stats}
  pixels = normalised(trained.config, images)
  return jax.jit(lambda v, x: trained.model('cpu').apply(v, x, False))(variables, pixels)


def assert_read_back(trained, path):
  """Asserts that a file or folder of weights has all of a network's, to the bit."""
  tree = initial.flat({'params': trained.params, **trained.stats})
  source = weights_source.read(str(path), trained.config, tree)
  assert set(source.tensors) == set(tree) and not source.unused
  for name, value in tree.items():
    np.testing.assert_array_equal(source.tensors[name][1], value, name)
