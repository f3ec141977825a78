"""Networks against Hugging Face transformers and closed forms."""

import functools
import pathlib
import subprocess
import sys
import textwrap

from flax import linen as nn, traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from anp_jax import config as config_lib, models
from anp_jax.checkpoint.weights import naming
from anp_jax.models import resnet

# With 1,000 classes, as torchvision publishes them.
PARAMETERS = {18: 11_689_512, 34: 21_797_672, 50: 25_557_032, 101: 44_549_160, 152: 60_192_808}
CLASSES = 10
WIDTH = 8


def _net(depth, classes=CLASSES, **fields):
  stages, bottleneck = resnet.DEPTHS[depth]
  return resnet.ResNet(classes, stages, bottleneck, **{'width': WIDTH, **fields})


def _shapes(module, side=32):
  images = jax.ShapeDtypeStruct((1, side, side, 3), jnp.float32)
  return jax.eval_shape(functools.partial(module.init, train=False), jax.random.key(0), images)


def _count(tree):
  return sum(int(np.prod(x.shape)) for x in jax.tree.leaves(tree))


def _fill(shapes, seed=0):
  """Small random weights, the same whatever the generator of JAX."""
  random = np.random.default_rng(seed)
  return jax.tree.map(lambda s: (0.1 * random.normal(size=s.shape)).astype(s.dtype), shapes)


@pytest.mark.parametrize('depth', PARAMETERS)
def test_parameter_counts(depth):
  variables = _shapes(_net(depth, 1000, width=64))
  assert _count(variables['params']) == PARAMETERS[depth]


def _from_theirs(state, depth):
  """Their state_dict as our variables; every entry must be used."""
  # Copies: their training pass writes into the buffers themselves.
  state = {k: v.numpy().copy() for k, v in state.items()}
  values = {}
  for name in traverse_util.flatten_dict(dict(_shapes(_net(depth))), sep='/'):
    value = state.pop(naming.published_name(name, naming.TRANSFORMERS))
    values[name] = naming.from_published(name, value)
  assert all(name.endswith(naming.UNUSED) for name in state), state.keys()
  return traverse_util.unflatten_dict(values, sep='/')


def _their_network(depth, torch, transformers):
  torch.manual_seed(depth)
  stages, bottleneck = resnet.DEPTHS[depth]
  wider = 4 if bottleneck else 1
  network = transformers.ResNetForImageClassification(
    transformers.ResNetConfig(
      embedding_size=WIDTH,
      hidden_sizes=[WIDTH * wider * 2**i for i in range(4)],
      depths=list(stages),
      layer_type='bottleneck' if bottleneck else 'basic',
      num_labels=CLASSES,
    )
  )
  # Random scales and statistics: at 1 and 0 a swap would not show. Scales are
  # low, so that 16 blocks leave logits of order one.
  with torch.no_grad():
    for name, value in network.state_dict().items():
      if value.ndim == 1 and value.is_floating_point():
        spread = torch.rand(value.shape)
        positive = name.endswith(('normalization.weight', 'running_var'))
        value.copy_(0.3 + spread / 2 if positive else spread - 0.5)
  return network


@pytest.mark.slow
# Depth 50 is also that of test_weights_naming.py.
@pytest.mark.parametrize('depth', [18, pytest.param(50, marks=pytest.mark.soak)])
def test_resnet_equals_transformers(depth):
  torch = pytest.importorskip('torch')
  transformers = pytest.importorskip('transformers')
  reference = _their_network(depth, torch, transformers)
  variables = _from_theirs(reference.state_dict(), depth)
  # One group of the whole batch, and torch's momentum of 0.1 for the new.
  ours = _net(depth, group=0, momentum=0.9)
  expected = _shapes(ours)
  assert jax.tree.map(jnp.shape, variables) == jax.tree.map(jnp.shape, dict(expected))
  random = np.random.default_rng(0)
  images = random.normal(size=(4, 64, 64, 3)).astype(np.float32)
  pixels = torch.from_numpy(images.transpose(0, 3, 1, 2).copy())

  with torch.no_grad():
    want = reference.eval()(pixels).logits.numpy()
    got = jax.jit(lambda v, x: ours.apply(v, x, False))(variables, images)
    # Logits of order one, through up to 53 float32 convolutions summed in
    # another order: about 1e-6 was seen.
    assert 0.1 < want.std() < 10
    assert np.abs(got - want).max() <= 1e-4

    want = reference.train()(pixels).logits.numpy()
    got, new = jax.jit(lambda v, x: ours.apply(v, x, True, mutable=['batch_stats']))(
      variables, images
    )
    assert 0.1 < want.std() < 10
    assert np.abs(got - want).max() <= 1e-4

  # The running statistics that the training pass leaves behind. Theirs are of
  # the unbiased variance: n / (n - 1) of ours, n values a channel.
  after = _from_theirs(reference.state_dict(), depth)['batch_stats']
  leaves = traverse_util.flatten_dict(variables['batch_stats'])
  for path in {path[:-1] for path in leaves}:
    old, updated, other = variables['batch_stats'], new['batch_stats'], after
    for name in path:
      old, updated, other = old[name], updated[name], other[name]
    np.testing.assert_allclose(updated['mean'], other['mean'], atol=1e-4)
    count = len(images) * _map_side(path, depth == 50) ** 2
    unbiased = (updated['var'] - 0.9 * old['var']) * count / (count - 1)
    np.testing.assert_allclose(0.9 * old['var'] + unbiased, other['var'], rtol=1e-3, atol=1e-4)


def _map_side(path, bottleneck):
  """Pixels a side of what a norm sees, of images of 64."""
  if path[0] == 'stem_norm':
    return 32
  stage, block = (int(part[5:]) for part in path[0].split('_'))
  side = 16 >> (stage - 1)
  # v1.5: the first 1x1 of a bottleneck that strides still sees the larger map.
  larger = bottleneck and path[1] == 'norm1' and stage > 1 and block == 1
  return 2 * side if larger else side


@pytest.mark.parametrize('version', ['v1.5', 'v1'])
def test_where_a_bottleneck_strides(version):
  module = resnet.ResNet(CLASSES, (1, 1), True, width=WIDTH, version=version)
  variables = _shapes(module)
  # Which version it is does not change one parameter.
  plain = resnet.ResNet(CLASSES, (1, 1), True, width=WIDTH)
  assert _count(variables['params']) == _count(_shapes(plain)['params'])
  images = jax.ShapeDtypeStruct((2, 64, 64, 3), jnp.float32)
  _, state = jax.eval_shape(
    lambda v, x: module.apply(v, x, False, capture_intermediates=True, mutable=['intermediates']),
    variables,
    images,
  )
  block = state['intermediates']['stage2_block1']
  sides = [block[f'conv{i}']['__call__'][0].shape[1] for i in (1, 2, 3)]
  # A map of 16 pixels enters; v1.5 keeps it through the first 1x1.
  assert sides == ([16, 8, 8] if version == 'v1.5' else [8, 8, 8])
  assert block['shortcut_conv']['__call__'][0].shape == (2, 8, 8, 8 * WIDTH)
  first = state['intermediates']['stage1_block1']
  assert first['conv3']['__call__'][0].shape == (2, 16, 16, 4 * WIDTH)


@pytest.mark.parametrize('zero_init', [True, False])
@pytest.mark.parametrize('depth', [18, 50])
def test_zero_init_zeroes_the_last_scale_only(depth, zero_init):
  module = _net(depth, zero_init=zero_init)
  last = 'norm3' if depth == 50 else 'norm2'

  def scales(key):
    params = module.init(key, jnp.zeros((1, 32, 32, 3)), False)['params']
    # Only these: XLA drops the random kernels, which take long to compile.
    return {
      (block, norm): leaves['scale']
      for block, modules in params.items()
      if 'block' in block
      for norm, leaves in modules.items()
      if 'norm' in norm
    }

  scale_means = jax.jit(scales)(jax.random.key(0))
  assert any(norm == last for _, norm in scale_means)
  for (block, norm), scale in scale_means.items():
    want = 0.0 if zero_init and norm == last else 1.0
    np.testing.assert_array_equal(scale, want, err_msg=f'{block}/{norm}')


def test_kernels_start_as_he_et_al_say():
  # Over the fan-out, as torchvision: 3 * 3 * 64 of a 3x3 with 64 features.
  layer = resnet.layers.Conv(64, 3)
  kernel = layer.init(jax.random.key(0), jnp.zeros((1, 4, 4, 128)))
  spread = np.std(kernel['params']['kernel'])
  # 73,728 samples: the estimate's own error is 0.3 %.
  np.testing.assert_allclose(spread, np.sqrt(2 / (9 * 64)), rtol=0.02)


def test_bfloat16_computes_on_float32_parameters():
  module = _net(18, dtype='bfloat16', group=2)
  variables = _fill(_shapes(module))
  leaves = jax.tree.leaves(variables)
  assert all(x.dtype == np.float32 for x in leaves)
  images = jnp.ones((4, 32, 32, 3), 'bfloat16')

  def apply(v, x):
    return module.apply(
      v, x, True, capture_intermediates=True, mutable=['batch_stats', 'intermediates']
    )

  logits, state = jax.eval_shape(apply, variables, images)
  assert logits.dtype == jnp.float32
  assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(state['batch_stats']))
  inside = state['intermediates']
  for name in ('stem_conv', 'stem_norm', 'stage1_block1', 'stage4_block2'):
    assert inside[name]['__call__'][0].dtype == jnp.bfloat16, name


@pytest.mark.parametrize('depth', [34, 101])
def test_create_hands_every_choice_down(config, depth):
  config.model.name = f'resnet{depth}'
  config.model.width = 24
  config.model.version = 'v1'
  config.model.zero_init = False
  config.model.norm_group = 4
  config.model.norm_momentum = 0.8
  config.model.dtype = 'bfloat16'
  module = models.create(config, 7, 'gpu', 'data')
  want = resnet.ResNet(
    num_classes=7,
    stages=resnet.DEPTHS[depth][0],
    bottleneck=depth >= 50,
    width=24,
    version='v1',
    zero_init=False,
    group=4,
    momentum=0.8,
    axis_name='data',
    dtype='bfloat16',
    param_dtype='float32',
    platform='gpu',
  )
  assert module == want


def test_a_module_of_the_users_own_is_made_with_the_fields_it_has(config):
  config.model.name = 'tests.user_network:SmallNet'
  config.model.dtype = 'bfloat16'
  module = models.create(config, 7, 'cpu', 'data')
  # It has no field `platform` and `drop` is its own.
  assert (module.num_classes, module.dtype, module.axis_name, module.drop) == (
    7,
    'bfloat16',
    'data',
    0.5,
  )
  variables = _shapes(module)
  # 3*3*3*6 + 6, 2*6, 3*3*6*8 + 8, 8*7 + 7.
  assert _count(variables['params']) == 168 + 12 + 440 + 63
  logits = module.apply(_fill(variables), jnp.ones((2, 32, 32, 3)), False)
  assert logits.shape == (2, 7)


def test_a_users_module_is_found_from_the_folder_a_run_starts_in(config, tmp_path):
  """What main.py is for Python: the folder of the script is on the path."""
  root = str(pathlib.Path(__file__).resolve().parents[2])
  script = """
    from anp_jax import config as config_lib
    from anp_jax import models

    config = config_lib.base()
    config.model.name = 'tests.user_network:SmallNet'
    print(models.create(config, 5, 'cpu').num_classes)
  """
  result = subprocess.run(
    [sys.executable, '-c', textwrap.dedent(script)],
    cwd=root,
    capture_output=True,
    text=True,
    timeout=120,
  )
  assert result.stdout.strip() == '5', result.stderr


@pytest.mark.parametrize(
  'name, message',
  [
    ('tests.no_such_module:Net', "No module named 'tests.no_such_module'"),
    ('tests.user_network:SmalNet', "no 'SmalNet'.*did you mean 'SmallNet'"),
    ('tests.models.test_models:WithoutClasses', 'needs a field num_classes'),
    ('os:_exit', 'inherits from flax.*Module'),
    ('tests.user_network:', 'expected package.module:Class'),
  ],
)
def test_what_cannot_be_made_is_said_in_one_line(config, name, message):
  config.model.name = name
  with pytest.raises(config_lib.ConfigError, match=message) as error:
    models.create(config, 5, 'cpu')
  assert f'config.model.name={name!r}' in str(error.value)
  assert '\n' not in str(error.value)


class WithoutClasses(nn.Module):
  """What a user may point at by mistake."""

  features: int
